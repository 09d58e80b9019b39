"""Runs the blocks of one model while autograd drives: a forward at a time, and whatever backward autograd runs.

::

    forward     for shard j:                 in a slot; shard j+1 is being loaded
                  for micro-batch i:         a cell: its block on the weights of the visit
    backward    (autograd)  cells of shard j, the last first; then the visit's backward:
                                             gradients of shard j leave while cells of shard j-1 run

Ready nodes of a graph run by the order in which they were made, the latest first. So where a forward ran shard by shard
over all micro-batches, backward comes back shard by shard: each shard is loaded once per pass, and its gradients leave
once, whatever the number of micro-batches.

After an exception in either pass no copy is running, and the model can be used again.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offload.engine.block import RUNS_NOTED, Block, has_cache
from offload.engine.boundaries import Boundaries
from offload.engine.cell import UNWATCHED, Cell, Watch
from offload.engine.homes import ModelHomes
from offload.engine.observed import CellPlace, ObservedStep, Recorder
from offload.engine.passes import Forward, Slots, before
from offload.engine.structure import Structure
from offload.engine.visit import Visit
from offload.engine.weight_writes import AssignedData
from offload.engine.weights import Weights
from offload.planning.plan import Kind
from offload.streaming.quantised import check_frozen
from offload.streaming.shard import Shard
from offload.streaming.stored_gradients import set_gradient
from offload.streaming.streamer import Streamer
from pipe.freed import Life, Living
from pipe.nested import flatten, tensors_in
from pipe.process import check_process
from pipe.recompute.phase import is_checkpointing, is_recomputing
from pipe.recompute.region import Region
from pipe.recompute.rerun import refuse_cached_parametrizations
from pipe.recompute.thread_state import ThreadState, close_contexts
from pipe.torch_private.autograd import (
    accumulates_everywhere,
    at_end_of_backward,
    backward_number,
    has_hooks,
    in_backward,
    is_requested,
    run_hooks_with_gradient_only,
    will_run,
)
from pipe.torch_private.tensors import storage_uses

__all__ = ["Engine"]

#: Forwards in which a model that is not planned measures what ``estimate()`` needs.
STEPS_OBSERVED = 3
#: Whether the graph of a cell of a shard and micro-batch is kept.
Keeps = Callable[[int, int], bool]

T = TypeVar("T")


class _Pass:
    """One forward: its order of shards, and the visits of its graph with their tokens."""

    def __init__(self, forward: Forward, keeps: Keeps, recorders: list[Recorder] | None) -> None:
        self.forward, self.keeps, self.recorders = forward, keeps, recorders
        self.visits: dict[int, tuple[Visit, Tensor | None]] = {}
        #: The nodes of the visits in the graph.
        self.nodes: list[Any] = []
        #: Of what its graph saves for the backward.
        self.life = Life()
        #: Whether its first cell was announced, see :meth:`Engine.expect`.
        self.announced = False
        #: What observes it, if the memory of the model is planned.
        self.step: ObservedStep | None = None
        #: Where the inputs of its recomputed cells are, if they may leave memory.
        self.boundaries: Boundaries | None = None


class _Backward:
    """A running backward. Autograd frees it with the callback that would end it: also when it fails."""

    def __init__(self, step: ObservedStep | None) -> None:
        self.step = step


class Engine:
    """Runs blocks whose weights are streamed by ``streamer``.

    Args:
        blocks: for each shard, its blocks: named layers that run one by one, or consecutive ones that run together.
        recompute: whether cells are recomputed in backward, except those for which ``keeps`` says otherwise.
    """

    def __init__(
        self,
        streamer: Streamer,
        blocks: Sequence[Sequence[Sequence[tuple[str, nn.Module]]]],
        *,
        device: torch.device,
        recompute: bool,
        assigned: AssignedData,
        structure: Structure,
        owner: ModelHomes,
        numbers: Sequence[tuple[int, int]] = (),
        calls: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self.streamer = streamer
        self.device = device
        self.recompute = recompute
        self._slots = Slots(streamer)
        self._assigned, self._structure = assigned, structure
        #: What a backward needs after the model was deleted: its end closes lanes and homes.
        self._owner = owner
        #: Forwards so far, with a backward and without, of which the first are observed.
        self._observed = {True: 0, False: 0}
        self._forwards: Living[list[Any]] = Living()
        #: Of the last forward.
        self._last: weakref.ref[Life] | None = None
        self._made_in = os.getpid()
        self._weights = [Weights(shard, device, owner.public) for shard in streamer.shards]
        #: Whether parameters are stored in fewer bytes than their gradients.
        self._stores_rounded = any(s.form is not None for weights in self._weights for _, s in weights.owners)
        self.blocks = [
            [
                Block(
                    self._weights[j],
                    Region(layers, [device]),
                    f"shard {j}",
                    place=(k, len(several)),
                    select=owner.policy.keep,
                )
                for k, layers in enumerate(several)
            ]
            for j, several in enumerate(blocks)
        ]
        #: Blocks by the number that the model calls them by, and their own forwards.
        self.numbered = [self.blocks[j][k] for j, k in numbers]
        self._calls = calls
        self._local = threading.local()
        #: The shards that the last forward used, in order, with gradients and without.
        self._orders: dict[bool, Sequence[int]] = dict.fromkeys((True, False), range(len(blocks)))
        self._pass: _Pass | None = None
        self._backward: weakref.ref[_Backward] | None = None
        #: The visit whose weights backward used last, with its slot and views of that.
        self._visited: Visit | None = None
        self._visited_slot: Tensor | None = None
        self._visited_views: Sequence[Tensor] = []
        #: Gradients that belong to their parameters again when the backward ends.
        self._leaving: dict[nn.Parameter, Tensor] = {}
        #: Whether shards are updated in the running backward.
        self._updates = False

    #: Whether ranks of a mesh run the same passes.
    has_ranks = False

    def observe(self) -> None:
        """Called when homes have moved, and other steps than so far follow: the first ones are observed again."""
        self._observed = {True: 0, False: 0}
        for weights in self._weights:
            weights.homes_moved()

    def held(self) -> list[nn.Parameter]:
        """The parameters that this object holds, once for each reference."""
        found = [p for weights in self._weights for p in weights.parameters]
        return found + [p for several in self.blocks for block in several for _, p in block.region.watched.parameters]

    @property
    def running(self) -> bool:
        """Whether a forward or backward runs. A forward begins with its first cell: before it, homes may still move."""
        begun = self._pass is not None and bool(self._pass.forward.uses)
        return (begun and self._passes() > 0) or (self._backward is not None and self._backward() is not None)

    def _passes(self) -> int:
        """Number of running forwards of this model, in all threads."""
        return sum(
            frame.f_code is Engine.forward.__code__ and frame.f_locals.get("self") is self
            for top in sys._current_frames().values()
            for frame in _callers(top)
        )

    def clean_up(self) -> None:
        """Cleans up after a pass that failed while its cleanup was interrupted, if there is one."""
        dead = self._backward is not None and self._backward() is None
        if dead or (self._pass is not None and not self._passes()):
            self._cancel()

    def _cancel(self) -> None:
        """Cleans up after a pass that failed; again, if it was interrupted itself."""
        self.streamer.cancel()
        for weights in self._weights:
            weights.unbind()
        self._end()
        self._slots.act = None
        self._backward = None
        self._pass = None

    @property
    def in_forward(self) -> bool:
        """Whether a forward runs."""
        return self._pass is not None

    @property
    def draws(self) -> bool:
        """Whether any block draws random numbers in its present modes, or is not known not to."""
        return any(block.known().draws is not False for several in self.blocks for block in several)

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(self, run: Callable[[], T], keeps: Keeps | None = None, recorders: list[Recorder] | None = None) -> T:
        """Returns ``run()``, one forward, in which blocks may be run in any order and any number of times.

        A function, not a context: what follows a ``with`` statement may be interrupted before its context ends.
        ``recorders`` gets what records the saved tensors of each cell; None: nothing records them.
        """
        if self._pass is not None and self._passes() > 1:  # one is this
            raise RuntimeError(
                "this OffloadModel is in the middle of a forward; a layer or a hook of it called it again, or another "
                "thread did"
            )
        check_process(self._made_in, "this OffloadModel")
        self._owner.check_open()
        in_between = in_backward()
        if not in_between:
            self._check_structure()
        training = torch.is_grad_enabled()
        if training:
            refuse_cached_parametrizations(m for several in self.blocks for b in several for m in b.region.modules)
        settings = ThreadState.capture([self.device.type])
        try:
            dead = self._backward is not None and self._backward() is None
            if dead or self._pass is not None or self.streamer.must_cancel:
                self._cancel()  # which was interrupted
            if self.streamer.finish_step is not None:
                self.streamer.finish_step()
            # Of models that take turns, a recomputation must use the weights of its forward. Otherwise homes may have
            # been written since, also in ways that no version counts.
            shared = self.streamer.slot_pool.shared
            reuses = self._owner.weights_are_frozen or (shared and is_recomputing())
            if reuses:
                self.streamer.resident()  # evicts shards that were written since
            elif self._backward is None:
                self.streamer.release()
                self._assigned.store()
            order = Forward(self._orders[training], returns=training, repeats=shared and reuses, common=self.has_ranks)
            self._pass = this = _Pass(order, keeps or (lambda j, i: not self.recompute), recorders)
            if not in_between:
                self._last = weakref.ref(this.life)
            with self.streamer.slot_pool.turn(self.streamer):
                result = self._run_pass(run)
            self.streamer.wait_for_home_reads()
            if not in_between:
                self._orders[training] = this.forward.uses
            if this.step is not None and this.step.training:
                this.step.end_forward(result)
            elif this.step is not None:
                this.step.end()
            if this.forward.graphed and not in_between:
                self._forwards.add(this.life, this.nodes)
                if any(p.requires_grad for p in self._owner.outside):
                    self._check_before_outside(result, weakref.ref(this.life))
            self._pass = self._slots.act = None
            return result
        except BaseException as error:
            close_contexts(error)
            settings.restore()
            if in_between and self._backward is not None:
                self._pass = None  # a checkpoint ends its recomputation early by an exception, and backward goes on
            else:
                self._cancel()
            raise

    def _run_pass(self, run: Callable[[], T]) -> T:
        return run()

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """A context in which what is outside of the blocks is as the model's forward computes with it."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def calling(self, call: Callable[..., Any]) -> Iterator[None]:
        """A context in which blocks that a forward in this thread calls are run by ``call(number, args, kwargs)``."""
        self._local.call = call
        try:
            yield
        finally:
            self._local.call = None

    def call_block(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called in place of the forward of a block, which has this ``number``."""
        call = getattr(self._local, "call", None)
        if call is not None:
            return call(number, args, kwargs)
        if self._pass is not None:
            if not self._pass.announced:
                self.expect([flatten((args, kwargs))[0]])
            return self.run_numbered(number, args, kwargs)

        # Outside of the model's forward: by other code, or again in backward by a checkpoint of the model itself.
        def run() -> Any:
            self.expect([flatten((args, kwargs))[0]])
            return self.run_numbered(number, args, kwargs)

        return self.forward(run)

    def run_numbered(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], i: int = 0) -> Any:
        """Runs the block of this number within :meth:`forward`."""
        return self.run(self.numbered[number], self._calls[number], args, kwargs, i)

    def order_of(self, number: int) -> int:
        """The place of a block's shard in the order of the last forward."""
        order, j = self._orders[torch.is_grad_enabled()], self.numbered[number].weights.shard.index
        return order.index(j) if j in order else len(order)

    def _check_structure(self) -> None:
        """Refuses layers and parameters that were replaced; from now on the present modules and buffers count."""
        check_frozen(self._owner.quantised)
        if self._structure.check():
            self._find()

    def _find(self) -> None:
        for weights in self._weights:
            weights.find()
        for several in self.blocks:
            for block in several:
                block.region.find()

    def run(
        self, block: Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], i: int = 0
    ) -> Any:
        """Runs a block of micro-batch ``i`` within :meth:`forward`."""
        this = self._pass
        assert this is not None
        shard, known = block.weights.shard, block.known()
        j, in_place = shard.index, shard.in_place
        enabled = torch.is_grad_enabled()
        graph = enabled and (shard.trainable or _requires_grad((args, kwargs)))
        if this.forward.begin(j) and self.has_ranks:
            self._leave_order(block)
        if graph:
            this.forward.add_graph(j)
        self._slots.use(j, this.forward.following())
        keeps = enabled and (
            block.keeps
            or this.keeps(j, i)
            or (in_place and (block.writes or known.runs < RUNS_NOTED))
            or has_cache(args, kwargs)
        )
        cell = Cell(block, known, call, [] if in_place else block.weights.views(self.streamer.slot_pool))
        if this.step is not None:
            output = self._run_observed(this.step, this, cell, args, kwargs, i, graph=graph, keeps=keeps)
        else:
            if this.boundaries is not None and graph and (j or block.place[0]):
                cell.watch = Watch(entering=this.boundaries.hooks((j, i)))
            elif graph and this.recorders is not None:
                this.recorders.append(Recorder(shard, shard.slot if cell.views else None))
                cell.watch = Watch(this.recorders[-1].add)
            elif in_place and graph and shard.gradient_types.rounded:
                cell.watch = self._watch_in_place
            output = self._run(this, cell, args, kwargs, keeps=keeps)
        if enabled and not graph and _requires_grad(output):  # by what is neither a weight of its own nor an argument
            this.forward.add_graph(j)
        return output

    def _run(self, this: _Pass, cell: Cell, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, keeps: bool) -> Any:
        if not torch.is_grad_enabled():
            return cell.run(args, kwargs)
        if not (keeps and cell.watch is UNWATCHED and cell.block.weights.shard.in_place):
            cell.visit, cell.token = self._visit(this, cell.block.weights.shard.index)
        return cell.keep(args, kwargs) if keeps else cell.recompute(args, kwargs)

    def _run_observed(
        self,
        step: ObservedStep,
        this: _Pass,
        cell: Cell,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        i: int,
        *,
        graph: bool,
        keeps: bool,
    ) -> Any:
        shard, (k, blocks) = cell.block.weights.shard, cell.block.place
        slot = shard.slot if cell.views else None
        place = CellPlace(shard.index, k, blocks, i, kept=keeps and graph)
        step.enter(place, shard.first + k, (args, kwargs))
        recorder = step.recorder(shard, i, slot, keeps) if graph else None
        boundaries = this.boundaries
        cell.watch = Watch(
            None if recorder is None else recorder.add,
            partial(step.record_selected, place) if graph and self._owner.policy.keep else None,
            partial(self._begin_cell, step, None if keeps else boundaries, place),
            None if boundaries is None or not graph or not (shard.index or k) else boundaries.hooks((shard.index, i)),
        )
        uses = 0 if slot is None else storage_uses(slot)
        with step.forward(place):
            output = self._run(this, cell, args, kwargs, keeps=keeps)
        if recorder is not None:
            # An autograd function may keep a view of the weights where no hook sees it, and with it the slot.
            hidden = slot.numel() if slot is not None and storage_uses(slot) > uses else 0
            step.record(recorder, place, (args, kwargs), keeps=keeps, hidden=hidden)
        step.leave(place, output)
        return output

    @property
    def _watch_in_place(self) -> Watch:
        """For shards that are used where they rest, and whose gradients are rounded when the backward ends."""
        return Watch(begins=lambda visit: self._enter_backward(None, visit.uses, visit.life))

    def _begin_cell(self, step: ObservedStep, boundaries: Boundaries | None, place: CellPlace, visit: Visit) -> None:
        """Called when the backward of an observed cell begins, or goes on."""
        self._enter_backward(step, visit.uses, visit.life)  # shards that are used where they rest do not
        if not step.is_at(place):
            step.end_cell()
            self._views_in_backward(visit)  # what it waits for is no time of the cell
            if boundaries is not None and place.k == place.blocks - 1:
                boundaries.expect((place.j, place.i))
            step.backward(place)

    def expect(self, leaves: Sequence[Sequence[Any]]) -> None:
        """Called within :meth:`forward` before the first cell, with the leaves of the input of each micro-batch."""
        this = self._pass
        assert this is not None
        # What a checkpoint around the model saves is dropped at once; its second run must save the same.
        if this.announced or in_backward() or is_checkpointing():
            return
        this.announced = True
        tensors = [x for each in leaves for x in each if isinstance(x, Tensor)]
        trains = any(s.trainable for s in self.streamer.shards) or any(p.requires_grad for p in self._owner.outside)
        training = torch.is_grad_enabled() and (trains or any(x.requires_grad for x in tensors))
        self._observed[training] += 1
        watched = self._observed[training] <= STEPS_OBSERVED or self._owner.meter.tracer.is_recording
        plans = self._owner.plans
        if training and plans and not watched and self._owner.all_stays(leaves):
            this.keeps = lambda j, i: True
            return
        if training and self.recompute:
            this.boundaries = self._boundaries()
        if not (plans or watched):
            return
        this.step = step = ObservedStep(
            self._owner, leaves, training=training, idle=not any(True for _ in self._forwards)
        )
        if self.recompute:
            this.keeps = lambda j, i: (j, i) in step.kept
        self._slots.act = step.act
        if this.boundaries is not None:
            this.boundaries.act = step.act

    def _boundaries(self) -> Boundaries | None:
        owner = self._owner
        scratch, budget_bytes = owner.tier.scratch(), owner.steps.boundary_budget_bytes
        if scratch is None or math.isinf(budget_bytes):
            return None
        return Boundaries(scratch, owner.lanes.boundary, owner.meter, budget_bytes)

    def _visit(self, this: _Pass, j: int) -> tuple[Visit, Tensor | None]:
        """The visit of a shard in this pass, made at its first cell."""
        if j not in this.visits:
            uses, place, stores = this.forward.graphed, this.forward.place(j), self._assigned.stores
            views = self._views_in_backward
            visit = Visit(self._weights[j], uses, place, self._leave, views, this.life, stores, this.step)
            token = None if self.streamer.shards[j].in_place else visit.begin()
            if token is not None:
                this.nodes.append(token.grad_fn)
            this.visits[j] = visit, token
        return this.visits[j]

    # --- backward -----------------------------------------------------------------------------------------------

    def _views_in_backward(self, visit: Visit) -> Sequence[Tensor]:
        """The weights of a visit, on the slot that holds its shard now."""
        shard = visit.weights.shard
        if self._visited is visit and self._visited_slot is shard._slot:
            return self._visited_views
        self._enter_backward(visit.step, visit.uses, visit.life)
        if visit.checked != (number := backward_number()):
            visit.checked = number
            self._check_unchanged(visit)
            self._check_all_unchanged(visit.life())
        self._use_in_backward(visit)
        self._visited, self._visited_slot = visit, shard._slot
        self._visited_views = [] if shard.in_place else visit.weights.views(self.streamer.slot_pool)
        return self._visited_views

    def _use_in_backward(self, visit: Visit) -> None:
        self._slots.use(visit.weights.shard.index, before(visit.uses, visit.place))

    def _leave_order(self, block: Block) -> None:
        """Called before a cell that begins another shard than the forward before."""

    def _check_before_outside(self, outputs: Any, life: weakref.ref[Life]) -> None:
        """Makes a backward from the outputs compare weights before parameters outside of the blocks get gradients."""

        def check(_: Any) -> None:
            self._check_all_unchanged(life())
            if torch.is_grad_enabled() and accumulates_everywhere():
                optimizers = self.streamer.gradient_offload.optimizers
                measured = optimizers.clip or optimizers.in_backward is not None
                for node in self._nodes(life()):
                    if will_run(node) and _loses_graph(node.visit, measured=measured):
                        _refuse_graph()

        for node in {x.grad_fn for x in tensors_in(outputs) if x.grad_fn is not None}:
            node.register_prehook(check)

    def _nodes(self, life: Life | None) -> Sequence[Any]:
        """The nodes of the visits of a forward whose graph is still there."""
        return (None if life is None else self._forwards.get(life)) or ()

    def _check_all_unchanged(self, life: Life | None) -> None:
        """Compares the weights of all visits of a pass that a backward reaches with those of their forward.

        When it reaches the first one: a refusal must not come after gradients of others were stored.
        """
        number = backward_number()
        for node in self._nodes(life):
            visit: Visit = node.visit
            if visit.checked != number and will_run(node):
                visit.checked = number
                self._check_unchanged(visit)

    def _check_unchanged(self, visit: Visit) -> None:
        shard = visit.weights.shard
        if visit.stores == self._assigned.stores and visit.weights.at_home():
            assigned = []
        else:
            assigned = self._assigned.since(visit.stores, shard)
        if shard.versions() == visit.versions and not assigned:
            return
        versions = zip(shard.slices, visit.versions, shard.versions(), strict=True)
        changed = assigned or [s.name for s, then, now in versions if now != then]
        raise RuntimeError(
            f"parameter {', '.join(changed[:3])} of shard {shard.index} was "
            f"{'given other data' if assigned else 'changed in place'} between the forward and its backward, so the "
            f"gradient would belong to neither value; step the optimizer after the backward"
        )

    def _leave(
        self, visit: Visit, accumulators: Sequence[Any], gradients: list[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Sends the gradients of a shard home; returns those that autograd accumulates, or that were asked for."""
        self._enter_backward(visit.step, visit.uses, visit.life)
        if (step := visit.step) is not None:
            step.end_cell()
            step.act(Kind.DRAIN, visit.weights.shard.index)
        weights = visit.weights
        shard = weights.shard
        returned: list[Tensor | None] = [None] * len(gradients)
        home: list[Tensor | None] = [None] * len(weights.parameters)
        everywhere = accumulates_everywhere()
        # Squared norms are summed while gradients leave.
        accumulates = everywhere and not (self._updates or self.streamer.gradient_offload.optimizers.clip)
        stay = weights.gradients_stay()
        nbytes = 0
        for n, k in enumerate(visit.positions):
            gradient, parameter = gradients[n], weights.parameters[k]
            by_autograd = has_hooks(parameter) if everywhere else is_requested(accumulators[n])
            if gradient is None:
                if everywhere and by_autograd:
                    run_hooks_with_gradient_only(parameter)
            elif by_autograd and not everywhere and weights.owners[k][1].form is not None:
                raise RuntimeError(
                    f"gradients of parameters that torch.autograd.grad or backward(inputs=...) returns have the "
                    f"parameter's type, which is bfloat16 with store_dtype=: that of {weights.owners[k][1].name} would "
                    f"be rounded. Make the model without store_dtype"
                )
            elif by_autograd or (accumulates and stay[k] and gradient.device == parameter.device):
                stays = gradient.device == parameter.device and gradient.dtype == parameter.dtype
                returned[n] = gradient if stays else gradient.to(parameter.device, parameter.dtype)
                nbytes += gradient.numel() * gradient.element_size()
            elif everywhere and parameter.requires_grad:
                home[k] = gradient
            gradients[n] = None  # the lane, or autograd, is to free it
        if nbytes:
            self._owner.meter.bytes_stored += nbytes
        if self._updates or any(gradient is not None for gradient in home):
            if torch.is_grad_enabled():
                _refuse_graph()
            self._offload(shard, home)
        if self._updates:
            visit.checked = backward_number()  # from now on its weights are others
            self.streamer.update_in_backward(shard.index)
            if step is not None:
                step.act(Kind.UPDATE_IN_BACKWARD, shard.index)
        if not (visit.place or self._owner.weights_are_frozen):
            self.streamer.slot_pool.prefetch_previous(self.streamer)
        return returned

    def _offload(self, shard: Shard, gradients: list[Tensor | None]) -> None:
        """Starts to store gradients. Until the backward ends, ``.grad`` is what autograd makes of other uses.

        Without that, autograd would add a gradient of code outside of the blocks while a lane writes.
        """
        parameters = [shard.owner_of(k)[1].parameter for k, g in enumerate(gradients) if g is not None]
        for parameter in parameters:
            self._give_back(parameter)
        self.streamer.gradient_offload.drain(shard, gradients)
        if self._updates:
            return
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                self._leaving[parameter] = gradient
                parameter.grad = None

    def _give_back(self, parameter: nn.Parameter) -> None:
        if (gradient := self._leaving.pop(parameter, None)) is not None:
            by_autograd = parameter.grad
            set_gradient(parameter, gradient)
            if by_autograd is not None:
                self.streamer.gradient_offload.add(parameter, gradient, by_autograd)

    def _enter_backward(self, step: ObservedStep | None, uses: Sequence[int] | None, life: weakref.ref[Life]) -> None:
        """Begins a backward, unless it runs already. It ends with autograd's, or when that fails.

        ``uses``: the shards that it uses, in the order of its forward; ``life``: of that.
        """
        if self._backward is not None or self._pass is not None or not in_backward():
            return
        self._owner.check_open()
        check_process(self._made_in, "this OffloadModel")
        hooked: Sequence[nn.Parameter] = ()
        if self._stores_rounded or self.streamer.gradient_offload.optimizers.in_backward is not None:
            hooked = [p for weights in self._weights for p in weights.shard.parameters if has_hooks(p)]
        try:
            self._begin_backward()
            self._updates = self.streamer.gradient_offload.begin(
                self._waiting(), hooked, stores=accumulates_everywhere(), order=uses
            )
            shared = self.streamer.slot_pool.shared
            if not (shared or self._owner.weights_are_frozen or self._last is None or self._last is life):
                # What a later forward left in slots may be other values, which were at home for that time only.
                self.streamer.release()
            if step is not None:
                step.begin_backward()
                self._slots.act = step.act
            backward = _Backward(step)
            self._backward = weakref.ref(backward, self._backward_failed)
            at_end_of_backward(partial(self._end_backward, backward))
        except BaseException:
            self._cancel()
            raise

    def _waiting(self) -> int:
        """Forwards that still need their backward, besides the running one."""
        return max(0, sum(1 for _ in self._forwards) - 1)

    def _end_backward(self, backward: _Backward) -> None:
        try:
            if backward.step is not None:
                backward.step.end_cell()
            self._store_rest()
            self.streamer.gradient_offload.settle()
            self._end()
            self._round_in_place()
            self.streamer.gradient_offload.wait_idle()
            self._store_returned()
            self.streamer.wait_for_home_reads()
            if not (self._owner.weights_are_frozen or self.streamer.slot_pool.shared):
                self.streamer.release()
            self._backward = None
            if backward.step is not None:
                self._slots.act = None
                backward.step.end()
        except BaseException:
            self._cancel()
            raise

    def _begin_backward(self) -> None:
        """Called before the first action of a backward."""

    def _store_rest(self) -> None:
        """Called when autograd has run all nodes, before gradients are waited for."""

    def _store_returned(self) -> None:
        """Called when all gradients of shards are stored."""

    def _round_in_place(self) -> None:
        """Rounds gradients of shards that are used where they rest, as those that leave are."""
        for shard in self.streamer.shards:
            types = shard.gradient_types
            if shard.in_place and types.rounded:
                for s in shard.own:
                    gradient = s.parameter.grad
                    if gradient is not None and types.rounds(s) and gradient.dtype != types.of(s):
                        set_gradient(s.parameter, gradient.to(types.of(s)))

    def _end(self) -> None:
        for parameter in list(self._leaving):
            self._give_back(parameter)
        self._visited, self._visited_slot, self._visited_views = None, None, []

    def _backward_failed(self, backward: weakref.ref[_Backward]) -> None:
        if self._backward is backward:
            self._cancel()


def _loses_graph(visit: Visit, *, measured: bool) -> bool:
    """Whether gradients of a visit leave their graph in a backward that accumulates; ``measured``: for their norms."""
    weights = visit.weights
    stay = weights.gradients_stay()
    leave = [k for k in visit.positions if measured or not stay[k]]
    return any(weights.parameters[k].requires_grad and not has_hooks(weights.parameters[k]) for k in leave)


def _refuse_graph() -> None:
    raise RuntimeError(
        "expected a backward without create_graph=True: gradients of parameters that rest in files or other memory, or "
        "in another type, leave their graph; take them by torch.autograd.grad, or keep homes where layers compute"
    )


def _requires_grad(value: Any) -> bool:
    """Whether any tensor in a nested value takes a gradient."""
    return any(x.requires_grad for x in tensors_in(value))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those that it was called from."""
    while frame is not None:
        yield frame
        frame = frame.f_back
