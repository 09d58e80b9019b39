"""Stores activations between shards (boundaries) until their next use: in memory, or spilled to scratch space.

The plan decides when a boundary is spilled and prefetched (:mod:`offload.planning.residency`). Copies run on a lane, to
and from :class:`~offload.storage.Scratch` space.

Guarantees
    * At most :data:`~offload.planning.residency.WRITES_IN_FLIGHT` boundaries are being spilled.
    * ``get`` raises if the boundary was changed in place since its ``put``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.engine.layouts import bytes_of_boundary, take_apart
from offload.engine.raw_chunk import versions_of
from offload.planning.residency import WRITES_IN_FLIGHT, Key
from offload.storage import Scratch
from offload.streaming.lane import Arrival, CopyLane, error_context
from offload.telemetry.statistics import Meter
from pipe.freed import WhenFreed
from pipe.nested import TreeSpec, flatten, unflatten

__all__ = ["BoundaryStore", "SpillingStore"]


@dataclass(eq=False)
class _Entry:
    spec: TreeSpec
    leaves: list[Any] | None  # None while only the scratch space has it
    versions: tuple[int, ...]
    #: Of each tensor, if it was copied to host memory.
    devices: list[torch.device | None] | None = None
    #: These are set by :class:`SpillingStore`.
    nbytes: int = 0
    tickets: list[Any] | None = None
    written: Arrival | None = None
    fetching: tuple[Arrival, list[Any]] | None = None

    @property
    def is_held(self) -> bool:
        """Whether it is in memory, or being fetched."""
        return self.leaves is not None or self.fetching is not None


class BoundaryStore:
    """Nested values in memory, by the shard and the micro-batch of the cell whose input they are.

    ``on_host``: tensors are copied to host memory; ``get`` returns them to their devices.
    """

    def __init__(self, *, on_host: bool = False) -> None:
        self._on_host = on_host
        self._entries: dict[Key, _Entry] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def put(self, key: Key, value: Any) -> Any:
        """Stores a value."""
        leaves, spec = flatten(value)
        devices = None
        if self._on_host:
            devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
            leaves = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._entries[key] = _Entry(spec, leaves, versions_of(leaves), devices)

    def get(self, key: Key) -> Any:
        """A value that is in memory."""
        entry = self._entries[key]
        leaves = entry.leaves
        assert leaves is not None
        if versions_of(leaves) != entry.versions:
            raise RuntimeError(
                f"the activation that enters shard {key[0]} (micro-batch {key[1]}) was changed in place after the "
                f"forward that needs it for its backward; clone it before changing it"
            )
        if entry.devices is not None:
            leaves = [x if device is None else x.to(device) for x, device in zip(leaves, entry.devices, strict=True)]
        return unflatten(list(leaves), entry.spec)

    def drop(self, key: Key) -> None:
        """Removes a value, if there is one."""
        self._entries.pop(key, None)


class _Held:
    """The bytes of one store among those that the meter counts."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._meter.hold(nbytes)

    def remove(self, nbytes: int) -> None:
        self._nbytes -= nbytes
        self._meter.release(nbytes)

    def remove_all(self) -> None:
        self.remove(self._nbytes)


