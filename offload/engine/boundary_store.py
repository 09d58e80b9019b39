"""Boundaries at rest: the activations between shards, on the compute device as far as a budget allows, else at home.

A step makes one boundary for each (shard, micro-batch) and needs it twice: at once in forward, and again in backward.
All of them together grow with depth times batch, so beyond a budget the one whose next use is furthest away leaves for
:class:`~offload.storage.Scratch` space on a lane, and comes back on that lane ahead of use.

Guarantees
    * What the store holds on the device is within the budget: the boundary in use, the one on its way in and at most
      :data:`WRITES_IN_FLIGHT` on their way out included. A budget that is too small for these few is exceeded, or, if
      ``strict``, refused.
    * A boundary is written out once, however often it returns.
    * A boundary that was changed in place after it was put raises at its next ``get``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.engine.layouts import bytes_of_boundary, take_apart
from offload.storage import Scratch
from offload.streaming.lane import Arrival, Lane, error_context
from offload.telemetry.statistics import Meter
from pipe.nested import TreeSpec, flatten, unflatten

__all__ = ["BoundaryStore", "versions_in"]

WRITES_IN_FLIGHT = 2


@dataclass(eq=False)
class _Entry:
    spec: TreeSpec
    leaves: list[Any] | None  # None while only the scratch space has it
    versions: tuple[int, ...]
    nbytes: int
    uses: deque[int]
    tickets: list[Any] | None = None
    written: Arrival | None = None
    arriving: tuple[Arrival, list[Any]] | None = None

    @property
    def next_use(self) -> float:
        return self.uses[0] if self.uses else float("inf")


def versions_in(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Counts of in-place changes of the tensors among these leaves that count them."""
    return tuple(leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference())


