"""What autograd saves of a shard's weights: a reference, never a copy.

A step without recomputation keeps activations from forward to backward. Layers save their weights along with them,
but by then the slot holds another shard. While a shard's forward runs, every tensor that autograd saves and that lies
in the shard's slot is replaced by a note of its place; backward finds the shard in whichever slot it is by then. What
is a cast of a part of the slot, as autocast makes them, is replaced likewise, and cast again
(:mod:`offload.streaming.casts`).

Where a graph is kept instead of a recomputation it is lean (:mod:`pipe.recompute.cheap_ops`): what is cheap to compute
again is saved as its recipe, in which weights are references too.

All else goes through the saved-tensor hooks that the user has put around the model (``save_on_cpu``, say), of which
torch would call only the innermost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.engine.memory_recorder import MemoryProfileRecorder
from offload.engine.source import used_outside
from offload.streaming.casts import Cast, CastsSeen
from offload.streaming.shard import Shard
from pipe.recompute.cheap_ops import CheapRecompute, Kept, Made
from pipe.recompute.thread_state import lasting_hooks
from pipe.torch_private import negative_view, uncompiled_hooks

__all__ = ["weights_by_reference"]


@dataclass(frozen=True)
class _Reference:
    """Part of a shard's slot, or of a cast of it."""

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
    """What the user's hook made of a tensor, and the hook that undoes it."""

    packed: Any
    unpack: Callable[[Any], Any]

    def resolve(self) -> Tensor:
        tensor: Tensor = self.unpack(self.packed)
        return tensor


@contextlib.contextmanager
def weights_by_reference(
    shard: Shard, notes: MemoryProfileRecorder, cheap_recompute: bool = False, changing: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Inside, autograd saves views of ``shard``'s slot, and casts of them, by reference.

    The shard must be bound, then and in backward. A weight that is in no slot is saved as it is.

    Args:
        shard: whose layers run.
        notes: of what is saved.
        lean: save what is cheap to compute again as its recipe. Not done under hooks of the user's, which would not
            see what a recipe holds.
        changing: tensors that later forwards write in place, before backward; what is saved of them is copied.
    """
    address = shard.slot.untyped_storage().data_ptr()
    seen = CastsSeen(shard.weight_casts, shard.slot) if shard.slot.numel() else None
    users = lasting_hooks()

    def handed_on(tensor: Tensor) -> Any:
        return tensor if users is None else _Packed(users[0](tensor), users[1])

    def reference(tensor: Tensor) -> _Reference | None:
        if seen is None or tensor.layout is not torch.strided or not tensor.numel():
            return None
        cast = seen.find(tensor)
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
            notes.saw(tensor)
        if saved is not None:
            return saved
        if tensor.layout is not torch.strided or not tensor.numel():
            return handed_on(tensor)
        # Without detaching, an operation that saves its own output holds itself, through no object of Python's: its
        # activations stay for ever.
        return recipes.pack(tensor) if users is None else handed_on(tensor.detach())

    def unpack(saved: Any) -> Tensor:
        return saved.resolve() if isinstance(saved, (_Reference, _Packed, Made, Kept)) else saved

    hooks = torch.autograd.graph.saved_tensors_hooks(*uncompiled_hooks(pack, unpack))
    with (
        hooks,
        seen or contextlib.nullcontext(),
        recipes if cheap_recompute and users is None else contextlib.nullcontext(),
    ):
        yield
