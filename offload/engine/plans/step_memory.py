"""Bounds the memory of the steps of one model by what is predicted for them, and measures it.

What a step took more than predicted becomes a margin of later predictions for batches of its size and larger ones. The
first step of rows longer than all before gives none: it was predicted from other sizes.

Memory is measured in the steps after a new choice, in which free memory of the C heap is returned before a cell that
could need it. In other steps free memory may take what the limit leaves, and less after one that exceeded it. What a
cell frees need not fit what it allocates next: by how much memory rises more than predicted in each is measured, too,
and room is made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload.planning.budget import GAPS_SHARE
from offload.planning.step_model import Prediction
from offload.streaming.heap import LEAST_BYTES
from offload.streaming.streamer import Streamer
from offload.telemetry.peak import PeakMeter
from offload.telemetry.statistics import Meter

__all__ = ["StepMemory"]

#: Of a limit of memory, a peak that is greater by less than one part in so many is no greater.
STEADY_SHARE = 128

#: Steps of each choice whose memory is measured, after the first one, which allocates slots and buffers.
STEPS_MEASURED = 2
#: Free memory that such a step keeps, which is a part of what it measures: as little as is worth returning.
MEASURED_SLACK_BYTES = LEAST_BYTES // 4


class StepMemory:
    """The memory of steps; ``limit`` returns its present limit in bytes."""

    def __init__(self, limit: Callable[[], int], streamer: Streamer, meter: Meter, device: torch.device) -> None:
        self._limit = limit
        self._streamer = streamer
        self._meter = meter
        self._peak = PeakMeter(device)
        self._heap = streamer.heap
        #: Rows of a batch -> what its steps took more than predicted.
        self._margins: dict[float, int] = {}
        #: Of the present step.
        self.margin_bytes = 0
        self._rows = 0.0
        #: The peak of the last step that was measured, and the bytes after each of its cells.
        self.peak_bytes: int | None = None
        #: The greatest peak of steps of the present choice that were not measured, with the free memory that they keep;
        #: and above how many bytes they return it: first the limit, then less by what they exceed it.
        self.kept_peak_bytes: int | None = None
        self._kept_most: int | None = None
        self.course: list[int] = []
        #: Whether slots and buffers of the present plan are still to be allocated.
        self._fresh = True
        #: Whether this step measures the memory of its plan; and how many are still to do so.
        self.measures = False
        self._to_measure = self._began_with = 0
        #: Predicted bytes at the begin of this step, and those of gaps between the model's blocks.
        self._held = self._gaps = 0
        #: Cell of a plan -> bytes by which memory rose in it more than predicted: what it frees need not fit what it
        #: allocates next. And the cell that is measured now, with its predicted rise.
        self._excess: dict[tuple[Any, ...], int] = {}
        self._cell: tuple[tuple[Any, ...], int] | None = None

    @property
    def on_host(self) -> bool:
        """Whether it is the memory of the host."""
        return self._heap is not None

    def margin(self, rows: float) -> int:
        """What steps of a batch of so many rows may take more than predicted: as much as smaller ones have taken.

        And as much as the next larger one: only that size itself tells that it is less.
        """
        larger = min((size for size in self._margins if size >= rows), default=rows)
        return max((nbytes for size, nbytes in self._margins.items() if size <= larger), default=0)

    def new_slots(self) -> None:
        """Called when slots or shards in memory have changed: the next step allocates them."""
        self._fresh, self.course = True, []
        self._forget_choice()

    def new_choice(self) -> None:
        """Called when the next steps are to be measured."""
        self._to_measure = STEPS_MEASURED
        self._forget_choice()

    def _forget_choice(self) -> None:
        self._excess, self.kept_peak_bytes, self._kept_most = {}, None, None

    def begin(self, prediction: Prediction | None, updated_bytes: int, *, rows: float, idle: bool) -> None:
        """Begins a step.

        Args:
            prediction: of the step.
            rows: of the whole batch.
            updated_bytes: gradients there at the predicted begin that updates of the step before free.
            idle: whether no earlier forward waits for its backward.
        """
        self._rows, self.margin_bytes = rows, self.margin(rows)
        self.measures, self._cell = False, None  # of a step that failed there may be a cell
        if idle and prediction is not None:
            self._bound(prediction, updated_bytes)
        self._meter.measures_memory = self.measures
        self._peak.begin()
        self._began_with = 0 if self._heap is None else self._heap.held() or 0
        self._sample_course(known=prediction is not None)

    def _bound(self, prediction: Prediction, updated_bytes: int) -> None:
        """Returns free memory before the cells that need it."""
        self._held = prediction.peak.begin_bytes
        if self._heap is None:
            return
        self.measures = self._fresh or self._to_measure > 0
        most = self._limit()
        if self.measures:
            self._to_measure -= not self._fresh
            self._streamer.finish_updates_in_memory()
            self._held -= updated_bytes
            held = self._held - self._streamer.slot_pool.unallocated_bytes
            self._heap.measure_others(held, most // GAPS_SHARE)
            self._gaps = self._heap.gaps_bytes
            most = min(most, self._least_room(prediction))
        elif self._kept_most is not None:
            most = self._kept_most
        cells, make_room = prediction.cells(), self._heap.make_room

        def before(*cell: Any) -> None:
            if (moment := cells.get(cell)) is not None:
                self._end_cell()
                make_room(moment.nbytes - moment.rise, moment.rise + self._excess.get(cell, 0), most)
                if self.measures and not self._fresh:
                    self._cell = cell, moment.rise
                    self._peak.begin_part()

        def before_buffer(nbytes: int) -> None:
            make_room(prediction.memory_bytes - nbytes, nbytes, most)

        self._meter.before_cell, self._meter.before_buffer = before, before_buffer

    def _least_room(self, prediction: Prediction) -> int:
        """The bytes of a step that keeps hardly any free memory."""
        return prediction.memory_bytes - prediction.margin_bytes + self._gaps + MEASURED_SLACK_BYTES

    def _keep_less(self, exceeded: int, prediction: Prediction) -> None:
        """The next steps that are not measured return free memory sooner, down to what measured ones keep."""
        before = self._limit() if self._kept_most is None else self._kept_most
        self._kept_most = max(min(before, self._least_room(prediction)), before - exceeded)
        assert self.kept_peak_bytes is not None
        self.kept_peak_bytes -= before - self._kept_most

    def _end_cell(self) -> None:
        """Notes how much more than predicted memory rose in the cell that is measured, if any."""
        if self._cell is not None:
            (cell, predicted), self._cell = self._cell, None
            self._excess[cell] = max(self._excess.get(cell, 0), (self._peak.part_rise() or 0) - predicted)

    def _sample_course(self, *, known: bool) -> None:
        """Samples the memory after each cell of a plan's second step: the first one allocates slots and buffers."""
        samples: list[int] = []
        held = self._held if known and not self._fresh else None

        def sample() -> None:
            if (above := self._peak.now()) is not None and held is not None:
                samples.append(held + above)

        wanted = held is not None and not self.course
        self._meter.after_cell = sample if wanted else None
        if wanted:
            self.course = samples

    def end(self, predicted: Prediction | None, *, probes: bool = False) -> bool:
        """Ends a step; returns whether the margin has changed: with one that has grown plans have less room.

        ``probes``: its prediction is that of other sizes, and so no measure of what plans of its own exceed.
        """
        self._meter.before_cell = self._meter.after_cell = self._meter.before_buffer = None
        self._end_cell()
        rise = self._peak.rise()
        if rise is None or predicted is None:
            return False
        if self._heap is not None and not self.measures:
            # Free memory is a part of this peak, which says nothing of the plan unless it is too much.
            peak = self._began_with + rise
            self.kept_peak_bytes = max(self.kept_peak_bytes or 0, peak)
            if (exceeded := peak - self._limit()) > 0:
                self._keep_less(exceeded, predicted)
            self._to_measure += exceeded > 2 * LEAST_BYTES
            return False
        # What is made in the first step of a plan is not there at its begin.
        peak = rise + (0 if self._fresh else self._held + self._gaps)
        fresh, self._fresh = self._fresh, False
        if not fresh:
            self.peak_bytes = peak
        if probes:
            return False
        more = peak - (predicted.memory_bytes - predicted.margin_bytes)
        # Peaks differ a little from step to step: a margin that followed would choose again and again.
        steady = 0 if self._heap is None else min(MEASURED_SLACK_BYTES, self._limit() // STEADY_SHARE)
        if more > self.margin_bytes + steady:
            self._margins[self._rows] = more
        elif not fresh:  # that of a larger size does not hold for this one any more
            self._margins.setdefault(self._rows, more if more > steady else 0)
        before, self.margin_bytes = self.margin_bytes, self.margin(self._rows)
        return self.margin_bytes != before
