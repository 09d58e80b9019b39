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

from offload.engine.cell_input import used_outside
from offload.engine.memory_recorder import MemoryProfileRecorder
from offload.streaming.casts import Cast, CastsSeen
from offload.streaming.shard import Shard
from pipe.recompute.cheap_ops import CheapRecompute, Kept, Made
from pipe.recompute.thread_state import lasting_hooks
from pipe.torch_private import negative_view, uncompiled_hooks

__all__ = ["weights_by_reference"]


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


@contextlib.contextmanager
def weights_by_reference(
    shard: Shard, recorder: MemoryProfileRecorder, cheap_recompute: bool = False, changing: Iterable[Tensor] = ()
) -> Iterator[None]:
    """A context in which autograd saves views of ``shard``'s slot, and casts of them, by reference.

    The shard must be bound, also in backward. Weights outside of slots are saved as they are.

    Args:
        shard: whose layers run.
        recorder: records the saved tensors.
        cheap_recompute: save results of cheap operations as recipes. Ignored under hooks of the user, which could not
            see the arguments of a recipe.
        changing: tensors that later forwards write in place, before backward; they are saved as copies.
    """
    address = shard.slot.untyped_storage().data_ptr()
    casts = CastsSeen(shard.weight_casts, shard.slot) if shard.slot.numel() else None
    user_hooks = lasting_hooks()

    def pack_by_user(tensor: Tensor) -> Any:
        return tensor if user_hooks is None else _Packed(user_hooks[0](tensor), user_hooks[1])

    def reference(tensor: Tensor) -> _Reference | None:
        if casts is None or tensor.layout is not torch.strided or not tensor.numel():
            return None
        cast = casts.find(tensor)
        if tensor.untyped_storage().data_ptr() != address and cast is None:
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

    def pack(tensor: Tensor) -> Any:
        if recipes.knows(tensor):
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

    def unpack(saved: Any) -> Tensor:
        return saved.resolve() if isinstance(saved, (_Reference, _Packed, Made, Kept)) else saved

    hooks = torch.autograd.graph.saved_tensors_hooks(*uncompiled_hooks(pack, unpack))
    with (
        hooks,
        casts or contextlib.nullcontext(),
        recipes if cheap_recompute and user_hooks is None else contextlib.nullcontext(),
    ):
        yield
