"""Stores tensors that other code assigns to the ``.data`` of parameters.

Weights are copied from home to slot only, and a slot is dropped without a copy. So what code assigns between passes is
stored before the next one, and what a layer writes while it runs at the end of its cell (:mod:`offload.engine.cell`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from offload.streaming.shard import Shard
from offload.streaming.slices import Slice
from offload.streaming.stored_values import check_seal

__all__ = ["AssignedData"]


class AssignedData:
    """Tensors that other code assigns to the ``.data`` of parameters between passes.

    ``shards``: those that store parameters, also such that stay on the compute device.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        #: What they store, and where it was when no other data was assigned.
        self._stored = [s for shard in shards for s in shard.own if s.nbytes]
        self._addresses: list[int] = []
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
            if shard.form_versions is not None:
                check_seal(shard)
        # By functions of C, since each pass asks.
        at = [*map(Tensor.data_ptr, [s.parameter for s in self._stored])]
        if at == self._addresses:
            self.stores += 1
            return
        found = [(shard, s) for shard in self._shards for s in shard.assigned()]
        if found:
            self._refuse_held(found)
        assigned = [(shard, s, s.parameter.detach()) for shard, s in found]
        if len(assigned) > 1:
            # Parameters may have exchanged their data. Without the copies, one would be overwritten before it is read.
            homes = set[int]().union(*(shard.home_storages() for shard in self._shards))
            assigned = [
                (shard, s, value.clone() if value.untyped_storage().data_ptr() in homes else value)
                for shard, s, value in assigned
            ]
        self.stores += 1
        for shard, s, value in assigned:
            # Without incrementing the version: a graph outside of the model that uses the parameter stays valid.
            self._assigned_at[id(s.parameter)] = self.stores
            shard.store_assigned_data(s, value)
        self._addresses = [s.parameter.data_ptr() for s in self._stored]

    def _refuse_held(self, assigned: Sequence[tuple[Shard, Slice]]) -> None:
        own = [s for shard in self._shards for s in shard.own]
        addresses = Counter(t.detach().untyped_storage().data_ptr() for s in own for t in (s.parameter, *s.aliases))
        for shard, s in assigned:
            assert shard.home is not None
            if shard.pending is not None:
                # Update lane -> host. The assignment followed the step. Without this, the step would be applied to the
                # assigned values, and views that its jobs hold would count as those of other code.
                shard.pending.start().synchronize()
            known = 1 + sum(addresses[memory] for memory in shard.home_storages())
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
