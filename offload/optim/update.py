"""The pending update of one shard: gradients, hyperparameters and clip coefficient, applied before its next load.

``step()`` does not wait for the homes to be updated: for a model larger than memory that takes as long as reading and
writing all of it. It records the update, and each shard is updated on a lane just before its next load, while earlier
shards compute. The delay cannot be observed: every read of a home waits for :meth:`Update.start`.

Guarantees
    * The update is applied once, however often it is started. If it fails, its arrival raises, completed parts stay
      done, and the next start resumes there.
    * The update owns its gradients from ``step()`` on: ``zero_grad(set_to_none=True)`` only clears ``.grad``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from offload.optim.param_block import PartialUpdateError, UpdateJob
from offload.streaming.lane import Arrival, CopyLane
from offload.streaming.shard import Shard
from offload.telemetry.statistics import UPDATE_IN_MEMORY, Meter
from pipe.threads import Future, Threads

__all__ = ["Update"]


class Update:
    """The pending update of one shard. Started by the thread that runs the model, executed on the update lane."""

    def __init__(
        self,
        shard: Shard,
        tasks: Sequence[UpdateJob],
        lane: CopyLane,
        meter: Meter,
        *,
        in_slot: bool,
        io_threads: Threads,
        finished: Callable[[UpdateJob], None],
    ) -> None:
        self._shard = shard
        #: Its letter in the plan: U before a load, V in backward.
        self.letter = "U"
        #: The jobs that are not done.
        self.tasks = list(tasks)
        self._lane = lane
        self._meter = meter
        #: Whether parameters may be updated in the slot of the next load, which saves a second read.
        self._in_slot = in_slot and shard.slot_keeps_weights
        self._io_threads = io_threads
        self._finished = finished
        self._arrival: Arrival | None = None
        #: Whether an exception was raised between the begin and the end of a start.
        self._starting = False
        self._failed = False
        #: ``done``: all of it is applied. ``withdrawn``: none of it is, or will be.
        self.done = self.withdrawn = False
        self._partial: PartialUpdateError | None = None
        self._filled: Tensor | None = None
        #: The expected next update: it is prefetched while this one ends.
        self.following: Update | None = None

    def start(self, slot: Tensor | None = None, after: Sequence[Arrival] = (), *, holds: bool = False) -> Arrival:
        """Starts the update, unless it is running or done.

        ``slot`` is that of the shard's next load; or, if it ``holds`` the weights already, of its last visit.
        """
        if self._arrival is None or self._failed:
            if self._starting:
                self.wait_idle()
            self._starting = True
            self._arrival, self._failed = None, False
            slot = slot if self._in_slot else None
            filling = None if holds else self._begin_to_fill(slot)
            self._arrival = self._lane.submit(
                f"{self.letter}{self._shard.index}", partial(self._run, slot, filling), after
            )
            self._starting = False
        return self._arrival

    def wait_idle(self) -> None:
        """Waits until no part of it is running, successful or not; also after an interrupted start."""
        # Update lane -> host. Without this, an update whose start was interrupted runs twice at the same time.
        self._lane.wait_idle()
        # Reader -> host. Without this, weights are read into a slot that another shard uses.
        self._io_threads.wait_idle()

    def _begin_to_fill(self, slot: Tensor | None) -> Future[None] | None:
        """Begins to read the weights to be updated; the update before this one may still run."""
        home = self._shard.home
        if slot is None or home is None:
            return None

        def fill() -> None:
            with self._meter.on_lane("load", f"L{self._shard.index}", home.nbytes):
                self._shard.fill_own(slot)

        # The writes that failed in an earlier attempt have to be repeated first.
        return self._io_threads.offer(fill) if self.unapplied else Future(fill)

    def filled(self, slot: Tensor) -> bool:
        """Whether the update left the shard's new values in ``slot``."""
        return self._filled is slot

    @property
    def unapplied(self) -> bool:
        """Whether nothing is applied yet."""
        return (
            not self.done
            and self._partial is None
            and not any(job.done or job.scaled or job.blocks_done or job.unwritten for job in self.tasks)
        )

    def withdraw(self) -> None:
        """Drops an update that changed nothing."""
        self.withdrawn = True
        self.tasks.clear()
        self._shard.pending = None

    def _run(self, slot: Tensor | None, filling: Future[None] | None) -> None:
        try:
            self._prepare(slot, filling)
            nbytes = sum(job.nbytes for job in self.tasks if not job.done)
            kind = None if self._shard.blocking_io else UPDATE_IN_MEMORY
            with self._meter.on_lane("update", f"{self.letter}{self._shard.index}", nbytes, kind=kind):
                self._run_tasks(slot)
        except PartialUpdateError as error:
            self._partial, self._failed = error, True
            raise
        except BaseException:
            self._failed = True
            for job in self.tasks:
                # Writer -> update lane. Without this, files are written from a slot that another shard uses.
                job.param_block.cancel_prefetch()
            raise
        self._filled = slot
        if not self.done:
            self._meter.shard_updates += 1
            self._meter.update_bytes_read += sum(job.bytes_read for job in self.tasks)
            self._meter.update_bytes_written += sum(job.bytes_written for job in self.tasks)
        self.done = True
        self.tasks.clear()
        self._shard.pending = None

    def _prepare(self, slot: Tensor | None, filling: Future[None] | None) -> None:
        """Repeats failed writes, begins to prefetch, and waits for the weights in the slot."""
        if self._partial is not None:
            raise self._partial
        for job in self.tasks:
            job.param_block.flush(job)
        if slot is not None:
            for job in self._upcoming(0):
                if not job.param_block.prefetch(job):
                    break
        if filling is not None:
            # Reader -> update lane. Without this, weights are updated while they are being read.
            filling.run_or_wait()

    def _run_tasks(self, slot: Tensor | None) -> None:
        computed: deque[UpdateJob] = deque()
        for k, job in enumerate(self.tasks):
            if not job.done:
                job.param_block.run(job, slot, partial(self._upcoming, k + 1))
                computed.append(job)
            while computed and not computed[0].unwritten:
                self._finish_job(computed.popleft())
        for job in computed:
            job.param_block.flush(job)
            self._finish_job(job)

    def _finish_job(self, job: UpdateJob) -> None:
        job.done = True
        job.gradients = []  # frees their memory
        self._finished(job)

    def _upcoming(self, first: int) -> Iterator[UpdateJob]:
        """The unfinished jobs of this update from ``first`` on, then those of the updates that follow."""
        update: Update | None = self
        while update is not None:
            yield from (job for job in update.tasks[first:] if not job.done)
            update, first = update.following, 0
