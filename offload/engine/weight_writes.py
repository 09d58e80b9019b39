"""Writes that no version tells of: by layers into their own parameters, and by anyone between forward and backward.

Weights travel one way, from home to slot, and a slot is dropped as it is. So what a layer writes there (an embedding
with ``max_norm``, an initialisation from data, a renormalisation) is to be found at the end of a visit and sent home.

===================================  ===============================================================================
write                                found by
===================================  ===============================================================================
in place                             the parameter's count of versions
``parameter.data = value``           the address of its memory
in place, through ``.data``          comparing with the home, which still holds what was loaded
===================================  ===============================================================================

These functions take a shard that is bound.

Between a forward and its backward, homes may be written through ``.data`` as well (an average that is swapped in).
Plain autograd then takes the new weights with the old activations. A shard that is recomputed, or still in a slot,
would not, so :class:`HomeWatch` compares checksums, and the backward is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from offload.storage.buffer import host_buffer, view_memory
from offload.storage.contract import bytes_of
from offload.streaming.lane import error_context
from offload.streaming.shard import Shard

__all__ = ["HomeWatch", "differs_from_home", "find_writes", "holds", "put_back", "values_at_home", "values_in_slot"]


def find_writes(shard: Shard, *, compare: bool) -> list[int]:
    """Positions of the parameters that were written to since the shard was loaded.

    What was assigned to ``.data`` is in the slot afterwards.

    Args:
        shard: which.
        compare: also compare bytes with the homes.

    Raises:
        ValueError: if something of another shape or type was assigned.
    """
    positions = []
    now = shard.versions()
    for k, (s, view) in enumerate(zip(shard.slices, shard.in_slot, strict=True)):
        assigned = s.parameter.data_ptr() != view.data_ptr()
        if assigned or s.parameter.shape != view.shape:
            s.check_data(view.shape)
            view.copy_(s.parameter.detach())
            s.parameter.data = view
        if assigned or now[k] != shard.loaded_versions[k] or (compare and not _equals_home(shard, k)):
            positions.append(k)
    return positions


def differs_from_home(shard: Shard) -> bool:
    """Whether any parameter has other bytes than its home."""
    return not all(_equals_home(shard, k) for k in range(len(shard.slices)))


def values_in_slot(shard: Shard) -> list[Tensor]:
    """Copies of what the parameters are now."""
    return [parameter.detach().clone() for parameter in shard.parameters]


def values_at_home(shard: Shard) -> list[Tensor]:
    """What the homes of the parameters hold."""
    return [owner.home_view(s) for owner, s in map(shard.owner_of, range(len(shard.slices)))]


def holds(shard: Shard, values: Sequence[Tensor]) -> bool:
    """Whether the parameters have the bytes of ``values``."""
    return all(_same_bytes(p.detach(), value) for p, value in zip(shard.parameters, values, strict=True))


def put_back(shard: Shard, values: Sequence[Tensor]) -> None:
    """Gives the parameters these values, in the slot. Not counted as a write."""
    for s, view, value in zip(shard.slices, shard.in_slot, values, strict=True):
        view.copy_(value)
        s.parameter.data = view


def _equals_home(shard: Shard, position: int) -> bool:
    here = shard.slices[position].parameter.detach()
    owner, s = shard.owner_of(position)
    return _same_bytes(here, owner.home_view(s).to(here.dtype))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    if a.stride() != b.stride():
        a, b = a.contiguous(), b.contiguous()
    return all(map(torch.equal, _words(a.cpu()), _words(b.cpu())))


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of a tensor, eight at a time, which is six times as fast; and those that are left."""
    flat = bytes_of(tensor)
    whole = flat.numel() // 8 * 8
    words = flat[:whole]
    return (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64), flat[whole:]


#: Homes are read in pieces of this size.
_PIECE_BYTES = 8 << 20


class HomeWatch:
    """Checksums of one shard's home: whether anyone but the engine wrote to it.

    Args:
        shard: whose.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._sums: list[int] | None = None
        #: How often the home was found to hold what the engine had not left there.
        self.changes = 0
        #: The parameters that were found so last.
        self.changed: list[str] = []

    @property
    def watching(self) -> bool:
        """Whether it has looked before."""
        return self._sums is not None

    def look(self) -> None:
        """Reads the home, and compares with the last time.

        Raises:
            OSError: if it cannot be read.
        """
        before, self._sums = self._sums, self._read()
        if before is not None and before != self._sums:
            self.changes += 1
            pairs = zip(self._shard.own, before, self._sums, strict=True)
            self.changed = [s.name for s, then, now in pairs if then != now]

    def keep(self) -> None:
        """The engine itself wrote to the home; if it was looked at before, it is read again."""
        if self._sums is not None:
            self._sums = self._read()

    def _read(self) -> list[int]:
        with error_context(f"comparing shard {self._shard.index} with its home"):
            return _checksums(self._shard)


def _checksums(shard: Shard) -> list[int]:
    """Of each own parameter at home. Takes memory for one piece."""
    sums = [0] * len(shard.own)
    nbytes = 0 if shard.home is None else shard.home.nbytes
    buffer = host_buffer(min(_PIECE_BYTES, nbytes))
    for begin in range(0, nbytes, _PIECE_BYTES):
        assert shard.home is not None
        piece = buffer[: min(_PIECE_BYTES, nbytes - begin)]
        shard.home.read_into(piece, begin)
        memory = view_memory(piece)
        for k, s in enumerate(shard.own):
            start, end = max(s.offset - begin, 0), min(s.offset + s.nbytes - begin, len(memory))
            if start < end:
                sums[k] = zlib.crc32(memory[start:end], sums[k])
    return sums
