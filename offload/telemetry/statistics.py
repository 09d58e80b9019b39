"""Counters of one model: loads, bytes moved, waiting and compute time, peak memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from offload.planning.memory_profile import MemoryProfile, ProfilesBySize
from offload.telemetry.clock import Clock
from offload.telemetry.trace import Tracer
from offload.units import shown_record

__all__ = ["DRAIN_TO_MEMORY", "LOAD_FROM_MEMORY", "REDUCTION", "UPDATE_IN_MEMORY", "Meter", "Statistics"]

#: Updates of shards that rest in memory, which read and write no files.
UPDATE_IN_MEMORY = "update in memory"
#: Copies between the compute device and shards, or gradients, that rest in host memory although their home is a file.
LOAD_FROM_MEMORY, DRAIN_TO_MEMORY = "load from memory", "drain to memory"
#: Sums of whole gradients over ranks, before each rank stores its part.
REDUCTION = "reduction"


@dataclass(frozen=True)
class Statistics:
    """Counts since construction; ``print()`` shows them as a table."""

    #: Shards copied from home into a slot.
    shard_loads: int
    #: Bytes of these copies.
    bytes_loaded: int
    #: Bytes of gradients written to storage.
    bytes_stored: int
    #: Bytes of boundaries, and of their gradients, that were spilled from the compute device.
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
    #: With a mesh, bytes that this rank received from the others: parts of parameters for loads; of gradients; and
    #: messages by which ranks compare plans and sum norms.
    bytes_gathered: int = 0
    bytes_reduced: int = 0
    bytes_agreed: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes that loads, gradients and updates read from homes and wrote there; boundaries are not among them."""
        return self.bytes_loaded + self.bytes_stored + self.update_bytes_read + self.update_bytes_written

    def __str__(self) -> str:
        return shown_record(self)


