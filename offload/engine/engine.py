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
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offload.engine.backward import Backward
from offload.engine.block import RUNS_NOTED, Block, has_cache
from offload.engine.boundaries import Boundaries
from offload.engine.cell import UNWATCHED, Cell, Watch
from offload.engine.homes import ModelHomes
from offload.engine.observed import CellPlace, ObservedStep
from offload.engine.passes import Forward, Slots
from offload.engine.visit import Visit
from offload.engine.weights import Weights
from offload.forms.quantised import check_frozen
from offload.planning.plan import Kind
from pipe.freed import Life
from pipe.nested import flatten, tensors_in
from pipe.recompute.phase import is_checkpointing, is_recomputing
from pipe.recompute.replay import Layers, refuse_cached_parametrizations
from pipe.recompute.thread_state import ThreadState, close_contexts
from pipe.torch_private.autograd import in_backward
from pipe.torch_private.tensors import storage_uses

__all__ = ["Engine"]

#: Forwards in which a model that is not planned measures what ``estimate()`` needs.
STEPS_OBSERVED = 3
#: Whether the graph of a cell of a shard and micro-batch is kept.
Keeps = Callable[[int, int], bool]

T = TypeVar("T")


class _Pass:
    """One forward: its order of shards, and the visits of its graph with their tokens."""

    def __init__(self, order: Forward, keeps: Keeps) -> None:
        self.order, self.keeps = order, keeps
        self.visits: dict[int, tuple[Visit, Sequence[Tensor]]] = {}
        #: The nodes of the visits in the graph.
        self.nodes: list[Any] = []
        #: Of what its graph saves for the backward.
        self.life = Life()
        #: Whether its first cell was announced, see :meth:`Engine.expect`; and the number of its micro-batches.
        self.announced, self.microbatches = False, 1
        #: What observes it, if the memory of the model is planned.
        self.step: ObservedStep | None = None
        #: Where the inputs of its recomputed cells are, if they may leave memory.
        self.boundaries: Boundaries | None = None


