"""Runs a block for one micro-batch: recomputed in backward, or with its graph kept; weights are saved by reference.

============  ==========================================================================  ==========================
memory mode   forward                                                                     backward
============  ==========================================================================  ==========================
recompute     what enters is kept (:mod:`pipe.recompute.recomputed`)                      runs the block again
keep          autograd saves activations; weights are saved as their place in the slot    looks them up in the slot
no graph      under ``no_grad``, or where nothing takes a gradient
============  ==========================================================================  ==========================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from offload.engine.block import RUNS_NOTED, Block, Known
from offload.engine.saved_weights import REFERENCES, Reference, SavedWeights, keep_casts
from offload.engine.selected import Selected
from offload.engine.visit import Visit, enter
from offload.engine.weights import Bound
from pipe.freed import Life
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.phase import lent_weights
from pipe.recompute.recomputed import Call, unchanged
from pipe.recompute.replay import Replay
from pipe.recompute.thread_state import lasting_hooks
from pipe.torch_private.tracing import uncompiled_hooks

__all__ = ["UNWATCHED", "Cell", "Watch"]

Run = Callable[..., Any]
_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


@dataclass(frozen=True)
class Watch:
    """Functions that are called while a cell runs, for what plans need to know.

    ``saved`` with each tensor that autograd saves; ``begins`` when its backward begins or goes on, with the visit;
    ``entering`` are hooks for what a recomputed cell saves of its input.
    """

    saved: Callable[[Tensor], None] | None = None
    #: With the bytes of results that a recomputed cell keeps.
    selected: Callable[[int], None] | None = None
    begins: Callable[[Visit], None] | None = None
    entering: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None


UNWATCHED = Watch()


class Cell:
    """One call of a block. The graph that it makes does not hold it, nor the slot.

    Args:
        block, known: the block, and what is known of it in its present modes.
        call: what runs it.
        views: of the slot, by :attr:`.Shard.slices`; empty where weights are used where they rest, or there are none.
    """

    __slots__ = ("_call", "_known", "block", "tokens", "views", "visit", "watch")

    def __init__(self, block: Block, known: Known, call: Run, views: Sequence[Tensor]) -> None:
        self.block, self._known, self._call, self.views = block, known, call, views
        #: Of its shard in the graph; None without a graph, or for weights where they rest that nothing watches.
        self.visit: Visit | None = None
        self.tokens: Sequence[Tensor] = ()
        self.watch = UNWATCHED

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output without a graph."""
        with torch.no_grad():
            # Not the views themselves: what keeps one must be noticed when its slot is used again.
            return self._noted(self._call, [view.detach() for view in self.views], args, kwargs)

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output with its graph, in which weights are references."""
        region, known = self.block.region, self._known
        first = Replay.capture(region.devices, region.generators) if known.draws is None else None
        if self.visit is None or (not self.views and self.watch is UNWATCHED):
            output = self._noted(self._call, self.views, args, kwargs)
        else:
            output = self._keep_by_reference(self.visit, args, kwargs)
        if first is not None:
            known.draws = bool(first.record_changes().drawn)
        return output

    def _keep_by_reference(self, visit: Visit, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        block, views, watched = self.block, self.views, self.block.region
        outer, name = lasting_hooks(), block.name
        weights = SavedWeights(visit, views)
        saved_by, begins, life = self.watch.saved, self.watch.begins, visit.life()
        changing = {buffer.data_ptr() for buffer in watched.changing()}

        def pack(tensor: Tensor) -> Any:
            saved = weights.refer(tensor)
            if saved_by is not None and not (type(saved) is Reference and saved.cast is not None):
                saved_by(tensor)
            if type(saved) in REFERENCES:
                return saved
            if outer is not None:
                return outer[0](tensor)
            if changing and tensor.data_ptr() in changing:  # a later cell writes it before the backward of this one
                return tensor.clone(), 0
            # Without detaching, an operation that saves its own output is a cycle that Python cannot collect.
            detached = tensor.detach()
            return detached, detached._version

        def unpack(saved: Any, _life: Any = life) -> Tensor:
            if begins is not None:
                begins(visit)
            if type(saved) in REFERENCES:
                return weights.resolve(saved)
            if outer is not None:
                replaced: Tensor = outer[1](saved)
                return replaced
            tensor, version = saved
            return unchanged(tensor, version, name)

        weights.running = [(view, view._version) for view in views]
        token = lent_weights.set(_lent(block, visit, weights, life) if views else None)
        try:
            with saved_tensors_hooks(*uncompiled_hooks(pack, unpack)):
                return self._noted(self._call, enter(visit, views, self.tokens), args, kwargs)
        finally:
            lent_weights.reset(token)
            weights.running = ()  # hooks of the graph hold it

    def recompute(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output with a graph that runs the block again when backward reaches it."""
        block, known, views, watch, visit = self.block, self._known, self.views, self.watch, self.visit
        assert visit is not None
        begins, life = watch.begins, visit.life()
        state = block.region.begin_in(known.modes)
        written = len(visit.written)

        call_first = call_again = self._call
        selected = Selected(block.select) if block.select else None
        if selected is not None:
            call_first, call_again = [partial(_within, each, self._call) for each in selected.contexts]

        def first(*args: Any, **kwargs: Any) -> Any:
            token = lent_weights.set(None if places is None else _lent(block, visit, places, life))
            try:
                return self._noted(call_first, enter(visit, views, self.tokens), args, kwargs)
            finally:
                lent_weights.reset(token)

        def again(*args: Any, _life: Any = life, **kwargs: Any) -> Any:
            if places is not None:
                places.check_unwritten([p for _, p in block.region.parameters])
            views = visit.views(visit)
            leaves = _leaves(visit, views)
            if block.inputs.writes(known.modes):
                args, kwargs = map_tensors(Tensor.clone, (args, kwargs))
            before = [view._version for view in views]
            try:
                return block.run(call_again, leaves, args, kwargs)
            finally:
                if before != [view._version for view in views]:
                    block.weights.shard.written = True  # an update in backward must not take them from there

        # A second run starts from what the first one was given, which that may write in place.
        copied = block.inputs.copies(known.modes)
        places = SavedWeights(visit, views) if views else None
        recomputed = Call(
            block.name,
            again,
            state,
            references=None if places is None else (places.refer, places.resolve),
            on_save=watch.saved,
            begins=None if begins is None else partial(begins, visit),
        )
        with saved_tensors_hooks(*watch.entering) if watch.entering is not None else _NOTHING:
            recomputed.save_inputs(*(map_tensors(_copied, (args, kwargs)) if copied else (args, kwargs)))
        output = recomputed.first(first, args, kwargs)
        if selected is not None and watch.selected is not None:
            watch.selected(selected.nbytes)
        if visit.wrote and not views:
            self._refuse_writes()
        if len(visit.written) > written:
            # A second run would write the weights again. So the run is undone, and repeated with its graph kept.
            block.keeps = True
            del output
            state.take_back()
            visit.restore_written(written, views)
            return self.keep(args, kwargs)
        known.draws = bool(known.draws or state.drawn)
        if not copied and block.inputs.writes(known.modes):
            block.inputs.refuse(known.modes)
        return output

    def _refuse_writes(self) -> None:
        self.block.keeps = True
        raise RuntimeError(
            f"the layers of {self.block.name} wrote their own parameters while they ran, for the first time after "
            f"forwards in which they did not, and a recomputation would write other values; discard this forward, "
            f"restore the parameters and run it again: graphs of these layers are kept from now on"
        )

    def _noted(self, call: Run, weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A run of which it is noted what the block writes into its input and its weights."""
        known, inputs = self._known, self.block.inputs
        known.runs += 1
        if torch.is_inference_mode_enabled():
            return self._run(call, weights, args, kwargs)
        seen = not inputs.copies(known.modes)
        tensors = [x for x in args if type(x) is Tensor] if seen else tensors_in((args, kwargs))
        before = _versions(tensors)
        output = self._run(call, weights, args, kwargs)
        now = _versions(tensors)
        if before != now or not seen:
            inputs.note(known.modes, tensors, [a != b for a, b in zip(before, now, strict=True)])
        return output

    def _run(self, call: Run, weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A run of which it is noted what the block writes into its weights."""
        block, views, visit = self.block, self.views, self.visit
        if views:
            before = [view._version for view in views]
            at = [*map(Tensor.data_ptr, weights)]
            try:
                return block.run(call, weights, args, kwargs)
            finally:
                # Also after an exception: writes into weights are as durable as those into buffers.
                if before != [view._version for view in views] or at != [*map(Tensor.data_ptr, weights)]:
                    self._store_writes(weights, before, at)
        # The shard is used where it rests, or has no weights.
        if visit is None and self._known.runs >= RUNS_NOTED and torch.is_grad_enabled():
            return block.run(call, (), args, kwargs)  # autograd compares what its graph has saved
        shard = block.weights.shard
        there = shard.versions()
        try:
            return block.run(call, (), args, kwargs)
        finally:
            if there != (now := shard.versions()):
                block.writes = True
                if visit is not None:
                    visit.versions = now
                    visit.wrote = True

    def _store_writes(self, weights: Sequence[Tensor], before: Sequence[int], at: Sequence[int]) -> None:
        """Stores the weights that the block has written; other weights are never copied back.

        Writes in place are found by their version, and data that is assigned by its address. Writes in place through
        ``.data``, which have neither, are lost with the slot.
        """
        block, visit, shard = self.block, self.visit, self.block.weights.shard
        written = []
        for k, (view, weight) in enumerate(zip(self.views, weights, strict=True)):
            assigned = weight.data_ptr() != at[k]
            if assigned:  # by another view, since the weight has the version counter of this one
                s = shard.slices[k]
                s.check_data(weight, view.shape)
                place = s.view(shard.slot)
                place.copy_(weight.detach())
                if weight is view:  # it is frozen
                    view.data = place
            if assigned or view._version != before[k]:
                written.append(k)
        if not written:
            return
        block.writes = True
        shard.check_stores(written)
        for k in written:
            owner, s = shard.places[k]
            home = owner.home_view(s)
            if visit is not None and self.views[k]._version != before[k]:
                visit.rewritten[k] = visit.runs, self.views[k]._version
            if visit is not None and visit.casts:
                keep_casts(visit, k, home.to(self.views[k].device, self.views[k].dtype))
            if visit is not None and not block.keeps:  # the run may be undone
                visit.written.append((k, home.clone()))
            home.copy_(self.views[k].detach())
            torch.autograd.graph.increment_version(s.parameter)
        shard.loaded_versions = shard.versions()
        if visit is not None:
            visit.versions = shard.loaded_versions


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # inference tensors count none
        return [0] * len(tensors)


def _lent(block: Block, visit: Visit, saved: SavedWeights, life: Life | None) -> Any:
    """What a checkpoint inside the block needs for its second run, see :data:`.lent_weights`."""
    return (saved.refer, saved.resolve), partial(_bound_again, block, visit, saved, life)


@contextlib.contextmanager
def _bound_again(block: Block, visit: Visit, saved: SavedWeights, _life: Life | None) -> Iterator[None]:
    """A context in which the block has the weights of a visit again."""
    if block.weights.bound:  # by its forward, in which a backward runs
        yield
        return
    saved.check_unwritten(p for _, p in block.region.parameters)
    with Bound(block.weights, _leaves(visit, visit.views(visit))):
        yield


def _leaves(visit: Visit, views: Sequence[Tensor]) -> list[Tensor]:
    """The weights of a second run, of which those that are trained begin its graph."""
    return [view.detach().requires_grad_() if k in visit.positions else view for k, view in enumerate(views)]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _within(context: contextlib.AbstractContextManager[None], call: Run, *args: Any, **kwargs: Any) -> Any:
    with context:
        return call(*args, **kwargs)
