"""What layers write into their own parameters while they run: how it is found, and how it is undone.

Weights travel one way, from home to slot, and a slot is dropped as it is. So what a layer writes there (an embedding
with ``max_norm``, an initialisation from data, a renormalisation) is to be found at the end of a visit and sent home.

===================================  ===============================================================================
write                                found by
===================================  ===============================================================================
in place                             the parameter's count of versions
``parameter.data = value``           the address of its memory
in place, through ``.data``          comparing with the home, which still holds what was loaded
===================================  ===============================================================================

All functions take a shard that is bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.storage.contract import bytes_of
from offload.streaming.shard import Shard

__all__ = ["differs_from_home", "find_writes", "holds", "put_back", "values_at_home", "values_in_slot"]


def find_writes(shard: Shard, *, compare: bool) -> list[int]:
    """Positions of the parameters that were written to since the shard was loaded.

    What was assigned to ``.data`` is in the slot afterwards.

    Args:
        shard: which.
        compare: also compare bytes with the homes.

    Raises:
        ValueError: if something of another shape was assigned.
    """
    positions = []
    now = shard.versions()
    for k, (s, view) in enumerate(zip(shard.slices, shard.in_slot, strict=True)):
        assigned = s.parameter.data_ptr() != view.data_ptr()
        if assigned or s.parameter.shape != view.shape:
            s.check_shape(view.shape)
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
