"""Recomputes casts of weights (by autocast or by a layer) in backward, instead of saving them in a kept graph.

Autograd saves the cast, not the weight, so a kept graph would hold a second copy of all weights, in the other type.
:class:`CastsSeen` records in forward which tensors are casts of a part of the slot; in backward, with the shard in a
slot again, :class:`Cast` computes the same values.

Guarantees
    * A cast is recomputed by the same operation from the same bytes, so it is bit-equal. Before a layer writes to those
      bytes it is computed and kept.
    * It is computed once a visit, for all micro-batches, and freed after the last use, or at the end of the visit.
    * Recording keeps no tensor alive.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipe.torch_private.dispatch import OperationMode

__all__ = ["Cast", "Casts", "CastsSeen"]

_CAST = torch.ops.aten._to_copy.default


class Cast:
    """A view of the slot, cast to another type."""

    def __init__(self, source: Tensor, options: dict[str, Any]) -> None:
        self._dtype = source.dtype
        self._place = tuple(source.size()), source.stride(), int(source.storage_offset())
        self._options = options
        self._memory: Tensor | None = None

    @property
    def offset(self) -> int:
        """Of the view in the slot, in bytes."""
        return self._place[2] * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the cast."""
        return math.prod(self._place[0]) * (self._options.get("dtype") or self._dtype).itemsize

    def recompute(self, slot: Tensor) -> Tensor:
        """The memory of the cast, computed from ``slot``; both flat, uint8."""
        if self._memory is None:
            with torch.no_grad():
                cast = _CAST(slot.view(self._dtype).as_strided(*self._place), **self._options)
                self._memory = torch.empty(0, dtype=torch.uint8, device=cast.device).set_(cast.untyped_storage())
        return self._memory

    def free(self) -> None:
        """Frees the tensor. Without this, a graph that is used twice keeps it from visit to visit."""
        self._memory = None


class Casts:
    """The casts of one shard that any graph refers to."""

    def __init__(self) -> None:
        self._casts: weakref.WeakValueDictionary[Hashable, Cast] = weakref.WeakValueDictionary()

    def of(self, source: Tensor, options: dict[str, Any]) -> Cast:
        """The cast of ``source``, a view of the slot; one object for all micro-batches."""
        place = source.dtype, tuple(source.size()), source.stride(), int(source.storage_offset())
        key = place, frozenset(options.items())
        cast = self._casts.get(key)
        if cast is None:
            cast = self._casts[key] = Cast(source, options)
        return cast

    @property
    def found(self) -> bool:
        """Whether a graph refers to a cast."""
        return bool(self._casts)

    def end_visit(self) -> None:
        """Frees all casts, before the slot is reused."""
        for cast in list(self._casts.values()):
            cast.free()

    def preserve(self, slot: Tensor) -> None:
        """Computes and keeps all casts so far, before the slot's contents change."""
        for cast in list(self._casts.values()):
            cast.recompute(slot)
        self._casts.clear()


class CastsSeen(OperationMode):
    """Records the casts of a bound shard's ``slot`` that its layers compute, in ``casts``: ``with seen: ...``."""

    def __init__(self, casts: Casts, slot: Tensor) -> None:
        super().__init__()
        self._casts = casts
        self._slot: Tensor | None = slot
        self._address = slot.untyped_storage().data_ptr()
        # Weak references hold no memory, but reserve the identity of a freed storage, so it is not reused.
        self._seen: dict[StorageWeakRef, Cast] = {}

    def __exit__(self, *raised: Any) -> None:
        """Drops the slot: graphs hold the hooks that packed for them, and these hold this object."""
        super().__exit__(*raised)
        self._slot = None

    @property
    def found(self) -> bool:
        """Whether there was one."""
        return bool(self._seen)

    def nbytes(self, trained: Collection[int]) -> int:
        """Bytes of the casts that were seen of slices at these offsets of the slot, in bytes."""
        casts = {id(cast): cast for cast in self._seen.values()}.values()
        return sum(cast.nbytes for cast in casts if cast.offset in trained)

    def find(self, tensor: Tensor) -> Cast | None:
        """The cast that ``tensor`` is, or is a view of, unless it was written to."""
        return None if tensor._version else self._seen.get(StorageWeakRef(tensor.untyped_storage()))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation, and records it if it casts a part of the slot."""
        kwargs = kwargs or {}
        if types:  # tensor subclasses have semantics of their own
            return func(*args, **kwargs)
        if func._schema.is_mutable and any(map(self._in_slot, _written(func, args, kwargs))):
            # Without this, backward would recompute earlier casts from what the layer writes now.
            assert self._slot is not None
            self._casts.preserve(self._slot)
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
