"""Casts of a shard's weights: what autocast, or a layer by itself, makes of them in another type.

Autograd saves the cast, not the weight. A forward that keeps its graph would therefore keep all weights once more, in
that type. :class:`CastsSeen` watches a forward and tells which tensors are casts of a part of the slot; in backward,
when the shard is in a slot again, :class:`Cast` makes the same values once more.

Guarantees
    * A cast is made again from the same bytes by the same operation: bit for bit what it was. Where somebody is about
      to write to those bytes, it is made at once, and stays.
    * It is made once in a visit, whatever the number of micro-batches, and goes with the last that needs it; with the
      end of the visit in any case.
    * Watching keeps no tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipe.torch_private import TorchDispatchMode

__all__ = ["Cast", "Casts", "CastsSeen"]

_CAST = torch.ops.aten._to_copy.default


class Cast:
    """Part of a slot, in another type."""

    def __init__(self, source: Tensor, options: dict[str, Any]) -> None:
        self._dtype = source.dtype
        self._place = tuple(source.size()), source.stride(), int(source.storage_offset())
        self._options = options
        self._made: Tensor | None = None

    def made_of(self, slot: Tensor) -> Tensor:
        """The cast of what ``slot`` holds; both flat, uint8."""
        if self._made is None:
            with torch.no_grad():
                cast = _CAST(slot.view(self._dtype).as_strided(*self._place), **self._options)
                self._made = torch.empty(0, dtype=torch.uint8, device=cast.device).set_(cast.untyped_storage())
        return self._made

    def forget(self) -> None:
        """Lets go of the tensor. Without this, a graph that is used twice would keep it from visit to visit."""
        self._made = None


class Casts:
    """The casts of one shard that some graph refers to."""

    def __init__(self) -> None:
        self._casts: weakref.WeakValueDictionary[Hashable, Cast] = weakref.WeakValueDictionary()

    def of(self, source: Tensor, options: dict[str, Any]) -> Cast:
        """The cast of ``source``, a view of the slot: one object for all micro-batches."""
        place = source.dtype, tuple(source.size()), source.stride(), int(source.storage_offset())
        key = place, frozenset(options.items())
        cast = self._casts.get(key)
        if cast is None:
            cast = self._casts[key] = Cast(source, options)
        return cast

    def end_visit(self) -> None:
        """The slot is about to hold something else."""
        for cast in list(self._casts.values()):
            cast.forget()

    def stay(self, slot: Tensor) -> None:
        """What the slot holds is about to change: what was cast of it so far is kept as it is."""
        for cast in list(self._casts.values()):
            cast.made_of(slot)
        self._casts.clear()


class CastsSeen(TorchDispatchMode):
    """Watches the layers of a bound shard: ``with seen: ...``.

    Args:
        casts: of the shard.
        slot: where the shard is.
    """

    def __init__(self, casts: Casts, slot: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._casts = casts
        self._slot = slot
        self._address = slot.untyped_storage().data_ptr()
        # The weak references keep no memory, but the identity of what they refer to: it is not given away again.
        self._seen: dict[StorageWeakRef, Cast] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled layers stay compiled."""
        return True

    def find(self, tensor: Tensor) -> Cast | None:
        """The cast that ``tensor`` is, or is a view of, if it is one that nobody wrote to."""
        return None if tensor._version else self._seen.get(StorageWeakRef(tensor.untyped_storage()))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Does the operation, and notes it if it casts a part of the slot."""
        kwargs = kwargs or {}
        if types:  # subclasses of tensors do as they like
            return func(*args, **kwargs)
        if func._schema.is_mutable and any(map(self._in_slot, _written(func, args, kwargs))):
            # Without this, backward would see casts of what the layer wrote after it had used them.
            self._casts.stay(self._slot)
        result = func(*args, **kwargs)
        if func is _CAST and self._in_slot(args[0]) and not (args[0].is_conj() or args[0].is_neg()):
            self._seen[StorageWeakRef(result.untyped_storage())] = self._casts.of(args[0], kwargs)
        return result

    def _in_slot(self, tensor: Tensor) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.numel() > 0
            and tensor.untyped_storage().data_ptr() == self._address
        )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            yield from (x for x in values if isinstance(x, Tensor))