class Meter:
    """The counters behind :class:`Statistics`."""

    def __init__(self, device: torch.device) -> None:
        self.shard_loads = self.bytes_loaded = self.bytes_stored = self.bytes_spilled = 0
        self.shard_updates = self.update_bytes_read = self.update_bytes_written = 0
        self.bytes_gathered = self.bytes_reduced = self.bytes_agreed = 0
        self.wait = Clock(device)
        self.compute = Clock(device)
        #: (letter of the cell in a plan, shard) -> time of its cells, by rows.
        self.cells: dict[tuple[str, int], Clock] = {}
        #: Shard -> tensors that a recomputed cell saves for backward; the same of one that keeps its graph.
        self.memory_profiles, self.kept_profiles = ProfilesBySize(), ProfilesBySize()
        self._steps = 0
        self._device = device
        self.tracer = Tracer()
        #: Bytes that are on the compute device now.
        self.held_bytes = 0
        #: Bytes of weights and optimizer states of shards that rest in host memory although their home is a file.
        self.resting_bytes = 0
        self._peak = 0
        #: Time that copies take on their lanes, for their bytes.
        lanes = ("load", LOAD_FROM_MEMORY, "drain", DRAIN_TO_MEMORY, "boundary", REDUCTION)
        self._lane_clocks = {lane: Clock(device) for lane in lanes}
        # An optimizer works on the host, whatever the layers compute on.
        self._lane_clocks |= {kind: Clock(torch.device("cpu")) for kind in ("update", UPDATE_IN_MEMORY)}

    @contextlib.contextmanager
    def on_lane(self, lane: str, token: str, nbytes: int, *, kind: str | None = None) -> Iterator[None]:
        """Counts the time of one copy of so many bytes, in the thread or stream that makes it.

        ``kind``: of the copy, where the lane has several that take different times.
        """
        with self._lane_clocks[kind or lane].span(nbytes), self.tracer.span(f"{lane} lane", token):
            yield

    def waiting(self, token: str, what: str) -> _Waiting:
        """Counts the time in which compute waits for a copy; an error of the system then says ``what`` was copied."""
        return _Waiting(self, token, what)

    @contextlib.contextmanager
    def cell(
        self, kind: str, shard: int, microbatch: int, rows: float, *, step: int = 0, steps: int = 1
    ) -> Iterator[None]:
        """Counts the time of one cell, whose letter in the plan is ``kind``; or of one of its ``steps``, in order."""
        clock = self._clock_of(kind, shard)
        token = f"{kind}{shard}.{microbatch}"
        # A visit is one sample, since its first micro-batch always takes longer than the others.
        continues = microbatch > 0 or step > 0
        with self.compute.span(), clock.span(rows / steps, continues=continues), self.tracer.span("compute", token):
            with torch.profiler.record_function(token):
                yield

    def begin_step(self) -> None:
        """Begins a training step. Times of the first one, which also makes files and buffers, are kept apart."""
        self._steps += 1
        for clock in (*self.cells.values(), *self._lane_clocks.values()):
            clock.disturbed = self._steps <= 1

    def _clock_of(self, kind: str, shard: int) -> Clock:
        if (kind, shard) not in self.cells:
            self.cells[kind, shard] = Clock(self._device)
            self.cells[kind, shard].disturbed = self._steps <= 1
        return self.cells[kind, shard]

    def cell_seconds_per_row(self, kind: str, shard: int) -> float:
        """Predicted seconds of a cell per row; 0 if none was measured."""
        clock = self.cells.get((kind, shard))
        return 0.0 if clock is None else clock.seconds_each()

    def forward_seconds_per_row(self, shard: int) -> float:
        """Predicted seconds of a forward per row."""
        return self.cell_seconds_per_row("K", shard) or self.cell_seconds_per_row("F", shard)

    def kept_backward_seconds_per_row(self, shard: int) -> float:
        """Predicted seconds of the backward of a cell that kept its graph."""
        recomputed = self.cell_seconds_per_row("B", shard)
        return self.cell_seconds_per_row("G", shard) or max(0.0, recomputed - self.forward_seconds_per_row(shard))

    def backward_seconds_per_row(self, shard: int) -> float:
        """Predicted seconds of the backward of a cell, with its recomputation."""
        kept = self.cell_seconds_per_row("G", shard)
        return kept + self.forward_seconds_per_row(shard) if kept else self.cell_seconds_per_row("B", shard)

    def copy_seconds_per_byte(self, lane: str) -> float:
        """Predicted seconds of a lane's copies per byte (of updates: of gradients); 0 if none was measured."""
        return self._lane_clocks[lane].seconds_each()

    def profiles(
        self, rows: float, graph_bytes_per_row: Mapping[int, float]
    ) -> tuple[Mapping[int, MemoryProfile], Mapping[int, MemoryProfile]]:
        """By shard: the tensors that a cell of about so many rows saves if it is recomputed, and if it keeps its graph.

        A graph that was measured only of fewer rows counts as a recomputed cell that holds ``graph_bytes_per_row``.
        """
        recomputed, kept = self.memory_profiles.nearest(rows), self.kept_profiles.nearest(rows)
        for j, cell in recomputed.items():
            if j not in kept or kept[j].rows < min(rows, cell.rows):
                kept[j] = cell.holding(graph_bytes_per_row.get(j, 0.0))
        return kept | recomputed, kept

    def hold(self, nbytes: int) -> None:
        """Counts bytes that were allocated on the compute device."""
        self.held_bytes += nbytes
        self._peak = max(self._peak, self.held_bytes)

    def release(self, nbytes: int) -> None:
        """Counts bytes that were freed there."""
        self.held_bytes -= nbytes

    def read(self) -> Statistics:
        """The present counts."""
        own: dict[str, Any] = {
            "wait_seconds": self.wait.seconds,
            "compute_seconds": self.compute.seconds,
            "peak_device_bytes": self._peak,
        }
        counted = [each.name for each in fields(Statistics) if each.name not in own]
        return Statistics(**own, **{name: getattr(self, name) for name in counted})


class _Waiting:
    """See :meth:`Meter.waiting`. In few calls where nothing is recorded."""

    __slots__ = ("_began", "_meter", "_spans", "_token", "_what")

    def __init__(self, meter: Meter, token: str, what: str) -> None:
        self._meter, self._token, self._what = meter, token, what
        self._spans: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        meter = self._meter
        self._began = time.perf_counter()
        if meter.tracer.is_recording or meter._device.type == "cuda":
            self._spans = contextlib.ExitStack()
            self._spans.enter_context(meter.wait.span())
            self._spans.enter_context(meter.tracer.span("compute", f"wait {self._token}"))

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._spans is not None:
            self._spans.__exit__(kind, error, traceback)
        elif error is None:
            self._meter.wait.add(time.perf_counter() - self._began)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{self._what}: {error.strerror or error}") from error
