"""Saved-tensor hooks for kept graphs: autograd saves the weights of a shard by reference, never as a copy.

A step without recomputation keeps activations from forward to backward. Layers also save their weights, but in backward
the slot holds another shard. So, while a shard's forward runs, every saved tensor that is a view of the shard's slot is
replaced by its offset and shape; backward resolves it in the slot that holds the shard then. A cast of a part of the
slot, as made by autocast, is replaced likewise, and cast again (:mod:`offload.streaming.casts`).

With ``cheap_recompute`` (:mod:`pipe.recompute.cheap_ops`), results of cheap operations are saved as the operation and
its arguments, in which weights are references, too.

Other tensors are passed to the saved-tensor hooks that the user has put around the model (such as ``save_on_cpu``), of
which torch would call only the innermost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.cell_input import used_outside
from offload.planning.memory_profile import SavedTensor
from offload.streaming.casts import Cast, CastsSeen
from offload.streaming.shard import Shard
from pipe.nested import parts_of
from pipe.recompute.cheap_ops import CheapRecompute, Kept, Made
from pipe.recompute.thread_state import lasting_hooks
from pipe.torch_private.dispatch import is_traceable_wrapper_subclass
from pipe.torch_private.tensors import negative_view
from pipe.torch_private.tracing import uncompiled_hooks

__all__ = ["MemoryProfileRecorder", "storages_of", "weights_by_reference"]


@dataclass(frozen=True)
class _Reference:
    """A view of a part of a shard's slot, or of a cast of it."""

    shard: Shard
    cast: Cast | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    conjugate: bool
    negative: bool

    def resolve(self) -> Tensor:
        if not self.shard.bound:
            raise used_outside(self.shard.index)
        memory = self.shard.slot if self.cast is None else self.cast.recompute(self.shard.slot)
        view = memory.view(self.dtype).as_strided(self.size, self.stride, self.storage_offset)
        if self.conjugate:
            view = view.conj()
        return negative_view(view) if self.negative else view


@dataclass(frozen=True)
class _Packed:
    """The result of the user's pack hook, and the unpack hook."""

    packed: Any
    unpack: Callable[[Any], Any]

    def resolve(self) -> Tensor:
        tensor: Tensor = self.unpack(self.packed)
        return tensor