class Engine:
    """Runs blocks of a model, one forward at a time.

    Args:
        homes: where the weights of the blocks rest, and what streams them.
        calls: the forwards of the layers, if each is a block that the model calls by its number; none for layers of
            which those of a shard run together.
    """

    def __init__(self, homes: ModelHomes, calls: Sequence[Callable[..., Any]] = ()) -> None:
        self._homes, self.streamer, self.device = homes, homes.streamer, homes.device
        #: Forwards of several chunks so far, and whether in one of them code between blocks has set their attributes.
        self.chunked, self.sets_between = 0, False
        self._weights = [Weights(shard, homes.device, homes.public.for_autograd) for shard in homes.shards]
        self.observe()
        self._slots = Slots(homes.streamer)
        self.backward = self.backward_kind(homes, self._weights, self._slots)
        #: Of each shard.
        self.blocks: list[list[Block]] = []
        for j, weights in enumerate(self._weights):
            several = [[layer] for layer in weights.shard.layers] if calls else [weights.shard.layers]
            regions = [Layers(*layers, devices=[homes.device], name=f"shard {j}") for layers in several]
            self.blocks.append(
                [
                    Block(weights, region, f"shard {j}", place=(k, len(several)), select=homes.policy.keep)
                    for k, region in enumerate(regions)
                ]
            )
        #: By the number that the model calls them by.
        self.numbered = [block for several in self.blocks for block in several]
        self._calls = calls
        self._local = threading.local()
        #: The shards that the last forward used, in order, with gradients and without.
        self._orders: dict[bool, Sequence[int]] = dict.fromkeys((True, False), range(len(homes.shards)))

    backward_kind: type[Backward] = Backward
    #: Whether ranks of a mesh run the same passes.
    has_ranks = False

    def observe(self) -> None:
        """Called when homes have moved, and other steps than so far follow: the first ones are observed again."""
        #: Forwards so far, with a backward and without, of which the first are observed.
        self._observed = {True: 0, False: 0}
        for weights in self._weights:
            weights.homes_moved()

    def held(self) -> list[nn.Parameter]:
        """The parameters that this object holds, once for each reference."""
        found = [p for weights in self._weights for p in weights.parameters]
        return found + [p for several in self.blocks for block in several for _, p in block.region.parameters]

    @property
    def running(self) -> bool:
        """Whether a forward runs. It begins with its first cell: before it, homes may still move."""
        this = self.backward.forward
        return this is not None and bool(this.order.uses) and self._passes() > 0

    def _passes(self) -> int:
        """Number of running forwards of this model, in all threads."""
        return sum(
            frame.f_code is Engine.forward.__code__ and frame.f_locals.get("self") is self
            for top in sys._current_frames().values()
            for frame, _ in traceback.walk_stack(top)
        )

    def clean_up(self) -> None:
        """Cleans up after a pass that failed while its cleanup was interrupted, if there is one."""
        if self.backward.is_left or (self.backward.forward is not None and not self._passes()):
            self.backward.abort()

    @property
    def draws(self) -> bool:
        """Whether any block draws random numbers in its present modes, or is not known not to."""
        return any(block.known().draws is not False for several in self.blocks for block in several)

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(self, run: Callable[[], T], keeps: Keeps | None = None) -> T:
        """Returns ``run()``, one forward, in which blocks may be run in any order and any number of times.

        A function, not a context: what follows a ``with`` statement may be interrupted before its context ends.
        ``keeps``: which cells keep their graphs; None: all or none, as the model recomputes.
        """
        if self.backward.forward is not None and self._passes() > 1:  # one is this
            raise RuntimeError(
                "this OffloadModel is in the middle of a forward; a layer or a hook of it called it again, or another "
                "thread did"
            )
        self._homes.check_open()
        in_between = in_backward()
        if not in_between:
            self._check_structure()
        training = torch.is_grad_enabled()
        if training:
            refuse_cached_parametrizations(m for several in self.blocks for b in several for m in b.region.modules)
        settings = ThreadState.capture([self.device.type])
        try:
            if self.backward.is_left or self.backward.forward is not None or self.streamer.must_cancel:
                self.backward.abort()  # which was interrupted
            if self.streamer.finish_step is not None:
                self.streamer.finish_step()
            # Of models that take turns, a recomputation must use the weights of its forward. Otherwise homes may have
            # been written since, also in ways that no version counts.
            shared = self.streamer.slot_pool.shared
            reuses = self._homes.weights_are_frozen or (shared and is_recomputing())
            if reuses:
                self.streamer.resident()  # evicts shards that were written since
            elif not self.backward.has_begun:
                self.streamer.release()
                self._homes.assigned_data.store()
            order = Forward(self._orders[training], returns=training, repeats=shared and reuses, common=self.has_ranks)
            self.backward.forward = this = _Pass(order, keeps or (lambda j, i: not self._homes.recompute))
            if not in_between:
                self.backward.last = weakref.ref(this.life)
            result = self._run_pass(run)
            self.streamer.wait_for_home_reads()
            if not in_between:
                self._orders[training] = this.order.uses
            if this.step is not None and this.step.training:
                this.step.end_forward(result)
            elif this.step is not None:
                this.step.end()
            if this.order.graphed and not in_between:
                self.backward.graphs.add(this.life, this.nodes)
                if any(p.requires_grad for p in self._homes.outside):
                    self.backward.check_before_outside(result, weakref.ref(this.life))
            self.backward.forward = self._slots.act = None
            return result
        except BaseException as error:
            close_contexts(error)
            settings.restore()
            if in_between and self.backward.has_begun:
                # A checkpoint ends its recomputation early by an exception, and backward goes on.
                self.backward.forward = None
            else:
                self.backward.abort()
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

        def run() -> Any:
            if not self.backward.forward.announced:
                self.expect([flatten((args, kwargs))[0]])
            return self.run_numbered(number, args, kwargs)

        # Outside of the model's forward: by other code, or again in backward by a checkpoint of the model itself.
        return run() if self.backward.forward is not None else self.forward(run)

    def run_numbered(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], i: int = 0) -> Any:
        """Runs the block of this number within :meth:`forward`."""
        return self.run(self.numbered[number], self._calls[number], args, kwargs, i)

    def order_of(self, number: int) -> int:
        """The place of a block's shard in the order of the last forward."""
        order, j = self._orders[torch.is_grad_enabled()], self.numbered[number].weights.shard.index
        return order.index(j) if j in order else len(order)

    def _check_structure(self) -> None:
        """Refuses layers and parameters that were replaced; from now on the present modules and buffers count."""
        check_frozen(self._homes.quantised)
        structure = self._homes.structure
        assert structure is not None
        if structure.check():
            self._find()

    def _find(self) -> None:
        for weights in self._weights:
            weights.find()
        for block in self.numbered:
            block.region.find()

    def run(
        self, block: Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], i: int = 0
    ) -> Any:
        """Runs a block of micro-batch ``i`` within :meth:`forward`."""
        this = self.backward.forward
        assert this is not None
        shard, known = block.weights.shard, block.known()
        j, in_place = shard.index, shard.in_place
        enabled = torch.is_grad_enabled()
        graph = enabled and (shard.trainable or _requires_grad((args, kwargs)))
        if this.order.begin(j):
            self._leave_order(block)
        if graph:
            this.order.add_graph(j)
        if not in_place and block.weights.were_written(loaded=j in self.streamer.loaded):
            self._load_again(block.weights)
        self._slots.use(j, this.order.following())
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
            elif in_place and graph and shard.gradient_types.rounded:  # these are rounded when the backward ends
                cell.watch = Watch(begins=lambda visit: self.backward.enter(None, visit.uses, visit.life))
            output = self._run(this, cell, args, kwargs, keeps=keeps)
        if enabled and not graph and _requires_grad(output):  # by what is neither a weight of its own nor an argument
            this.order.add_graph(j)
        return output

    def _load_again(self, weights: Weights) -> None:
        """Drops what was loaded of a shard before a hook, or the model's own forward, wrote to its parameters."""
        self.streamer.wait_for_home_reads()
        self._homes.assigned_data.store()
        weights.note_addresses()
        if weights.shard.index in self.streamer.loaded:
            self.streamer.evict(weights.shard.index)
            if self._slots.act is not None:
                self._slots.act(Kind.EVICT, weights.shard.index)

    def _run(self, this: _Pass, cell: Cell, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, keeps: bool) -> Any:
        if not torch.is_grad_enabled():
            return cell.run(args, kwargs)
        if not (keeps and cell.watch is UNWATCHED and cell.block.weights.shard.in_place):
            cell.visit, cell.tokens = self._visit(this, cell.block.weights.shard.index)
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
            partial(step.record_selected, place) if graph and self._homes.policy.keep else None,
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

    def _begin_cell(self, step: ObservedStep, boundaries: Boundaries | None, place: CellPlace, visit: Visit) -> None:
        """Called when the backward of an observed cell begins, or goes on."""
        self.backward.enter(step, visit.uses, visit.life)  # shards that are used where they rest do not
        if step.cell is not place:
            step.end_cell()
            if place.kept and visit.weights.shard.in_place:
                # A graph on weights where they rest compares what it has saved, as autograd does, and nothing else.
                self.backward.check_all_unchanged(visit.life())
            else:
                self.backward.views(visit)  # what it waits for is no time of the cell
            if boundaries is not None and place.k == place.blocks - 1:
                boundaries.expect((place.j, place.i))
            step.backward(place)

    def expect(self, leaves: Sequence[Sequence[Any]]) -> None:
        """Called within :meth:`forward` before the first cell, with the leaves of the input of each micro-batch."""
        this = self.backward.forward
        assert this is not None
        this.microbatches = len(leaves)
        # What a checkpoint around the model saves is dropped at once; its second run must save the same.
        if this.announced or in_backward() or is_checkpointing():
            return
        this.announced = True
        tensors = [x for each in leaves for x in each if isinstance(x, Tensor)]
        trains = any(s.trainable for s in self.streamer.shards) or any(p.requires_grad for p in self._homes.outside)
        training = torch.is_grad_enabled() and (trains or any(x.requires_grad for x in tensors))
        self._observed[training] += 1
        watched = self._observed[training] <= STEPS_OBSERVED or self._homes.meter.tracer.is_recording
        plans = self._homes.plans
        if training and plans and not watched and self._homes.all_stays(leaves):
            this.keeps = lambda j, i: True
            return
        if training and self._homes.recompute:
            this.boundaries = self._boundaries()
        if not (plans or watched):
            return
        this.step = step = ObservedStep(
            self._homes, leaves, training=training, idle=not any(True for _ in self.backward.graphs)
        )
        if self._homes.recompute:
            this.keeps = lambda j, i: (j, i) in step.kept
        self._slots.act = step.act
        if this.boundaries is not None:
            this.boundaries.act = step.act

    def _boundaries(self) -> Boundaries | None:
        owner = self._homes
        scratch, budget_bytes = owner.tier.scratch(), owner.steps.boundary_budget_bytes
        if scratch is None or math.isinf(budget_bytes):
            return None
        return Boundaries(scratch, owner.lanes.boundary, owner.meter, budget_bytes)

    def _visit(self, this: _Pass, j: int) -> tuple[Visit, Sequence[Tensor]]:
        """The visit of a shard in this pass, made at its first cell."""
        if j not in this.visits:
            uses, place, stores = this.order.graphed, this.order.place(j), self._homes.assigned_data.stores
            leave, views = self.backward.leave, self.backward.views
            visit = Visit(self._weights[j], uses, place, leave, views, this.life, stores, this.step)
            once = len(self.blocks[j])
            in_place = self.streamer.shards[j].in_place
            tokens = () if in_place else visit.begin(once=once, cells=once * this.microbatches)
            if tokens:
                this.nodes.append(tokens[0].grad_fn)
            this.visits[j] = visit, tokens
        return this.visits[j]

    def _leave_order(self, block: Block) -> None:
        """Called before a cell that begins another shard than the forward before."""


def _requires_grad(value: Any) -> bool:
    """Whether any tensor in a nested value takes a gradient."""
    return any(x.requires_grad for x in tensors_in(value))
