"""Serves the backwards of one model, whichever autograd runs: loads shards, compares weights, sends gradients home.

A backward begins when autograd first comes by a cell or a visit of the model, and ends with autograd's, or when that
fails. The shards that it uses come in the reverse order of its forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.homes import ModelHomes
from offload.engine.observed import ObservedStep
from offload.engine.passes import Slots
from offload.engine.visit import Visit
from offload.engine.weights import Weights
from offload.planning.plan import Kind
from offload.streaming.shard import Shard
from offload.streaming.stored_gradients import set_gradient
from pipe.freed import Life, Living
from pipe.nested import tensors_in
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

__all__ = ["Backward"]


class _Running:
    """A running backward. Autograd frees it with the callback that would end it: also when it fails."""

    def __init__(self, step: ObservedStep | None) -> None:
        self.step = step


class Backward:
    """The backwards of one model, of which one runs at a time.

    Args:
        homes: what a backward needs after the model was deleted: its end closes lanes and homes.
        weights: of each shard.
        slots: of the model.
    """

    def __init__(self, homes: ModelHomes, weights: Sequence[Weights], slots: Slots) -> None:
        self.homes, self.weights, self.slots = homes, weights, slots
        self.streamer, self._assigned = homes.streamer, homes.assigned_data
        #: The forward that runs, if one does: none begins a backward, and a failure ends both.
        self.forward: Any = None
        #: The nodes of the visits of each forward whose graph is still there.
        self.graphs: Living[list[Any]] = Living()
        #: Of the last forward.
        self.last: weakref.ref[Life] | None = None
        #: Whether parameters are stored in fewer bytes than their gradients.
        self._stores_rounded = any(s.form is not None for each in weights for _, s in each.owners)
        self._running: weakref.ref[_Running] | None = None
        #: The visit whose weights were used last, with its slot and views of that.
        self._visited: Visit | None = None
        self._visited_slot: Tensor | None = None
        self._visited_views: Sequence[Tensor] = []
        #: Parameters by identity, and gradients that belong to them again when the backward ends.
        self._leaving: dict[int, tuple[nn.Parameter, Tensor]] = {}
        #: Whether shards are updated in the running backward.
        self.updates = False

    @property
    def has_begun(self) -> bool:
        """Whether one has begun that was not ended."""
        return self._running is not None

    @property
    def is_left(self) -> bool:
        """Whether one has failed, and was not cleaned up."""
        return self._running is not None and self._running() is None

    def abort(self) -> None:
        """Cleans up after a pass that failed; again, if it was interrupted itself."""
        self.streamer.cancel()
        for weights in self.weights:
            weights.unbind()
        self._end()
        self.slots.act = None
        self._running = None
        self.forward = None

    def views(self, visit: Visit) -> Sequence[Tensor]:
        """The weights of a visit, on the slot that holds its shard now."""
        shard = visit.weights.shard
        if self._visited is visit and self._visited_slot is shard._slot:
            return self._visited_views
        self.enter(visit.step, visit.uses, visit.life)
        if visit.checked != (number := backward_number()):
            visit.checked = number
            self._check_unchanged(visit)
            self.check_all_unchanged(visit.life())
        elif not self.updates and shard.versions() != visit.versions:  # a hook of this backward has written to them
            self._check_unchanged(visit)
        self._use(visit)
        self._visited, self._visited_slot = visit, shard._slot
        self._visited_views = [] if shard.in_place else visit.weights.views(self.streamer.slot_pool)
        return self._visited_views

    def _use(self, visit: Visit) -> None:
        self.slots.use(visit.weights.shard.index, reversed(visit.uses[: visit.place]))

    def check_before_outside(self, outputs: Any, life: weakref.ref[Life]) -> None:
        """Makes a backward from the outputs compare weights before parameters outside of the blocks get gradients."""

        def check(_: Any) -> None:
            self.check_all_unchanged(life())
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
        return (None if life is None else self.graphs.get(life)) or ()

    def check_all_unchanged(self, life: Life | None) -> None:
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

    def leave(
        self, visit: Visit, accumulators: Sequence[Any], gradients: list[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Sends the gradients of a shard home; returns those that autograd accumulates, or that were asked for."""
        self.enter(visit.step, visit.uses, visit.life)
        if (step := visit.step) is not None:
            step.end_cell()
            step.act(Kind.DRAIN, visit.weights.shard.index)
        weights = visit.weights
        shard = weights.shard
        returned: list[Tensor | None] = [None] * len(gradients)
        home: list[Tensor | None] = [None] * len(weights.parameters)
        everywhere = accumulates_everywhere()
        # Squared norms are summed while gradients leave.
        accumulates = everywhere and not (self.updates or self.streamer.gradient_offload.optimizers.clip)
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
            elif by_autograd or (accumulates and weights.stays[k] and gradient.device == parameter.device):
                stays = gradient.device == parameter.device and gradient.dtype == parameter.dtype
                returned[n] = gradient if stays else gradient.to(parameter.device, parameter.dtype)
                nbytes += gradient.numel() * gradient.element_size()
            elif everywhere and parameter.requires_grad:
                home[k] = gradient
            gradients[n] = None  # the lane, or autograd, is to free it
        if nbytes:
            self.homes.meter.bytes_stored += nbytes
        if self.updates or any(gradient is not None for gradient in home):
            if torch.is_grad_enabled():
                _refuse_graph()
            self._offload(shard, home)
        if self.updates:
            visit.checked = backward_number()  # from now on its weights are others
            self.streamer.update_in_backward(shard.index)
            if step is not None:
                step.act(Kind.UPDATE_IN_BACKWARD, shard.index)
        if not (visit.place or self.homes.weights_are_frozen):
            self.streamer.slot_pool.prefetch_previous(self.streamer)
        return returned

    def _offload(self, shard: Shard, gradients: list[Tensor | None]) -> None:
        """Starts to store gradients. Until the backward ends, ``.grad`` is what autograd makes of other uses.

        Without that, autograd would add a gradient of code outside of the blocks while a lane writes.
        """
        found = zip(shard.places, gradients, strict=True)
        parameters = {id(s.parameter): s.parameter for (_, s), gradient in found if gradient is not None}
        self._give_back(parameters.keys() & self._leaving.keys())
        self.streamer.gradient_offload.drain(shard, gradients)
        if self.updates:
            return
        for key, parameter in parameters.items():
            if (gradient := parameter.grad) is not None:
                self._leaving[key] = parameter, gradient
                parameter.grad = None

    def _give_back(self, keys: Iterable[int]) -> None:
        for key in list(keys):
            parameter, gradient = self._leaving.pop(key)
            by_autograd = parameter.grad
            set_gradient(parameter, gradient)
            if by_autograd is not None:
                self.streamer.gradient_offload.add(parameter, gradient, by_autograd)

    def enter(self, step: ObservedStep | None, uses: Sequence[int] | None, life: weakref.ref[Life]) -> None:
        """Begins a backward, unless it runs already. It ends with autograd's, or when that fails.

        ``uses``: the shards that it uses, in the order of its forward; ``life``: of that.
        """
        if self._running is not None or self.forward is not None or not in_backward():
            return
        self.homes.check_open()
        hooked: Sequence[nn.Parameter] = ()
        if self._stores_rounded or self.streamer.gradient_offload.optimizers.in_backward is not None:
            hooked = [p for weights in self.weights for p in weights.shard.parameters if has_hooks(p)]
        try:
            self._begin()
            waiting = max(0, sum(1 for _ in self.graphs) - 1)  # forwards that need theirs besides the running one
            self.updates = self.streamer.gradient_offload.begin(
                waiting, hooked, stores=accumulates_everywhere(), order=uses
            )
            shared = self.streamer.slot_pool.shared
            if not (shared or self.homes.weights_are_frozen or self.last is None or self.last is life):
                # What a later forward left in slots may be other values, which were at home for that time only.
                self.streamer.release()
            if step is not None:
                step.begin_backward()
                self.slots.act = step.act
            backward = _Running(step)
            self._running = weakref.ref(backward, self._failed)
            at_end_of_backward(partial(self._finish, backward))
        except BaseException:
            self.abort()
            raise

    def _finish(self, backward: _Running) -> None:
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
            if not (self.homes.weights_are_frozen or self.streamer.slot_pool.shared):
                self.streamer.release()
            self._running = None
            if backward.step is not None:
                self.slots.act = None
                backward.step.end()
        except BaseException:
            self.abort()
            raise

    def _begin(self) -> None:
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
        self._give_back(self._leaving)
        self._visited, self._visited_slot, self._visited_views = None, None, []

    def _failed(self, backward: weakref.ref[_Running]) -> None:
        if self._running is backward:
            self.abort()


def _loses_graph(visit: Visit, *, measured: bool) -> bool:
    """Whether gradients of a visit leave their graph in a backward that accumulates; ``measured``: for their norms."""
    weights = visit.weights
    leave = [k for k in visit.positions if measured or not weights.stays[k]]
    return any(weights.parameters[k].requires_grad and not has_hooks(weights.parameters[k]) for k in leave)


def _refuse_graph() -> None:
    raise RuntimeError(
        "expected a backward without create_graph=True: gradients of parameters that rest in files or other memory, or "
        "in another type, leave their graph; take them by torch.autograd.grad, or keep homes where layers compute"
    )