@dataclass(frozen=True)
class _Wrapped:
    """A tensor of a subclass: what its parts are saved as, and how it is rebuilt."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def resolve(self) -> Tensor:
        parts = {name: _resolved(part) for name, part in self.parts.items()}
        rebuilt: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return rebuilt


def _in_parts(tensor: Any, pack: Callable[[Tensor], Any]) -> _Wrapped:
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    # Not by a function of the forward that calls itself: such a cycle would hold the graph until it is collected.
    saved = {name: _in_parts(x, pack) if is_traceable_wrapper_subclass(x) else pack(x) for name, x in parts.items()}
    return _Wrapped(type(tensor), saved, context, tensor.size(), tensor.stride())


def _resolved(saved: Any) -> Any:
    return saved.resolve() if isinstance(saved, (_Reference, _Packed, _Wrapped, Made, Kept)) else saved


def storages_of(tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
    """The storages of tensors, with their bytes.

    Without weak references, a storage that is freed would be taken for a later one at the same address.
    """
    storages = [part.untyped_storage() for tensor in tensors for part in parts_of(tensor)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


class MemoryProfileRecorder:
    """Records the tensors that autograd saves while the layers of a bound shard run; weights are no activations."""

    def __init__(self, shard: Shard) -> None:
        slot = shard.slot.data_ptr()
        self._slot = StorageWeakRef(shard.slot.untyped_storage())
        self._weights = {slot + s.offset: s.nbytes for s in shard.slices if s.parameter.requires_grad}
        #: Address of a weight, or storage of an activation; bytes of its gradient.
        self._saved: list[tuple[int | StorageWeakRef, int]] = []
        #: Positions in it of results that recipes make again, with their bytes.
        self._made: dict[int, int] = {}
        #: Of the storage of each activation.
        self.nbytes: dict[StorageWeakRef, int] = {}

    def add(self, tensor: Tensor, *, made_again: bool = False) -> None:
        """Called for each tensor that autograd saves; ``made_again``: as a recipe, which holds no memory."""
        if is_traceable_wrapper_subclass(tensor):
            for part in parts_of(tensor):
                self.add(part, made_again=made_again)
            return
        if tensor.layout is not torch.strided or not tensor.numel():
            return
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage == self._slot:
            self._saved.append((tensor.data_ptr(), 0))
            return
        if made_again:
            self._made[len(self._saved)] = tensor.untyped_storage().nbytes()
        else:
            self.nbytes[storage] = tensor.untyped_storage().nbytes()
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        self._saved.append((storage, tensor.numel() * tensor.element_size() if differentiable else 0))

    def saved_tensors(self, elsewhere: Iterable[Tensor] = ()) -> list[SavedTensor]:
        """The saved tensors, in the order of backward. Tensors in ``elsewhere`` are not freed by autograd."""
        staying = storages_of(elsewhere)
        first = {key: k for k, (key, _) in reversed([*enumerate(self._saved)])}
        come: set[int | StorageWeakRef] = set()
        saved_tensors = []
        for k in range(len(self._saved) - 1, -1, -1):
            key, flows = self._saved[k]
            if isinstance(key, int):
                stays = 0 if key in come else self._weights.get(key, 0)
                come.add(key)
                saved_tensors.append(SavedTensor(stays, 0, 0))
            else:
                freed = self.nbytes.get(key, 0) if first[key] == k and key not in staying else 0
                saved_tensors.append(SavedTensor(0, flows, freed, self._made.get(k, 0)))
        return saved_tensors


@contextlib.contextmanager
def weights_by_reference(
    shard: Shard,
    recorder: MemoryProfileRecorder,
    cheap_recompute: bool = False,
    changing: Iterable[Tensor] = (),
    *,
    finds_casts: bool = True,
) -> Iterator[None]:
    """A context in which autograd saves views of ``shard``'s slot, and casts of them, by reference.

    The shard must be bound, also in backward. Weights outside of slots are saved as they are.

    Args:
        shard, recorder: whose layers run, and what records the tensors that they save.
        cheap_recompute: save results of cheap operations as recipes; not under hooks of the user, which could not see
            the arguments of a recipe.
        changing: tensors that later forwards write in place, before backward; they are saved as copies.
        finds_casts: whether the layers may cast weights. Finding casts looks at each operation; without it a cast is
            saved as any other tensor.
    """
    address = shard.slot.untyped_storage().data_ptr()
    in_slots = shard.slot.numel() > 0
    casts = CastsSeen(shard.weight_casts, shard.slot) if in_slots and finds_casts else None
    user_hooks = lasting_hooks()

    def pack_by_user(tensor: Tensor) -> Any:
        return tensor if user_hooks is None else _Packed(user_hooks[0](tensor), user_hooks[1])

    def in_slot(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == address

    def reference(tensor: Tensor) -> _Reference | None:
        if not in_slots or tensor.layout is not torch.strided or not tensor.numel():
            return None
        cast = None if casts is None else casts.find(tensor)
        if not in_slot(tensor) and cast is None:
            return None
        return _Reference(
            shard,
            cast,
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    recipes = CheapRecompute(lambda tensor: reference(tensor) or tensor, changing, shard.memory)

    def pack_plain(tensor: Tensor) -> Any:
        if recipes.knows(tensor):
            recorder.add(tensor, made_again=True)
            return recipes.pack(tensor)
        saved = reference(tensor)
        if saved is None or saved.cast is None:
            recorder.add(tensor)
        if saved is not None:
            return saved
        if tensor.layout is not torch.strided or not tensor.numel():
            return pack_by_user(tensor)
        # Without detaching, an operation that saves its own output is a cycle that Python cannot collect: its
        # activations are never freed.
        return recipes.pack(tensor) if user_hooks is None else pack_by_user(tensor.detach())

    def pack(tensor: Tensor) -> Any:
        if is_traceable_wrapper_subclass(tensor) and any(map(in_slot, parts_of(tensor))):
            return _in_parts(tensor, pack_plain)
        return pack_plain(tensor)

    hooks = torch.autograd.graph.saved_tensors_hooks(*uncompiled_hooks(pack, _resolved))
    with (
        hooks,
        casts or contextlib.nullcontext(),
        recipes if cheap_recompute and user_hooks is None else contextlib.nullcontext(),
    ):
        yield
