"""Chooses the plans of one model's steps under a limit of memory, from what its first steps have measured.

The first step has the leanest plan: two slots, and every cell is recomputed; sizes and times are measured. Then slots
and shards that rest in memory are chosen, and again when an optimizer has made its states: until then their bytes are
unknown, and nothing that stays between steps takes their place. Which graphs are kept, which boundaries are spilled and
whose gradients wait is chosen for each size of batch, before anything of its step has moved. Rows longer than all
before begin with the least memory, since theirs may grow faster than they do.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from offload.engine.homes import ModelHomes
from offload.engine.sizes import bytes_of_boundary
from offload.limits import GAPS_SHARE, MemoryLimits
from offload.planner.measured import (
    bytes_left,
    costs_of,
    holds_gradients,
    in_host_memory,
    shards_that_fit,
    step_model,
    unowned_gradients,
)
from offload.planner.outside import outside_bytes
from offload.planner.step_memory import StepMemory, bound_of
from offload.planning.choose import NothingFitsError, Prediction, choose, fill, least_limit, predict
from offload.planning.rows import remember, shown
from offload.planning.step_model import LEAST_SLOTS, Choice, StepModel
from offload.policy import MemoryPolicy
from offload.storage.buffer import has_own_memory
from offload.streaming.moves import HomeInUseError
from offload.telemetry.memory_report import MemoryReport
from offload.units import shown_bytes
from pipe.nested import tensors_in

__all__ = ["MemoryPlanner", "TooLargeError", "plan_memory"]

_logger = logging.getLogger("offload")

#: Of a limit of memory on the CPU, staging buffers of transfers take at most one part in so many.
STAGING_SHARE = 16


class TooLargeError(ValueError):
    """A step is known not to fit, before anything of it has moved."""


class MemoryPlanner:
    """Plans the steps of one model within ``limits``; what its ``policy`` fixes is not chosen."""

    def __init__(self, limits: MemoryLimits, policy: MemoryPolicy, homes: ModelHomes, made_bytes: int) -> None:
        self._limits = limits
        self._given = policy
        self._model_planned = weakref.ref(homes)  # without it, a cycle with its steps
        self._streamer, self._optimizers = homes.streamer, homes.streamer.gradient_offload.optimizers
        self._device = homes.device
        self._steps_done = 0
        self._due = False
        #: Rows for which no plan fitted since the last one became due: each choice would also wait for all updates.
        self._in_vain: tuple[float, ...] | None = None
        #: Whether an optimizer had not stepped at the begin of the last step: several backwards, one update.
        self._awaited = False
        #: Of the present step, if anything is known yet.
        self.choice: Choice | None = None
        self._prediction: Prediction | None = None
        #: Whether it is of rows that are longer than all before, with the least memory.
        self._probes = False
        self._choices: dict[tuple[object, ...], Prediction] = {}
        #: Whether gradients were ever accumulated, or zeroed in place.
        self._accumulates = False
        self._warned: set[Hashable] = set()
        #: Samples and rows of batches that ran: these, and smaller ones, are never refused later.
        self._ran: set[tuple[int, tuple[float, ...]]] = set()
        #: Of the batch of the present step.
        self._samples = 0
        self._memory = StepMemory(self._device, made_bytes)
        self._began = 0.0
        self._measured_seconds: float | None = None

    @property
    def limit_bytes(self) -> int:
        """Bytes of the memory that layers compute in."""
        return self._limits.device.nbytes

    @property
    def _homes(self) -> ModelHomes:
        homes = self._model_planned()
        assert homes is not None
        return homes

    def begin(self, rows: Sequence[float], rounded: Sequence[float], *, samples: int, idle: bool) -> Sequence[float]:
        """Begins a training step; returns the sizes for which it is planned.

        Args:
            rows: of each micro-batch, as those of the first batch.
            rounded: the same rounded up, for which it is planned if that fits.
            samples: of the batch, however long each is.
            idle: no earlier forward waits for its backward.

        Raises:
            ValueError: if no plan of this step fits, before anything has moved.
        """
        self._samples = samples
        if [*rows] != [*rounded]:
            with contextlib.suppress(TooLargeError):
                self._begin(rounded, idle=idle)
                return rounded
        self._begin(rows, idle=idle)
        return rows

    def _begin(self, rows: Sequence[float], *, idle: bool) -> None:
        awaited, self._awaited = self._awaited, self._optimizers.awaits_states()
        if awaited != self._awaited:
            self._due, self._in_vain = True, None
        self._accumulates |= any(map(unowned_gradients, self._streamer.shards))
        if self._due and idle and self._steps_done and self._in_vain != tuple(rows):
            self._plan_again(rows)
        if self._steps_done:
            self._choose(rows, idle=idle)
            self._warn_of_others()
        self._began = time.perf_counter()
        self.return_excess()
        self._memory.begin()

    def check_first(self, leaves: Sequence[Any]) -> None:
        """Refuses a first batch that does not fit beside slots on a device, where it is copied to.

        On the CPU the batch is the caller's. Raises TooLargeError before anything has moved.
        """
        if self._memory.on_host or self._steps_done:
            return
        batch_bytes = sum(map(bytes_of_boundary, {id(x): x for x in tensors_in(leaves)}.values()))
        pool = self._streamer.slot_pool
        least = pool.slots * pool.slot_bytes + outside_bytes(self._homes).begins + batch_bytes
        if least <= self.limit_bytes:
            return
        raise TooLargeError(
            f"the first batch has {shown_bytes(batch_bytes)}, with {shown_bytes(least - batch_bytes)} of slots and of "
            f"parameters in no shard {shown_bytes(least - self.limit_bytes)} more than memory={self.limit_bytes:,}, "
            f"without what layers make of it; pass more memory, or fewer or shorter rows"
        )

    def return_excess(self) -> None:
        """See :meth:`.StepMemory.return_excess`; called before each cell, and between passes."""
        self._memory.return_excess(self.limit_bytes)

    def end(self, rows: Sequence[float]) -> None:
        """Ends a training step: measures it, and decides whether to plan again before the next."""
        self._steps_done += 1
        self._ran.add((self._samples, tuple(rows)))
        self._measured_seconds = time.perf_counter() - self._began
        if self._steps_done == 1:
            self._due, self._in_vain = True, None
        self.return_excess()
        left = self._left_free(rows)
        took = self._memory.end(sum(rows), self._prediction, probes=self._probes)
        if took is not None and (self._probes or self._prediction is None):
            self._warn_of_excess(rows, took)
        if left != self._left_free(rows):
            self._choices.clear()

    def all_stays(self, rows: Sequence[float]) -> bool:
        """Whether nothing moves or is recomputed in a step of these sizes, as in one that is as large."""
        return (
            not self._due
            and len(self._streamer.in_place()) == len(self._streamer.shards)
            and self._awaited == self._optimizers.awaits_states()
            and any(
                known.all_stays and len(known.model.rows) == len(rows) and all(map(operator.ge, known.model.rows, rows))
                for known in self._choices.values()
            )
        )

    def _model(self, rows: Sequence[float]) -> StepModel:
        homes = self._homes
        model = step_model(homes, rows)
        resting, given = model.resting_bytes, self._given
        if self._optimizers.awaits_states():
            # Their states, of unknown size, would come into memory with them.
            trained = {shard.index for shard in self._streamer.shards if shard.trainable} - self._streamer.in_place()
            resting = {j: nbytes for j, nbytes in resting.items() if j not in trained}
            # States of what is in memory already, too: nothing else that stays between steps takes their place.
            resident = 0 if given.resident_bytes is None else given.resident_bytes
            given = replace(given, slots=given.slots or LEAST_SLOTS, resident_bytes=resident)
        elif not self._memory.on_host:
            given = replace(given, resident_bytes=None)  # of host memory
        return replace(
            model,
            resting_bytes=resting,
            accumulates=self._accumulates,
            # Not where whole gradients are counted on a device, and parts of them would wait in host memory.
            gradients_wait=any(shard.blocking_io for shard in homes.shards)
            and not (model.updates.in_backward or model.draining_bytes),
            host_bytes=None if self._memory.on_host else bytes_left(homes, self._limits.host.nbytes),
            given=given,
        )

    def _plan_again(self, rows: Sequence[float]) -> None:
        self._streamer.apply_pending_updates()  # the first ones make the optimizer's states, whose bytes count
        if not self._memory.on_host:  # shards whose homes are files rest in host memory, as many as its limit allows
            there = shards_that_fit(self._homes, self._limits.host.nbytes, self._given.resident_bytes)
            self._move(partial(self._homes.keep_in_memory, there))
        model = self._model(rows)
        try:
            choice = self._within(rows, lambda nbytes: choose(model, nbytes))
        except NothingFitsError as error:
            self._refuse(error, rows)
            self._in_vain = tuple(rows)
            # And :meth:`_choose` takes the leanest plan of these.
            choice = Choice(min(self._given.slots or LEAST_SLOTS, model.shards))
        else:
            self._due = False
            _logger.info("memory=%s: %s", shown_bytes(self.limit_bytes), choice)
        self._choices.clear()
        self._switch(choice)

    def _left_free(self, rows: Sequence[float]) -> int:
        """On a device: of the limit, what steps were measured to take beside what is counted."""
        return 0 if self._memory.on_host else self._memory.beside(sum(rows))

    def _within(self, rows: Sequence[float], plan: Callable[[int], Choice]) -> Choice:
        """A plan that leaves a part of the limit to the allocator of a process, or as much of it as a plan can."""
        limit = self.limit_bytes - self._left_free(rows)
        try:
            return plan(limit - limit // GAPS_SHARE if self._memory.on_host else limit)
        except NothingFitsError as error:
            if error.least_bytes > limit:
                raise
            return plan(error.least_bytes)

    def _switch(self, choice: Choice) -> None:
        """Changes slots and the shards in memory."""
        if choice.slots == self._streamer.slots and choice.in_memory == self._streamer.in_place():
            return
        self._memory.fresh = True
        # Those that leave go first: in one call both would be in memory for a moment.
        for wanted in (self._streamer.in_place() & choice.in_memory, choice.in_memory):
            if wanted != self._streamer.in_place() and not self._move(partial(self._homes.keep_on_device, wanted)):
                break
        # Loads run ahead of use in two slots at least, if any shard is loaded.
        self._streamer.resize(choice.slots if self._streamer.in_place() == choice.in_memory else max(2, choice.slots))

    def _move(self, move: Callable[[], None]) -> bool:
        """Moves shards; warns where they cannot move: the next choice is for those that are."""
        try:
            move()
        except (HomeInUseError, OSError, MemoryError) as error:
            self._warn(
                f"the plan for memory={shown_bytes(self.limit_bytes)} is followed without moving shards: {error}",
                "moves",
            )
            return False
        return True

    def _choose(self, rows: Sequence[float], *, idle: bool) -> None:
        """The choice for micro-batches of so many rows, with the present slots and shards in memory if it fits so."""
        homes = self._homes
        begins = self._gradients_there()
        key = tuple(rows), begins, outside_bytes(homes).begins
        if key not in self._choices:
            model = replace(self._model(rows), begins=begins)
            present = Choice(self._streamer.slots, self._streamer.in_place())
            least = replace(present, boundary_bytes=0)
            try:
                choice = self._within(rows, lambda nbytes: fill(model, present, nbytes))
            except NothingFitsError as error:
                if idle and self._in_vain != tuple(rows):
                    self._plan_again(rows)
                    self._choose(rows, idle=False)
                    return
                self._refuse(error, rows)
                choice = least
            # What longer rows take may grow faster than they do: the first time they have the least memory.
            self._probes = homes.row_units.differ and not self._has_run(rows)
            choice = least if self._probes else choice
            self._prediction = predict(replace(model, accumulates=False), choice)
            if not self._probes:
                remember(self._choices, key, self._prediction)
        else:
            self._prediction, self._probes = self._choices[key], False
        self.choice = self._prediction.choice
        self._streamer.gradient_offload.waiting = self.choice.waiting

    def _gradients_there(self) -> frozenset[int]:
        """The shards whose gradients are there; on a device, whose shards are updated at once, what was accumulated."""
        shards = self._streamer.shards
        if self._memory.on_host:
            return frozenset(s.index for s in shards if holds_gradients(s))
        return frozenset(s.index for s in shards if s.in_place and unowned_gradients(s))

    def _refuse(self, error: NothingFitsError, rows: Sequence[float]) -> None:
        """Raises ValueError for a batch that does not fit; warns for one no larger than one that ran, which goes on."""
        limit, beside, homes = self.limit_bytes, self._left_free(rows), self._homes
        least = error.least_bytes + beside
        outside, differ = outside_bytes(homes), homes.row_units.differ
        parts = {
            "by which earlier steps exceeded their prediction": beside,
            "for parameters in no shard, their gradients and states": outside.begins + outside.gradients - outside.held,
        }
        said = ", ".join(f"{shown_bytes(nbytes)} of them {what}" for what, nbytes in parts.items() if nbytes)
        as_long = " as long as those of the first batch" if differ else ""
        or_shorter = " or shorter" if differ else ""
        message = (
            f"a step of micro-batches of {shown(max(rows))} rows{as_long} takes at least {shown_bytes(least)} on "
            f"{self._device}, {shown_bytes(least - limit)} more than memory={shown_bytes(limit)}"
            + (f" ({said})" if said else "")
            + f"; {self._what_works(least)} works with it; pass more memory, fewer{or_shorter} rows, or more "
            f"micro-batches (num_microbatches)"
        )
        # Where bytes decide which chunks run together, and with that the last bits of results, only a count refuses.
        fits_by_count = self._given.activation_bytes is not None and error.least_bytes <= limit
        if not (fits_by_count or self._has_run(rows, lengths=False)):
            raise TooLargeError(message)
        self._warn(message, (len(rows), max(rows)))

    def _what_works(self, least: int) -> str:
        """The arguments with which a model, run in the same way, fits a step that takes ``least`` bytes in this one.

        Buffers of optimizers and of transfers are a part of the limit, so a step needs more with a larger one.
        """
        homes, limit, optimizers = self._homes, self.limit_bytes, self._optimizers
        staging, buffers = (homes.tier.staging_bytes, optimizers.buffer_bytes()) if self._memory.on_host else (0, 0)

        def needed(nbytes: int) -> int:
            reserved = optimizers.buffer_bytes(homes.steps.spare_bytes(nbytes)) if buffers else 0
            return least + max(0, reserved - buffers) + max(0, -(-staging * nbytes // limit) - staging)

        # With more memory, small layers would share a shard, which needs more.
        cuts = "" if homes.layers_apart else f" and num_slices={len(homes.shards)}"
        return f"memory={least_limit(needed, max(least, limit))}{cuts}"

    def _has_run(self, rows: Sequence[float], *, lengths: bool = True) -> bool:
        """Whether a batch that ran was at least as large: in all, and in its largest micro-batch.

        ``lengths``: all rows of a batch count by their lengths, and not only those of its largest micro-batch.
        """
        adds = len(rows) > 1  # then gradients of one micro-batch exist beside those of another
        return any(
            (sum(ran) >= sum(rows) if lengths else samples >= self._samples)
            and max(ran) >= max(rows)
            and (len(ran) > 1 or not adds)
            for samples, ran in self._ran
        )

    def _warn_of_excess(self, rows: Sequence[float], peak: int) -> None:
        """Warns if the first step, or the first one of longer rows, has taken more memory than there is."""
        if peak > bound_of(self.limit_bytes, self._device):
            self._warn(
                f"a step of micro-batches of {shown(max(rows))} rows took {shown_bytes(peak)}, "
                f"{shown_bytes(peak - self.limit_bytes)} more than memory={shown_bytes(self.limit_bytes)}. The first "
                f"step, and the first of longer rows, is not known before. Later steps stay within, if they can: this "
                f"one is known now. Begin with the longest rows, or pass more memory, fewer rows, or num_microbatches",
                ("longer", tuple(rows)),
            )

    def _warn_of_others(self) -> None:
        """Warns if the process has outgrown the limit between two steps, as by states of an optimizer of torch."""
        steps, ours = self._steps_done, any(self._optimizers)
        grown = 0 if ours or steps & (steps - 1) else self._memory.grown_bytes()
        if grown > bound_of(self.limit_bytes, self._device):
            self._warn(
                f"between two steps this process holds {shown_bytes(grown)} more than when the model was made. "
                f"memory={shown_bytes(self.limit_bytes)} does not count the states of optimizers of torch; "
                f"OffloadOptimizer(model, torch.optim.AdamW, ...) keeps them within it",
                "others",
            )

    def _warn(self, message: str, trouble: Hashable) -> None:
        """Warns once of the same trouble."""
        if trouble not in self._warned:
            self._warned.add(trouble)
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def observed(self, model: StepModel) -> StepModel:
        """The model of a step with the latest seconds, and what steps took beside what it counts."""
        beside = self._memory.beside(sum(model.rows))
        return replace(model, costs=costs_of(self._homes, model.rows), beside_bytes=beside)

    def report(self) -> MemoryReport:
        """What the present plan takes and costs."""
        homes, predicted, left = self._homes, self._prediction, 0
        in_files = any(shard.blocking_io or shard.file is not None for shard in homes.shards)
        if predicted is not None:
            rows = predicted.model.rows
            left = self.limit_bytes // GAPS_SHARE if self._memory.on_host else self._left_free(rows)
            predicted = predict(self.observed(predicted.model), predicted.choice)
        return MemoryReport(
            device=str(self._device),
            limit_bytes=self.limit_bytes,
            left_bytes=left,
            predicted=predicted,
            measured_seconds=self._measured_seconds,
            measured_bytes=self._memory.peak_bytes,
            resting=len(in_host_memory(homes)) if in_files and not self._memory.on_host else None,
        )


class MeshMemoryPlanner(MemoryPlanner):
    """Plans the steps of this rank, where ranks share a model: all begin and end the same steps.

    Loads of shards are collectives, whose order follows from the number of slots: it is that of the model's making.
    What concerns one rank alone (graphs that are kept, boundaries that are spilled) it chooses for itself.
    """

    def begin(self, rows: Sequence[float], rounded: Sequence[float], *, samples: int, idle: bool) -> Sequence[float]:
        """Begins a training step on all ranks.

        Raises:
            ValueError: if no plan of this rank's step fits; RuntimeError on the other ranks, with the rank.
        """
        error = None
        try:
            rows = super().begin(rows, rounded, samples=samples, idle=False)
        except ValueError as refused:
            error = refused
        everywhere = self._homes.public.compare("a step with memory=", float(error is not None))
        if error is not None:
            raise error
        if any(everywhere):
            raise RuntimeError(
                f"rank {everywhere.index(1.0)} of the mesh refused its batch, which does not fit in its memory=; see "
                f"its error"
            )
        return rows


def plan_memory(homes: ModelHomes, limits: MemoryLimits, policy: MemoryPolicy, made_bytes: int) -> None:
    """Chooses the plans of steps by what they measure, within the limits, if the policy leaves anything open.

    ``made_bytes``: anonymous memory of the process before the model was made.
    """
    if not policy.plans:
        return
    if not has_own_memory(homes.device):
        homes.tier.limit_staging(limits.device.nbytes // STAGING_SHARE)
    kind = MeshMemoryPlanner if homes.public.sharded else MemoryPlanner
    homes.steps.planner = kind(limits, policy, homes, made_bytes)