class BoundaryStore:
    """Nested values by key, each with the positions of the step at which it will be used."""

    def __init__(
        self, scratch: Scratch | None, lane: Lane, budget_bytes: int, meter: Meter, *, strict: bool = False
    ) -> None:
        self._bytes = 0
        self._leaving: deque[tuple[Arrival, list[Any], int]] = deque()
        #: On the device for their last use, beside what rests there.
        self._in_use: dict[_Entry, None] = {}
        self._meter = meter
        self._releases: list[Arrival] = []
        self._scratch = scratch
        self._place = "nowhere" if scratch is None else scratch.name
        self._lane = lane
        self._budget_bytes = budget_bytes
        self._strict = strict
        self._largest = 0
        self._entries: dict[Hashable, _Entry] = {}
        self._on_device: dict[_Entry, None] = {}

    def put(self, key: Hashable, value: Any, uses: Sequence[int]) -> int:
        """Takes a value that will be used at the ascending positions ``uses``. Returns its bytes."""
        leaves, spec = flatten(value)
        tensors = {_memory_of(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        nbytes = sum(bytes_of_boundary(tensor) for tensor in tensors.values())
        entry = _Entry(spec, leaves, versions_in(leaves), nbytes, deque(uses))
        self._entries[key] = entry
        self._arrive(entry, entry.next_use)
        return nbytes

    def get(self, key: Hashable, now: int, *, last: bool = False) -> Any:
        """The value of ``key``, for the use at position ``now``.

        ``last``: it is dropped after this use. Without this promise it might be written out while it is used, for
        nobody.

        Raises:
            RuntimeError: if one of its tensors was changed in place since it was put.
            OSError: if it could not be written out or read back.
        """
        entry = self._entries[key]
        while entry.uses and entry.uses[0] <= now:
            entry.uses.popleft()
        if entry.leaves is None:
            if entry.arriving is None:
                self._fetch(entry, needed=now)
            assert entry.arriving is not None
            arrival, leaves = entry.arriving
            with (
                self._meter.waiting("boundary"),
                error_context(f"bringing back boundary {key} from {self._place}"),
            ):
                # Boundary lane -> compute. Without this, a layer reads a boundary that is still on its way.
                arrival.wait()
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.is_cuda:
                    # It was allocated on the lane's stream. Without this, its memory is reused there while layers read.
                    leaf.record_stream(torch.cuda.current_stream(leaf.device))
            entry.leaves, entry.arriving = leaves, None
            entry.versions = versions_in(leaves)
        elif versions_in(entry.leaves) != entry.versions:
            raise RuntimeError(
                f"the activation that enters shard {key} was changed in place after the forward that needs it for its "
                f"backward; clone it before changing it"
            )
        if last and entry in self._on_device:
            self._on_device.pop(entry)
            self._bytes -= entry.nbytes
            self._in_use[entry] = None
        return unflatten(list(entry.leaves), entry.spec)

    def prefetch(self, key: Hashable) -> None:
        """Starts to bring a value back, if it is away. Unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is not None and entry.leaves is None and entry.arriving is None:
            self._fetch(entry, needed=entry.next_use)

    def _fetch(self, entry: _Entry, needed: float) -> None:
        scratch, meter = self._scratch, self._meter  # a copy in flight must not keep the store itself
        assert scratch is not None
        leaves: list[Any] = []

        def fetch() -> None:
            assert entry.tickets is not None
            with meter.on_lane("boundary", "fetch"):
                fetched = {
                    away: away.join([scratch.fetch(ticket) for ticket in away.tickets])
                    for away in _distinct(entry.tickets)
                }
                leaves.extend(fetched[leaf] if isinstance(leaf, _Away) else leaf for leaf in entry.tickets)

        # Without ``after``, a boundary is read while it is still being written.
        after = [entry.written] if entry.written is not None else []
        entry.arriving = (self._lane.submit("fetch boundary", fetch, after), leaves)
        self._arrive(entry, needed)

    def drop(self, key: Hashable) -> None:
        """Forgets a value. Its room is given away on the lane, so nobody waits for the copies that still use it."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if entry in self._on_device:
            self._leave(entry)
        elif entry in self._in_use:
            self._in_use.pop(entry)
            self._meter.release(entry.nbytes)
        if entry.written is None:
            return
        scratch, tickets = self._scratch, entry.tickets
        assert scratch is not None

        def release() -> None:
            for away in _distinct(tickets or ()):
                for ticket in away.tickets:
                    scratch.release(ticket)

        # Without ``after``, its room is given away while it is still being written or read.
        after = [entry.written] if entry.arriving is None else [entry.written, entry.arriving[0]]
        self._releases.append(self._lane.submit("release boundary", release, after))

    def __del__(self) -> None:
        if not hasattr(self, "_meter"):
            return  # an interrupt in the middle of its making
        in_use = sum(entry.nbytes for entry in self._in_use)
        self._meter.release(self._bytes + in_use + sum(nbytes for _, _, nbytes in self._leaving))

    def close(self) -> None:
        """Forgets everything, after the copies in flight."""
        copies = [arrival for arrival, _, _ in self._leaving] + self._releases
        copies += [entry.arriving[0] for entry in self._entries.values() if entry.arriving is not None]
        for arrival in copies:
            # A copy that failed has been reported where it was waited for, or nobody needs it any more.
            with contextlib.suppress(Exception):
                # Boundary lane -> host. Without this, a copy is still under way in space that is given back.
                arrival.synchronize()
        self._releases.clear()
        while self._leaving:
            self._meter.release(self._leaving.popleft()[2])
        for entry in list(self._on_device):
            self._leave(entry)
        while self._in_use:
            self._meter.release(self._in_use.popitem()[0].nbytes)
        self._entries.clear()
        if self._scratch is not None:
            self._scratch.close()

    # --- the budget ---------------------------------------------------------------------------------------------

    def _arrive(self, entry: _Entry, needed: float) -> None:
        self._on_device[entry] = None
        self._bytes += entry.nbytes
        self._meter.hold(entry.nbytes)
        if self._scratch is None:
            return
        self._largest = max(self._largest, entry.nbytes)
        # Besides what rests here: one that a layer reads, one coming, and those on their way out.
        moving = (2 + WRITES_IN_FLIGHT) * self._largest
        if self._strict and moving > self._budget_bytes:
            raise ValueError(
                f"boundaries of {self._largest:,} bytes a micro-batch need {2 * moving:,} bytes to stream ahead of "
                f"use, but memory_budget leaves {2 * self._budget_bytes:,}; use more micro-batches or smaller chunks, "
                f"or a larger budget"
            )
        room = max(0, self._budget_bytes - moving)
        while self._bytes > room:
            candidates = (e for e in self._on_device if e is not entry and e.leaves is not None and e.nbytes)
            victim = max(candidates, key=lambda e: e.next_use, default=None)
            if victim is None:
                return  # it is alone, and has to be here for its use anyway
            if victim.next_use <= needed:
                if entry.leaves is None:
                    return  # it is being brought in, and all the rest is needed sooner
                victim = entry
            self._spill(victim)
            if victim is entry:
                return

    def _spill(self, entry: _Entry) -> None:
        leaves, scratch, meter = entry.leaves, self._scratch, self._meter
        assert leaves is not None
        assert scratch is not None
        entry.leaves = None
        if entry.written is not None:
            self._leave(entry)
            return
        entry.tickets = []

        def store(tickets: list[Any] = entry.tickets) -> None:
            with meter.on_lane("boundary", "spill"):
                distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
                parts = {key: take_apart(leaf) for key, leaf in distinct.items()}
                stored = {key: _Away([scratch.store(part) for part in p.tensors], p.join) for key, p in parts.items()}
                tickets.extend(stored[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves)

        self._flush(WRITES_IN_FLIGHT - 1)
        entry.written = self._lane.submit("spill boundary", store)
        self._meter.bytes_spilled += entry.nbytes
        # The tensors stay until the copy is done. Without this, their memory is reused while it is being read.
        self._leaving.append((entry.written, leaves, entry.nbytes))
        self._on_device.pop(entry)
        self._bytes -= entry.nbytes

    def _flush(self, remaining: int) -> None:
        while len(self._leaving) > remaining:
            arrival, _, nbytes = self._leaving.popleft()
            with self._meter.waiting("spill"), error_context(f"spilling a boundary to {self._place}"):
                # Boundary lane -> compute. Without this, the memory of a tensor is used again while it is being read.
                arrival.wait()
            self._meter.release(nbytes)

    def _leave(self, entry: _Entry) -> None:
        self._on_device.pop(entry)
        self._bytes -= entry.nbytes
        self._meter.release(entry.nbytes)


@dataclass(frozen=True, eq=False)
class _Away:
    """Stands in for a tensor that rests in scratch space, at each place where it occurs."""

    #: Of its parts, none for a tensor that stays in memory.
    tickets: list[object]
    join: Callable[[Sequence[Tensor]], Tensor]


def _memory_of(tensor: Tensor) -> int:
    """What tells tensors that share memory; of those that are not strided, each has its own."""
    strided = tensor.layout is torch.strided and type(tensor) is Tensor
    return tensor.untyped_storage().data_ptr() if strided else id(tensor)


def _distinct(tickets: Iterable[Any]) -> list[_Away]:
    return list(dict.fromkeys(leaf for leaf in tickets if isinstance(leaf, _Away)))
