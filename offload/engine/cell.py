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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.selected import Selected
from offload.engine.visit import Visit, enter
from offload.engine.weights import Weights
from offload.streaming.casts import Cast, Casts, CastsSeen
from pipe.nested import map_distinct, map_tensors, tensors_in
from pipe.recompute.input_writes import InputWrites
from pipe.recompute.recomputed import References, recomputed, unchanged
from pipe.recompute.region import Region, Settled
from pipe.recompute.replay import Replay
from pipe.recompute.thread_state import lasting_hooks
from pipe.torch_private.dispatch import is_traceable_wrapper_subclass
from pipe.torch_private.tensors import negative_view
from pipe.torch_private.tracing import uncompiled_hooks

__all__ = ["UNWATCHED", "Block", "Watch", "has_cache", "requires_grad"]

#: Runs of each mode in which it is found out whether a block writes into its input.
RUNS_NOTED = 2

Call = Callable[..., Any]
#: Without a call of Python, no tensors of subclasses.
_PLAIN = Tensor, nn.Parameter
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


class Block:
    """What is known of one block, or of consecutive layers that run as one.

    Args:
        weights: of its shard.
        region: its modules.
        name: for errors.
        select: operations whose results are kept where the block is recomputed, see :mod:`.selected`.
    """

    def __init__(
        self,
        weights: Weights,
        region: Region,
        name: str,
        *,
        place: tuple[int, int] = (0, 1),
        select: str | Collection[Any] = (),
    ) -> None:
        self.weights, self.region, self.name, self._select = weights, region, name, select
        #: Its place among the blocks of the shard, and their number.
        self.place = place
        #: Whether its graph is always kept, since a second run would write its weights again.
        self.keeps = False
        #: Whether a run has written weights.
        self.writes = False
        self._inputs = InputWrites(name)
        #: Settings of autocast in which a run has made no cast of a weight.
        self._without_casts: set[Any] = set()
        #: By modes.
        self._runs: dict[Settled, int] = {}
        #: By modes: runs of which it was seen whether they write into their input; and those modes in which none does.
        self._inputs_seen: dict[Settled, int] = {}
        self._spares_input: set[Settled] = set()
        #: By modes: whether a run drew random numbers.
        self._draws: dict[Settled, bool] = {}

    def run(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], views: Sequence[Tensor]) -> Any:
        """The output without a graph."""
        with torch.no_grad():
            # Not the views themselves: what keeps one must be noticed when its slot is used again.
            return self._noted(call, views, [view.detach() for view in views], args, kwargs)

    def protected(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Arguments of the user, or copies where the block may write into them in place."""
        # Tensors that are made in inference mode count no writes.
        if torch.is_inference_mode_enabled() or self.region.settings not in self._spares_input:
            return self._inputs.copy((args, kwargs))
        return args, kwargs

    def keep(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        visit: Visit | None,
        views: Sequence[Tensor],
        token: Tensor | None,
        watch: Watch = UNWATCHED,
    ) -> Any:
        """The output with its graph, in which weights are references; ``visit``: None for weights where they rest."""
        first = Replay.capture(self.region.devices, self.region.watched.generators) if self.draws is None else None
        output = self._keep(call, args, kwargs, visit, views, token, watch)
        if first is not None:
            self._note_draws(self.region.settings, bool(first.record_changes().drawn))
        return output

    def _keep(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        visit: Visit | None,
        views: Sequence[Tensor],
        token: Tensor | None,
        watch: Watch,
    ) -> Any:
        if visit is None or (not views and watch is UNWATCHED):
            return self._noted(call, views, views, args, kwargs, visit)
        outer = lasting_hooks()
        casts = self._find_casts(views)
        refer, resolve = self._references(visit, views, casts) if views else (_same, _same)
        saved_by, begins, life = watch.saved, watch.begins, visit.life()
        watched = self.region.watched
        changing = {buffer.data_ptr() for buffer in watched.changing()} if watched.buffers else ()

        def pack(tensor: Tensor) -> Any:
            saved = refer(tensor)
            if saved_by is not None and not (type(saved) is _Reference and saved.cast is not None):
                saved_by(tensor)
            if type(saved) in _REFERENCES:
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
            if type(saved) in _REFERENCES:
                return resolve(saved)
            if outer is not None:
                replaced: Tensor = outer[1](saved)
                return replaced
            tensor, version = saved
            return unchanged(tensor, version, self.name)

        with torch.autograd.graph.saved_tensors_hooks(*uncompiled_hooks(pack, unpack)), casts or _NOTHING:
            output = self._noted(call, views, enter(visit, views, token), args, kwargs, visit)
        if casts is not None and not casts.found:
            self._without_casts.add(self._autocast())
        return output

    def recompute(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        visit: Visit,
        views: Sequence[Tensor],
        token: Tensor | None,
        watch: Watch = UNWATCHED,
    ) -> Any:
        """The output with a graph that runs the block again when backward reaches it."""
        begins, life = watch.begins, visit.life()
        modes = self.region.settings
        state = self.region.begin(modes)
        weights, written = [enter(visit, views, token)], len(visit.written)

        saved_by = watch.saved
        casts = self._find_casts(views, Casts()) if saved_by is not None else None
        if casts is not None and saved_by is not None:
            saved_by = partial(_unless_cast, casts, saved_by)

        selected = Selected(self._select) if self._select else None
        call_first, call_again = (call, call) if selected is None else (selected.first(call), selected.again(call))

        def first(*args: Any, **kwargs: Any) -> Any:
            # Popped, since the graph holds this function.
            with casts or _NOTHING:
                return self._noted(call_first, views, weights.pop(), args, kwargs, visit, modes)

        def again(*args: Any, _life: Any = life, **kwargs: Any) -> Any:
            views = visit.views(visit)
            leaves = [view.detach().requires_grad_() if k in visit.positions else view for k, view in enumerate(views)]
            if self._inputs.writes(modes):
                args, kwargs = self._inputs.copy((args, kwargs))
            before = [view._version for view in views]
            try:
                return self._call(call_again, leaves, args, kwargs)
            finally:
                if before != [view._version for view in views]:
                    self.weights.shard.written = True  # an update in backward must not take them from there

        # A second run starts from what the first one was given, which that may write in place.
        copied = modes not in self._spares_input
        output = recomputed(
            first,
            args,
            kwargs,
            state,
            again=again,
            references=self._references(visit, views) if views else None,
            saved=map_distinct(_copied, (args, kwargs)) if copied else None,
            inputs_hooks=watch.entering,
            on_save=saved_by,
            begins=None if begins is None else partial(begins, visit),
            name=self.name,
        )
        if selected is not None and watch.selected is not None:
            watch.selected(selected.nbytes)
        if visit.wrote and not views:
            self.keeps = True
            raise RuntimeError(
                f"the layers of {self.name} wrote their own parameters while they ran, for the first time after "
                f"forwards in which they did not, and a recomputation would write other values; discard this forward, "
                f"restore the parameters and run it again: graphs of these layers are kept from now on"
            )
        if len(visit.written) > written:
            # A second run would write the weights again. So the run is undone, and repeated with its graph kept.
            self.keeps = True
            del output
            state.take_back()
            visit.restore_written(written, views)
            return self.keep(call, args, kwargs, visit, views, token, watch)
        if (drawn := bool(state.drawn)) or modes not in self._draws:
            self._note_draws(modes, drawn)
        if self._inputs.writes(modes) and not copied:
            self._inputs.refuse(modes)
        return output

    def _noted(
        self,
        call: Call,
        views: Sequence[Tensor],
        weights: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        visit: Visit | None = None,
        modes: Settled | None = None,
    ) -> Any:
        """A run of which it is noted what the block writes into its input and its weights."""
        if modes is None:
            modes = self.region.settings
        if torch.is_inference_mode_enabled():
            return self._noted_weights(modes, call, views, weights, args, kwargs, visit)
        spared = modes in self._spares_input
        tensors = [x for x in args if type(x) is Tensor] if spared else tensors_in((args, kwargs))
        before = _versions(tensors)
        output = self._noted_weights(modes, call, views, weights, args, kwargs, visit)
        if before != (now := _versions(tensors)):
            self._spares_input.discard(modes)
            self._inputs.note(modes, tensors, [a != b for a, b in zip(before, now, strict=True)])
        elif not spared:
            seen = self._inputs_seen[modes] = self._inputs_seen.get(modes, 0) + 1
            if seen >= RUNS_NOTED and not self._inputs.writes(modes):
                self._spares_input.add(modes)
        return output

    def _noted_weights(
        self,
        modes: Settled,
        call: Call,
        views: Sequence[Tensor],
        weights: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        visit: Visit | None,
    ) -> Any:
        """A run of which it is noted what the block writes into its weights."""
        self._runs[modes] = self._runs.get(modes, 0) + 1
        if not views:
            return self._noted_in_place(call, args, kwargs, visit)
        before = [view._version for view in views]
        at = [weight.data_ptr() for weight in weights]
        try:
            return self._call(call, weights, args, kwargs)
        finally:
            # Also after an exception: writes into weights are as durable as those into buffers.
            if before != [view._version for view in views] or at != [weight.data_ptr() for weight in weights]:
                self._note_writes(visit, views, weights, before, at)

    def _noted_in_place(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], visit: Visit | None) -> Any:
        """The same for a shard that is used where it rests, or has no weights."""
        if visit is None and self.is_known and torch.is_grad_enabled():
            return self._call(call, (), args, kwargs)  # autograd compares what its graph has saved
        shard = self.weights.shard
        before = shard.versions()
        try:
            return self._call(call, (), args, kwargs)
        finally:
            if before != (now := shard.versions()):
                self.writes = True
                if visit is not None:
                    visit.versions = now
                    visit.wrote = True

    @property
    def draws(self) -> bool | None:
        """Whether it draws random numbers in its present modes; None if it did not run with a graph in these yet."""
        return self._draws.get(self.region.settings)

    def _note_draws(self, modes: Settled, drawn: bool) -> None:
        self._draws[modes] = drawn or self._draws.get(modes, False)

    @property
    def is_known(self) -> bool:
        """Whether it has run in the present modes, so that it is known what it writes."""
        return self._runs.get(self.region.settings, 0) >= RUNS_NOTED

    def _note_writes(
        self,
        visit: Visit | None,
        views: Sequence[Tensor],
        weights: Sequence[Tensor],
        before: Sequence[int],
        at: Sequence[int],
    ) -> None:
        """Stores the weights that the block has written.

        Writes in place are found by their version, and data that is assigned by its address. Writes in place through
        ``.data``, which have neither, are lost with the slot.
        """
        written = []
        for k, (view, weight) in enumerate(zip(views, weights, strict=True)):
            assigned = weight.data_ptr() != at[k]
            if assigned:  # by another view, since the weight has the version counter of this one
                s = self.weights.shard.slices[k]
                s.check_data(view.shape, weight)
                place = s.view(self.weights.shard.slot)
                place.copy_(weight.detach())
                if weight is view:  # it is frozen
                    view.data = place
            if assigned or view._version != before[k]:
                written.append(k)
        if written:
            self.writes = True
            self._store_written(visit, views, written, undone=not self.keeps)

    def _store_written(
        self, visit: Visit | None, views: Sequence[Tensor], positions: Sequence[int], *, undone: bool
    ) -> None:
        """Stores weights that the block has written; other weights are never copied back.

        ``undone``: the visit keeps what they were, since the run may be undone.
        """
        shard = self.weights.shard
        shard.check_stores(positions)
        for k in positions:
            owner, s = shard.owner_of(k)
            home = owner.home_view(s)
            if visit is not None and undone:
                visit.written.append((k, home.clone()))
            home.copy_(views[k].detach())
            torch.autograd.graph.increment_version(s.parameter)
        shard.loaded_versions = shard.versions()
        if visit is not None:
            visit.versions = shard.loaded_versions

    def _call(self, call: Call, weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            with self.weights.bound(weights):
                output = call(*args, **kwargs)
        except RuntimeError as error:
            if "dtype" in str(error) and (cast := self.weights.cast_dtypes(weights)):
                raise RuntimeError(
                    f"{self.name} met tensors of several types ({error}). With param_dtype= its parameters are "
                    f"{cast} while it runs; tensors that it makes, and parameters of other layers that it holds "
                    f"(an attribute, a closure), keep their own type: convert these to that of its input"
                ) from error
            raise
        if not weights:
            return output
        slot = weights[0].untyped_storage().data_ptr()

        def own(value: Tensor) -> Tensor:
            # Without the copy, an output that is a view of the slot would change with the next load.
            in_slot = value.layout is torch.strided and value.untyped_storage().data_ptr() == slot
            return value.clone() if in_slot else value

        return own(output) if isinstance(output, Tensor) else map_tensors(own, output)

    def _autocast(self) -> Any:
        kind = self.weights.shard.slot.device.type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)

    def _find_casts(self, views: Sequence[Tensor], known: Casts | None = None) -> CastsSeen | None:
        """A context in which casts of weights are found. It looks at each operation, until a run has made none."""
        if not views or self._autocast() in self._without_casts:
            return None
        return CastsSeen(self.weights.shard.weight_casts if known is None else known, self.weights.shard.slot)

    def _references(self, visit: Visit, views: Sequence[Tensor], casts: CastsSeen | None = None) -> References:
        """What replaces saved tensors that are views of the slot, and what finds them in the slot of the backward.

        ``casts``: what finds those that are casts of such views. They are made again when they are used.
        """
        places = _Places(visit, views[0].untyped_storage(), casts)
        return places.refer, places.resolve


class _Places:
    """Replaces tensors that a cell saves and that are views of its slot by their places there.

    Methods of an object that holds neither the slot nor itself: such a cycle would hold a graph until it is collected.
    """

    __slots__ = ("_begin", "_casts", "_end", "_visit")

    def __init__(self, visit: Visit, storage: torch.UntypedStorage, casts: CastsSeen | None) -> None:
        self._visit, self._casts = visit, casts
        self._begin = storage.data_ptr()
        self._end = self._begin + storage.nbytes()

    def refer(self, tensor: Tensor) -> Any:
        """What is saved in place of a tensor."""
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            return _in_parts(tensor, self.refer)
        if tensor.layout is not torch.strided:
            return tensor
        cast = None if self._casts is None else self._casts.find(tensor)
        if cast is None and not self._begin <= tensor.data_ptr() < self._end:
            return tensor
        signs = tensor.is_conj(), tensor.is_neg()
        return _Reference(cast, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), *signs)

    def resolve(self, saved: Any) -> Tensor:
        """The tensor that was saved, in the slot that holds the shard now."""
        if type(saved) is _Wrapped:
            return saved.rebuilt(self.resolve)
        if type(saved) is not _Reference:
            return saved  # type: ignore[no-any-return]
        visit = self._visit
        shard = visit.weights.shard
        # A shard may have moved into memory since the forward.
        weights = shard.slot if visit.views(visit) or shard.home is None else shard.home.tensor
        if saved.cast is not None:
            weights = saved.cast.recompute(weights)
        memory = torch.empty(0, dtype=saved.dtype, device=weights.device)
        begin = weights.storage_offset() // memory.element_size()
        memory.set_(weights.untyped_storage(), begin + saved.offset, saved.size, saved.stride)
        if torch.is_grad_enabled():  # the graph of the gradients keeps it, after its slot has other weights
            memory = memory.clone()
        if saved.conjugate:
            memory = memory.conj()
        return negative_view(memory) if saved.negative else memory


@dataclass(frozen=True, slots=True)
class _Reference:
    """A view of the slot that holds a shard, or of a cast of a part of it."""

    cast: Cast | None
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A tensor of a subclass that has views of the slot: what its parts are saved as."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def rebuilt(self, resolve: Callable[[Any], Tensor]) -> Tensor:
        parts = {n: x.rebuilt(resolve) if type(x) is _Wrapped else resolve(x) for n, x in self.parts.items()}
        tensor: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return tensor


_REFERENCES = _Reference, _Wrapped


def _in_parts(tensor: Any, refer: Callable[[Tensor], Any]) -> Any:
    """A tensor of a subclass, taken apart if any of its parts is a view of the slot."""
    names, context = tensor.__tensor_flatten__()
    parts = {}
    for name in names:
        part = getattr(tensor, name)
        parts[name] = _in_parts(part, refer) if is_traceable_wrapper_subclass(part) else refer(part)
    if not any(type(part) in _REFERENCES for part in parts.values()):
        return tensor
    return _Wrapped(type(tensor), parts, context, tensor.size(), tensor.stride())


def _unless_cast(casts: CastsSeen, function: Callable[[Tensor], None], tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or casts.find(tensor) is None:
        function(tensor)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # inference tensors count none
        return [0] * len(tensors)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _same(value: Any) -> Any:
    return value


def has_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a block gets a cache of keys and values, into which a second run would write again."""
    every = (*args, *kwargs.values())
    objects = [x for x in every if not isinstance(x, (Tensor, NoneType, bool, int, float, str, tuple, list, dict))]
    return any(hasattr(x, "get_seq_length") and hasattr(x, "update") for x in objects)


def requires_grad(*values: Any) -> bool:
    """Whether any tensor in nested values takes a gradient."""
    return any(x.requires_grad for x in tensors_in(values))