class SpillingStore(BoundaryStore):
    """Values that can be spilled to ``scratch`` space; ``gradients``: of boundaries, whose tokens are lower case."""

    def __init__(self, scratch: Scratch | None, lane: CopyLane, meter: Meter, *, gradients: bool = False) -> None:
        self._writes: deque[tuple[Arrival, list[Any], int]] = deque()
        self._meter = meter
        self._held = _Held(meter)
        self._freed = WhenFreed(self._held.remove_all)
        self._releases: list[Arrival] = []
        self._scratch = scratch
        self._scratch_name = "nowhere" if scratch is None else scratch.name
        self._lane = lane
        self._tokens = ("s", "p") if gradients else ("S", "P")
        super().__init__()

    def put(self, key: Key, value: Any) -> int:
        """Stores a value. Returns its bytes."""
        super().put(key, value)
        entry = self._entries[key]
        tensors = {_memory_of(leaf): leaf for leaf in entry.leaves or () if isinstance(leaf, Tensor)}
        entry.nbytes = sum(bytes_of_boundary(tensor) for tensor in tensors.values())
        self._held.add(entry.nbytes)
        return entry.nbytes

    def extend(self, key: Key, more: Sequence[Any]) -> int:
        """Adds to a list that is in memory. Returns its bytes. What was spilled of it is released."""
        value = [*self.get(key), *more]
        self.drop(key)
        return self.put(key, value)

    def nbytes(self, key: Key) -> int:
        """Bytes of a value."""
        return self._entries[key].nbytes

    def get(self, key: Key) -> Any:
        """A value that is in memory, or was prefetched."""
        entry = self._entries[key]
        if entry.fetching is not None:
            arrival, leaves = entry.fetching
            with (
                self._meter.waiting("boundary"),
                error_context(f"bringing back boundary {key[0]}.{key[1]} from {self._scratch_name}"),
            ):
                # Boundary lane -> compute. Without this, a layer reads a boundary that is still being fetched.
                arrival.wait()
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.is_cuda:
                    # Allocated on the lane's stream. Without this, its memory is reused there while layers read it.
                    leaf.record_stream(torch.cuda.current_stream(leaf.device))
            entry.leaves, entry.fetching = leaves, None
            entry.versions = versions_of(leaves)
        return super().get(key)

    def spill(self, key: Key) -> None:
        """Starts to write a value to scratch space."""
        entry, scratch, meter = self._entries[key], self._scratch, self._meter
        leaves, token = entry.leaves, f"{self._tokens[0]}{key[0]}.{key[1]}"
        assert leaves is not None
        assert scratch is not None
        entry.tickets = []

        def store(tickets: list[Any] = entry.tickets, nbytes: int = entry.nbytes) -> None:
            with meter.on_lane("boundary", token, nbytes):
                distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
                parts = {key: take_apart(leaf) for key, leaf in distinct.items()}
                stored = {
                    key: _Spilled([scratch.store(part) for part in p.tensors], p.join) for key, p in parts.items()
                }
                tickets.extend(stored[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves)

        self._flush(WRITES_IN_FLIGHT - 1)
        entry.written = self._lane.submit("spill boundary", store)
        self._meter.bytes_spilled += entry.nbytes
        # Holds the tensors until the copy is done. Without this, their memory is reused while it is being read.
        self._writes.append((entry.written, leaves, entry.nbytes))
        entry.leaves = None

    def forget(self, key: Key) -> None:
        """Drops the copy in memory of a spilled value."""
        entry = self._entries[key]
        entry.leaves = None
        self._held.remove(entry.nbytes)

    def prefetch(self, key: Key) -> None:
        """Starts to read a spilled value."""
        entry, scratch, meter = self._entries[key], self._scratch, self._meter  # fetch() must not hold the store
        assert scratch is not None
        leaves: list[Any] = []
        token = f"{self._tokens[1]}{key[0]}.{key[1]}"

        def fetch() -> None:
            assert entry.tickets is not None
            with meter.on_lane("boundary", token, entry.nbytes):
                fetched = {
                    spilled: spilled.join([scratch.fetch(ticket) for ticket in spilled.tickets])
                    for spilled in _distinct(entry.tickets)
                }
                leaves.extend(fetched[leaf] if isinstance(leaf, _Spilled) else leaf for leaf in entry.tickets)

        # Without ``after``, a boundary is read while it is still being written.
        after = [entry.written] if entry.written is not None else []
        entry.fetching = (self._lane.submit("fetch boundary", fetch, after), leaves)
        self._held.add(entry.nbytes)

    def drop(self, key: Key) -> None:
        """Removes a value. Its scratch space is released on the lane, after its copies, for which no thread waits."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if entry.is_held:
            self._held.remove(entry.nbytes)
        if entry.written is None:
            return
        scratch, tickets = self._scratch, entry.tickets
        assert scratch is not None

        def release() -> None:
            for spilled in _distinct(tickets or ()):
                for ticket in spilled.tickets:
                    scratch.release(ticket)

        # Without ``after``, its space is released while it is still being written or read.
        after = [entry.written] if entry.fetching is None else [entry.written, entry.fetching[0]]
        self._releases.append(self._lane.submit("release boundary", release, after))

    def close(self) -> None:
        """Forgets all values, after the running copies."""
        copies = [arrival for arrival, _, _ in self._writes] + self._releases
        copies += [entry.fetching[0] for entry in self._entries.values() if entry.fetching is not None]
        for arrival in copies:
            # The error of a copy was raised by the wait for it, or its value is not needed.
            with contextlib.suppress(Exception):
                # Boundary lane -> host. Without this, a copy still runs in space that is released.
                arrival.synchronize()
        self._releases.clear()
        self._writes.clear()
        self._entries.clear()
        self._held.remove_all()
        if self._scratch is not None:
            self._scratch.close()

    def _flush(self, remaining: int) -> None:
        while len(self._writes) > remaining:
            arrival, _, nbytes = self._writes.popleft()
            with self._meter.waiting("spill"), error_context(f"spilling a boundary to {self._scratch_name}"):
                # Boundary lane -> compute. Without this, the memory of a tensor is reused while it is being read.
                arrival.wait()
            self._held.remove(nbytes)


@dataclass(frozen=True, eq=False)
class _Spilled:
    """A tensor in scratch space, wherever it occurs in a value."""

    #: Of its parts; none for a tensor that stays in memory.
    tickets: list[object]
    join: Callable[[Sequence[Tensor]], Tensor]


def _memory_of(tensor: Tensor) -> int:
    """A key that is equal for tensors that share memory; tensors that are not strided share none."""
    strided = tensor.layout is torch.strided and type(tensor) is Tensor
    return tensor.untyped_storage().data_ptr() if strided else id(tensor)


def _distinct(tickets: Iterable[Any]) -> list[_Spilled]:
    return list(dict.fromkeys(leaf for leaf in tickets if isinstance(leaf, _Spilled)))
