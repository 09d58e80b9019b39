"""Chooses the plans of one model's steps under a limit of memory, from what its first steps have measured.

====  ==============================================================================================================
step  plan
====  ==============================================================================================================
1     the leanest: two slots, every cell is recomputed; sizes and times are measured
2     the fastest that fits, by these measurements
4     the same with better measurements; another one only for a predicted gain of more than 5 %
====  ==============================================================================================================

Slots and the shards that rest in memory stay until the next choice. Which graphs are kept, which boundaries are spilled
and whose gradients wait is chosen for each size of batch, before anything of its step has moved. If a step took more
memory than predicted, the difference becomes a margin and the next step begins with a smaller plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from offload.engine.measured import step_model
from offload.planning.search import (
    Choice,
    Found,
    NothingFitsError,
    Prediction,
    StepModel,
    fill,
    predict,
    search,
)
from offload.storage import Tier
from offload.streaming.streamer import Streamer
from offload.telemetry.peak import PeakMeter
from offload.telemetry.statistics import Meter

if TYPE_CHECKING:
    from offload.engine.steps import Steps

__all__ = ["MemoryPlanner", "PlanReport"]

#: Steps after which a plan is chosen.
PLAN_AFTER = (1, 3)
#: Least predicted gain for which a plan is replaced by another.
LEAST_GAIN = 0.05
#: Different sizes of a batch whose choices are remembered.
SIZES_REMEMBERED = 64


@dataclass(frozen=True)
class PlanReport:
    """What the last step was predicted to cost, and did."""

    limit_bytes: int
    found: Found | None
    model: StepModel | None
    predicted: Prediction | None
    measured_seconds: float | None
    measured_bytes: int | None
    margin_bytes: int


class MemoryPlanner:
    """Plans the steps of one model.

    Args:
        limit_bytes: of the memory that layers compute in.
        keep_in_memory: moves shards between their files and memory; None where all rest where they are.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        streamer: Streamer,
        meter: Meter,
        tier: Tier,
        device: torch.device,
        keep_in_memory: Callable[[Collection[int]], None] | None = None,
        may_rest: Callable[[], dict[int, int]] = dict,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._streamer = streamer
        self._meter = meter
        self._tier = tier
        self._device = device
        self._keep_in_memory = keep_in_memory
        self._may_rest = may_rest
        self._steps_done = 0
        self._due = False
        self._found: Found | None = None
        #: Of the present step, if anything is known yet.
        self.choice: Choice | None = None
        self._prediction: Prediction | None = None
        self._choices: dict[tuple[tuple[int, ...], int], Prediction] = {}
        self._in_memory: frozenset[int] = frozenset()
        self._margin_bytes = 0
        self._peak = PeakMeter(device)
        self._began = 0.0
        self._measured_seconds: float | None = None
        self._measured_bytes: int | None = None

    def begin(self, steps: Steps, rows: Sequence[int], *, idle: bool) -> None:
        """Begins a training step; ``idle``: no earlier forward waits for its backward.

        Raises:
            ValueError: if no plan of this step fits, before anything has moved.
        """
        if self._due and idle:
            self._plan_again(steps, rows)
        if self._steps_done:
            self._choose(steps, rows)
        self._peak.begin()
        self._began = time.perf_counter()

    def end(self, steps: Steps, rows: Sequence[int]) -> None:
        """Ends a training step: measures it, and decides whether to plan again before the next."""
        self._steps_done += 1
        self._measured_seconds = time.perf_counter() - self._began
        rise = self._peak.rise()
        if rise is not None and self._prediction is not None:
            held = self._held_before(self._prediction)
            self._measured_bytes = held + rise
            more = held + rise - (self._prediction.memory_bytes - self._margin_bytes)
            if more > self._margin_bytes:
                self._margin_bytes = more
                self._due = True
                self._choices.clear()
        self._due |= self._steps_done in PLAN_AFTER

    def _held_before(self, prediction: Prediction) -> int:
        """Predicted bytes at the beginning of the step."""
        first = prediction.course[0]
        return first.nbytes - first.cell - first.boundaries

    def _model(self, steps: Steps, rows: Sequence[int]) -> StepModel:
        shards = self._streamer.shards
        model = step_model(shards, steps, rows, meter=self._meter, tier=self._tier, device=self._device)
        optimizers = self._streamer.gradient_offload.optimizers
        return replace(
            model,
            updates=optimizers.planned(),
            resting_bytes=self._may_rest(),
            always_kept=frozenset((cell.j, cell.i) for cell in steps.written_cells(rows, model.first)),
            gradients_wait=self._tier.blocking_io and not optimizers.planned()["updates"],
            margin_bytes=self._margin_bytes,
        )

    def _plan_again(self, steps: Steps, rows: Sequence[int]) -> None:
        model = self._model(steps, rows)
        try:
            found = search(model, self.limit_bytes)
        except NothingFitsError as error:
            raise self._refused(error, rows) from error
        self._due = False
        if self._found is not None:
            now = self._filled(model, self._found.best.choice)
            if now is not None and found.best.seconds > (1 - LEAST_GAIN) * now.seconds:
                found = replace(found, best=now)
        self._found = found
        self._choices.clear()
        self._switch(found.best.choice)

    def _filled(self, model: StepModel, choice: Choice) -> Prediction | None:
        try:
            return predict(model, fill(model, choice, self.limit_bytes))
        except NothingFitsError:
            return None

    def _switch(self, choice: Choice) -> None:
        """Changes slots and the shards in memory."""
        self._streamer.resize(choice.slots)
        if self._keep_in_memory is not None and choice.in_memory != self._in_memory:
            self._keep_in_memory(choice.in_memory)
            self._in_memory = choice.in_memory

    def _choose(self, steps: Steps, rows: Sequence[int]) -> None:
        """The choice for micro-batches of so many rows, with the present slots and shards in memory."""
        key = (tuple(rows), self._gradient_bytes_held())
        if key not in self._choices:
            model = self._model(steps, rows)
            model = replace(model, sizes=replace(model.sizes, constant_bytes=model.sizes.constant_bytes + key[1]))
            present = Choice(self._streamer.slots, self._in_memory)
            try:
                choice = fill(model, present, self.limit_bytes)
            except NothingFitsError as error:
                raise self._refused(error, rows) from error
            if len(self._choices) >= SIZES_REMEMBERED:
                self._choices.clear()
            self._choices[key] = predict(model, choice)
        self._prediction = self._choices[key]
        self._streamer.allow_free_bytes(self.limit_bytes - self._prediction.memory_bytes)
        self.choice = self._prediction.choice
        self._streamer.gradient_offload.waiting = self.choice.waiting

    def _gradient_bytes_held(self) -> int:
        """Bytes of gradients in memory that no pending update owns: those of accumulation."""
        if not self._tier.blocking_io:
            return 0
        held = 0
        for shard in self._streamer.shards:
            if shard.pending is not None:
                continue
            stored = None if shard.gradients is None else shard.gradients.tensor.untyped_storage().data_ptr()
            for s in shard.own:
                gradient = s.parameter.grad
                if gradient is not None and gradient.untyped_storage().data_ptr() != stored:
                    held += s.nbytes
        return held

    def _refused(self, error: NothingFitsError, rows: Sequence[int]) -> ValueError:
        return ValueError(
            f"a step of micro-batches of {max(rows)} rows takes at least {error.least_bytes:,} bytes on "
            f"{self._device}, {error.least_bytes - self.limit_bytes:,} more than memory={self.limit_bytes:,}; pass "
            f"more memory, fewer rows, or more micro-batches (num_microbatches)"
        )

    def report(self) -> PlanReport:
        """The last choice, and what its step measured."""
        return PlanReport(
            self.limit_bytes,
            self._found,
            None,
            self._prediction,
            self._measured_seconds,
            self._measured_bytes,
            self._margin_bytes,
        )
