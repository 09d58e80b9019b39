"""Detects writes into parameters: by layers while they run, and by other code between a forward and its backward.

Weights are copied from home to slot only, and a slot is dropped without a copy. So writes of a layer into its own
parameters (an embedding with ``max_norm``, an initialisation from data, a renormalisation) are searched at the end of a
visit and stored.

===================================  ===============================================================================
write                                detected by
===================================  ===============================================================================
in place                             the parameter's version counter
``parameter.data = value``           the address of its memory
in place, through ``.data``          comparison with the home, which still holds the loaded values
===================================  ===============================================================================

The functions take a shard that is bound to a slot.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload.storage.contract import bytes_of
from offload.streaming.formed_weights import check_seal
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice

if TYPE_CHECKING:
    from offload.engine.tape import Tape

__all__ = [
    "AssignedData",
    "differs_from_home",
    "find_writes",
    "has_values",
    "same_bytes",
    "set_values",
    "values_at_home",
    "values_in_slot",
]


def find_writes(shard: Shard, *, compare: bool) -> list[int]:
    """Positions of the parameters that were written since the shard was loaded; ``compare``: compare bytes with homes.

    Tensors assigned to ``.data`` are copied into the slot.
    """
    positions = []
    versions = shard.versions()
    for k, (s, view) in enumerate(zip(shard.slices, shard.in_slot, strict=True)):
        assigned = s.parameter.data_ptr() != view.data_ptr()
        if assigned or s.parameter.shape != view.shape:
            s.check_data(view.shape)
            view.copy_(s.parameter.detach())
            s.point_to(view)
        if assigned or versions[k] != shard.loaded_versions[k] or (compare and not _equals_home(shard, k)):
            positions.append(k)
    shard.check_stores(positions)
    return positions


def differs_from_home(shard: Shard) -> bool:
    """Whether any parameter has other bytes than its home."""
    return not all(_equals_home(shard, k) for k in range(len(shard.slices)))


def values_in_slot(shard: Shard) -> list[Tensor]:
    """Copies of the present values of the parameters."""
    return [parameter.detach().clone() for parameter in shard.parameters]


def values_at_home(shard: Shard) -> list[Tensor]:
    """Views of the homes of the parameters."""
    return [owner.home_view(s) for owner, s in map(shard.owner_of, range(len(shard.slices)))]


def has_values(shard: Shard, values: Sequence[Tensor]) -> bool:
    """Whether the parameters have the bytes of ``values``."""
    return all(same_bytes(p.detach(), value) for p, value in zip(shard.parameters, values, strict=True))


def set_values(shard: Shard, values: Sequence[Tensor]) -> None:
    """Copies values into the parameters in the slot, without counting as a write."""
    for s, view, value in zip(shard.slices, shard.in_slot, values, strict=True):
        view.copy_(value)
        s.point_to(view)


def _equals_home(shard: Shard, position: int) -> bool:
    here = shard.part_at_home(position, shard.slices[position].parameter.detach())
    owner, s = shard.owner_of(position)
    return same_bytes(here, owner.home_view(s).to(here.dtype))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and type have the same bytes."""
    if a.stride() != b.stride():
        a, b = a.contiguous(), b.contiguous()
    return all(map(torch.equal, _words(a.cpu()), _words(b.cpu())))


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of a tensor as int64, which compares six times as fast; and the remaining bytes."""
    flat = bytes_of(tensor)
    whole = flat.numel() // 8 * 8
    words = flat[:whole]
    return (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64), flat[whole:]


class AssignedData:
    """Tensors that other code assigns to the ``.data`` of parameters between passes.

    ``shards``: the list of those that compute, which may be replaced by others; ``lenders``: owners of parameters that
    stay on the compute device. ``views``: the number of tensors of optimizers on the home of each shard, by its index.
    """

    def __init__(
        self, shards: Sequence[Shard], views: Callable[[], Counter[int]], lenders: Sequence[Shard] = ()
    ) -> None:
        self._shards = shards
        self._lenders = lenders
        self._views = views
        #: Number of calls of :meth:`store`, and the last that found data for each parameter, by identity.
        self.stores = 0
        self._assigned_at: dict[int, int] = {}

    def store(self) -> None:
        """Copies tensors assigned to the ``.data`` of parameters since the last pass into their homes.

        Raises:
            RuntimeError: if other code still holds the memory of a home, as a backup of the old values; or has written
                parameters that only an optimizer of this package writes (``store_dtype``).
        """
        for shard in self._shards:
            check_seal(shard)
        owners = [*self._shards, *self._lenders]
        found = [(shard, s) for shard in owners for s in shard.assigned()]
        if found:
            self._refuse_held(found)
            _warn_of_shared([s for _, s in found])
        assigned = [(shard, s, s.parameter.detach()) for shard, s in found]
        if len(assigned) > 1:
            # Parameters may have exchanged their data. Without the copies, one would be overwritten before it is read.
            homes = set[int]().union(*(shard.home_storages() for shard in owners))
            assigned = [
                (shard, s, value.clone() if value.untyped_storage().data_ptr() in homes else value)
                for shard, s, value in assigned
            ]
        self.stores += 1
        for shard, s, value in assigned:
            # Without incrementing the version: a graph outside of the model that uses the parameter stays valid.
            self._assigned_at[id(s.parameter)] = self.stores
            shard.store_assigned_data(s, value)

    def _refuse_held(self, assigned: Sequence[tuple[Shard, Slice]]) -> None:
        uses = self._views()
        own = [s for shard in (*self._shards, *self._lenders) for s in shard.own]
        addresses = Counter(_memory(t.detach()) for s in own for t in (s.parameter, *s.aliases))
        for shard, s in assigned:
            assert shard.home is not None
            if shard.pending is not None:
                # Update lane -> host. The assignment followed the step. Without this, the step would be applied to the
                # assigned values, and views that its jobs hold would count as those of other code.
                shard.pending.start().synchronize()
            known = 1 + uses[shard.index] + sum(addresses[memory] for memory in shard.home_storages())
            if shard.count_home_owners() > known:
                raise RuntimeError(
                    f"other data was assigned to parameter {s.name} of shard {shard.index} while a tensor on the "
                    f"memory of its old value is still in use (a backup such as p.data, or a state_dict()): storing "
                    f"the new value would overwrite that tensor; keep a copy instead, such as p.data.clone()"
                )

    def since(self, stores: int, shard: Shard) -> list[str]:
        """Names of the parameters of a shard to which data was assigned since ``stores`` calls of :meth:`store`."""
        assigned = [s.name for s in shard.assigned()]
        if stores != self.stores and self._assigned_at:
            assigned += [s.name for s in shard.slices if self._assigned_at.get(id(s.parameter), 0) > stores]
        return assigned

    def check_unchanged(self, tape: Tape) -> None:
        """Raises RuntimeError if a parameter that the backward of a tape uses was changed since its forward."""
        for j, versions in tape.versions.items():
            if j < tape.first:
                continue
            shard = self._shards[j]
            assigned = {id(s.parameter) for s in shard.assigned()}
            assigned |= {id(p) for p in shard.parameters if self._assigned_at.get(id(p), 0) > tape.assignments}
            for s, then, now in zip(shard.slices, versions, shard.versions(), strict=True):
                if then != now or id(s.parameter) in assigned:
                    how = "changed in place" if then != now else "given other data"
                    raise RuntimeError(
                        f"parameter {s.name} of shard {j} was {how} between the forward and its backward, so the "
                        f"gradient would belong to neither value; step the optimizer after the backward"
                    )


def _warn_of_shared(assigned: Sequence[Slice]) -> None:
    """Tells the user that parameters which code gave to other processes do not stay in the memory of these."""
    names = [s.name for s in assigned if s.parameter.device.type == "cpu" and s.parameter.is_shared()]
    if names:
        warnings.warn(
            f"parameters ({', '.join(names[:3])}) were moved to shared memory, by share_memory_() or by a queue to "
            f"another process, but are stored in their homes: they return there with their values, and other processes "
            f"keep those of now. Send copies: p.detach().clone()",
            RuntimeWarning,
            stacklevel=2,
        )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
