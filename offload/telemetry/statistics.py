"""What a model has done since it was made, counted where it happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from offload.planning.memory_profile import MemoryProfile
from offload.telemetry.clock import Clock
from offload.telemetry.trace import Tracer

__all__ = ["Meter", "Statistics"]


@dataclass(frozen=True)
class Statistics:
    """Counts since construction."""

    #: Shards copied from home into a slot.
    shard_loads: int
    #: Bytes of these copies.
    bytes_loaded: int
    #: Bytes of gradients sent home.
    bytes_stored: int
    #: Bytes of boundaries, and of their gradients, that left the compute device for a while.
    bytes_spilled: int
    #: Seconds in which compute waited for a copy.
    wait_seconds: float
    #: Seconds inside layers, forward, recomputed and backward.
    compute_seconds: float
    #: Largest number of bytes that the engine held on the compute device at once: slots, boundaries, gradients that
    #: are being stored. What the layers of one cell allocate while they run comes on top.
    peak_device_bytes: int
    #: Updates of shards by an ``OffloadOptimizer``, and the bytes that they read from files and wrote there: gradients
    #: and states read, weights and states written. Weights that are updated in the slot that a load is about to fill
    #: are among ``bytes_loaded``. An update at home in host memory moves nothing.
    shard_updates: int = 0
    update_bytes_read: int = 0
    update_bytes_written: int = 0


class Meter:
    """The counters behind :class:`Statistics`."""

    def __init__(self, device: torch.device) -> None:
        self.shard_loads = 0
        self.bytes_loaded = 0
        self.bytes_stored = 0
        self.bytes_spilled = 0
        self.shard_updates = 0
        self.update_bytes_read = 0
        self.update_bytes_written = 0
        self.wait = Clock(device)
        self.compute = Clock(device)
        #: (forward or backward, shard) -> time of its cells, for the rows that passed.
        self.cells: dict[tuple[str, int], Clock] = {}
        #: Largest number of bytes that autograd keeps of one row while a shard computes.
        self.activation_bytes_per_row = 0.0
        #: Shard -> what backward meets in a cell; and the shards that keep their graphs until then.
        self.memory_profiles: dict[int, MemoryProfile] = {}
        self.keeping: set[int] = set()
        self._steps = 0
        self._device = device
        self.tracer = Tracer()
        #: Bytes that are on the compute device now.
        self.held_bytes = 0
        self._peak = 0
        #: Time that copies take on their lanes, for their bytes.
        self._lane_clocks = {lane: Clock(device) for lane in ("load", "drain", "boundary")}
        # An optimizer works on the host, whatever the layers compute on.
        self._lane_clocks["update"] = Clock(torch.device("cpu"))

    @contextlib.contextmanager
    def on_lane(self, lane: str, token: str, nbytes: int = 0) -> Iterator[None]:
        """Counts the time of one copy of so many bytes, in the thread or stream that makes it."""
        with self._lane_clocks[lane].span(nbytes), self.tracer.span(f"{lane} lane", token):
            yield

    @contextlib.contextmanager
    def waiting(self, token: str) -> Iterator[None]:
        """Counts the time in which compute stands still for a copy."""
        with self.wait.span(), self.tracer.span("compute", f"wait {token}"):
            yield

    @contextlib.contextmanager
    def cell(self, kind: str, shard: int, microbatch: int, rows: int, *, token: str | None = None) -> Iterator[None]:
        """Counts the time of one cell, ``"F"`` or ``"B"``; ``token`` is its letter in the plan, if it is another."""
        clock = self.cells.setdefault((kind, shard), Clock(self._device))
        token = f"{token or kind}{shard}.{microbatch}"
        # A visit counts as a whole: its first micro-batch is dearer than the others, in every step.
        with self.compute.span(), clock.span(rows, continues=microbatch > 0), self.tracer.span("compute", token):
            with torch.profiler.record_function(token):
                yield

    def begin_step(self) -> None:
        """A training step begins. What the first one took says little: it also makes files, buffers and pages."""
        self._steps += 1
        if self._steps == 2:
            for clock in (*self.cells.values(), *self._lane_clocks.values()):
                clock.first_step_ends()

    def cell_seconds_per_row(self, kind: str, shard: int) -> float:
        """What a cell takes, for a forecast; 0 where none was seen."""
        clock = self.cells.get((kind, shard))
        return 0.0 if clock is None else clock.seconds_each()

    def copy_seconds_per_byte(self, lane: str) -> float:
        """What the copies of a lane take for each byte, for a forecast; 0 where none was seen. Of updates, the
        bytes of the gradients that they apply.
        """
        return self._lane_clocks[lane].seconds_each()

    def record_activations(self, nbytes: int, rows: int) -> None:
        """Notes what one cell of so many rows needs for its activations."""
        self.activation_bytes_per_row = max(self.activation_bytes_per_row, nbytes / max(rows, 1))

    def record_memory_profile(self, shard: int, memory_profile: MemoryProfile, *, keeps: bool) -> None:
        """Notes what backward will meet in a cell, and whether the cell keeps its graph until then."""
        self.memory_profiles[shard] = memory_profile
        (self.keeping.add if keeps else self.keeping.discard)(shard)

    def hold(self, nbytes: int) -> None:
        """Counts bytes that are now on the compute device."""
        self.held_bytes += nbytes
        self._peak = max(self._peak, self.held_bytes)
        self.tracer.sample(self.held_bytes)

    def release(self, nbytes: int) -> None:
        """Counts bytes that are no longer there."""
        self.held_bytes -= nbytes
        self.tracer.sample(self.held_bytes)

    def read(self) -> Statistics:
        """The record as of now."""
        return Statistics(
            self.shard_loads,
            self.bytes_loaded,
            self.bytes_stored,
            self.bytes_spilled,
            self.wait.seconds,
            self.compute.seconds,
            self._peak,
            self.shard_updates,
            self.update_bytes_read,
            self.update_bytes_written,
        )
