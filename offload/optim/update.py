"""What one step decided for one shard: gradients, hyperparameters, a coefficient; to be applied before its next load.

``step()`` cannot wait for the homes to be updated: for a model larger than memory that takes as long as reading and
writing all of it. So it writes down what is to be done, and each shard is updated on a lane just before the next copy
of its bytes, while earlier shards compute. Nobody can see the difference, because nobody reads a home in between: the
streamer waits for :meth:`Update.start`, and so does everything that reads through the model.

Guarantees
    * The update is applied once, however often it is started. If it fails, its arrival raises, what is done stays done,
      and the next start goes on from there.
    * The gradients belong to the update from ``step()`` on. ``zero_grad(set_to_none=True)`` takes the names away, not
      the values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from offload.optim.param_block import PartialUpdateError, UpdateJob
from offload.storage.io_thread_pool import IOThreadPool, PooledCall
from offload.streaming.lane import Arrival, Lane
from offload.streaming.shard import Shard
from offload.telemetry.statistics import Meter

__all__ = ["Update"]


class Update:
    """The pending update of one shard. Started by the thread that drives the model, run on the update lane."""

    def __init__(
        self,
        shard: Shard,
        tasks: Sequence[UpdateJob],
        lane: Lane,
        meter: Meter,
        *,
        in_slot: bool,
        io_threads: IOThreadPool,
        finished: Callable[[UpdateJob], None],
    ) -> None:
        self._shard = shard
        #: Its letter in the plan: before a load, or in backward.
        self.letter = "U"
        #: What is still to be done.
        self.tasks = list(tasks)
        self._lane = lane
        self._meter = meter
        #: Whether parameters may be updated in the slot that is about to be filled, which saves reading them twice.
        self._in_slot = in_slot and not shard.casts
        self._io_threads = io_threads
        self._finished = finished
        self._arrival: Arrival | None = None
        #: Whether an exception was raised between the begin and the end of a start.
        self._starting = False
        self._failed = False
        #: Whether all of it was applied; or nothing of it, and nothing will be.
        self.done = self.withdrawn = False
        self._partial: PartialUpdateError | None = None
        self._filled: Tensor | None = None
        #: The update that is expected next: what it needs is read while this one ends.
        self.following: Update | None = None

    def start(self, slot: Tensor | None = None, after: Sequence[Arrival] = ()) -> Arrival:
        """Starts the update, unless it is under way or done. ``slot`` is where the shard is about to be loaded."""
        if self._arrival is None or self._failed:
            if self._starting:
                self.wait_idle()
            self._starting = True
            self._arrival, self._failed = None, False
            slot = slot if self._in_slot else None
            filling = self._begin_to_fill(slot)
            self._arrival = self._lane.submit(
                f"{self.letter}{self._shard.index}", partial(self._run, slot, filling), after
            )
            self._starting = False
        return self._arrival

    def wait_idle(self) -> None:
        """Waits until nothing of it is under way, whatever came of what was; also of a start that was interrupted."""
        # Update lane -> host. Without this, an update that nobody knows of runs a second time, beside itself.
        self._lane.wait_idle()
        # Reader -> host. Without this, weights arrive in a slot that is somebody else's by now.
        self._io_threads.wait_idle()

    def _begin_to_fill(self, slot: Tensor | None) -> PooledCall:
        """Begins to read the weights as they are before the update, while the one before it may still run."""
        home = self._shard.home
        if slot is None or home is None:
            return PooledCall([], None)

        def fill() -> None:
            with self._meter.on_lane("load", f"L{self._shard.index}", home.nbytes):
                home.read_into(slot)

        # What an earlier attempt could not write has to be in the file first.
        return self._io_threads.submit(fill) if self.untouched else PooledCall([fill], None)

    def filled(self, slot: Tensor) -> bool:
        """Whether the update left the shard's new values in ``slot``."""
        return self._filled is slot

    @property
    def untouched(self) -> bool:
        """Whether nothing was applied yet."""
        return (
            not self.done
            and self._partial is None
            and not any(job.done or job.scaled or job.blocks_done or job.unwritten for job in self.tasks)
        )

    def withdraw(self) -> None:
        """Gives up an update that changed nothing."""
        self.withdrawn = True
        self.tasks.clear()
        self._shard.pending = None

    def _run(self, slot: Tensor | None, filling: PooledCall) -> None:
        try:
            self._prepare(slot, filling)
            nbytes = sum(job.nbytes for job in self.tasks if not job.done)
            with self._meter.on_lane("update", f"{self.letter}{self._shard.index}", nbytes):
                self._run_tasks(slot)
        except PartialUpdateError as error:
            self._partial, self._failed = error, True
            raise
        except BaseException:
            self._failed = True
            for job in self.tasks:
                # Writer -> update lane. Without this, files take from a slot that is somebody else's by now.
                job.param_block.cancel_prefetch()
            raise
        self._filled = slot
        if not self.done:
            self._count()
        self.done = True
        self.tasks.clear()
        self._shard.pending = None

    def _prepare(self, slot: Tensor | None, filling: PooledCall) -> None:
        """Has the weights in the slot, and what comes first on its way to the I/O buffers."""
        if self._partial is not None:
            raise self._partial
        for job in self.tasks:
            job.param_block.flush(job)
        if slot is not None:
            for job in self._coming(0):
                if not job.param_block.prefetch(job):
                    break
        # Reader -> update lane. Without this, weights are updated that are still being read.
        filling.synchronize()

    def _count(self) -> None:
        meter = self._meter
        meter.shard_updates += 1
        for job in self.tasks:
            meter.update_bytes_read += job.bytes_read
            meter.update_bytes_written += job.bytes_written

    def _run_tasks(self, slot: Tensor | None) -> None:
        computed: deque[UpdateJob] = deque()
        for k, job in enumerate(self.tasks):
            if not job.done:
                job.param_block.run(job, slot, partial(self._coming, k + 1))
                computed.append(job)
            while computed and not computed[0].unwritten:
                self._end(computed.popleft())
        for job in computed:
            job.param_block.flush(job)
            self._end(job)

    def _end(self, job: UpdateJob) -> None:
        job.done = True
        job.gradients = []  # their memory is free from here on
        self._finished(job)

    def _coming(self, first: int) -> Iterator[UpdateJob]:
        """What is still to be done from task ``first`` on, here and in the updates that are expected next."""
        update: Update | None = self
        while update is not None:
            yield from (job for job in update.tasks[first:] if not job.done)
            update, first = update.following, 0
