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

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.optim.io_buffers import Blocks, IOBufferPool
from offload.optim.param_block import UpdateJob
from offload.streaming.grad_norm import detach_norm
from offload.streaming.lane import Arrival, CopyLane
from offload.streaming.shard import Shard
from offload.streaming.stored_values import seal
from offload.telemetry.statistics import UPDATE_IN_MEMORY, Meter
from pipe.stream import current_stream, use_device, use_stream
from pipe.threads import Future, Threads

__all__ = ["StepDecision", "Update"]


@dataclass(eq=False)
class Update:
    """The pending update of one shard. Started by the thread that runs the model, executed on the update lane."""

    shard: Shard
    #: The jobs that are not done.
    tasks: list[UpdateJob]
    lane: CopyLane
    meter: Meter
    io_threads: Threads
    buffer_pool: IOBufferPool
    #: A weak reference to what is called with each job that is done, since an update may outlive its optimizer.
    finished: Callable[[], Callable[[UpdateJob], None] | None]
    #: Whether parameters may be updated in the slot of the next load, which saves a second read.
    in_slot: bool
    #: Its letter in the plan: U before a load, V in backward.
    letter: str
    #: Whether all of it is applied.
    done: bool = False
    #: The expected next update: it is prefetched while this one ends.
    following: Update | None = None
    _arrival: Arrival | None = None
    #: Whether an exception was raised between the begin and the end of a start.
    _starting: bool = False
    _failed: bool = False
    _filled: Tensor | None = None

    def start(self, slot: Tensor | None = None, after: Sequence[Arrival] = (), *, holds: bool = False) -> Arrival:
        """Starts the update, unless it is running or done.

        ``slot`` is that of the shard's next load; or, if it ``holds`` the weights already, of its last visit.
        """
        if self._arrival is None or self._failed:
            if self._starting:
                self.wait_idle()
            self._starting = True
            self._arrival, self._failed = None, False
            slot = slot if self.in_slot else None
            filling = None if holds else self._begin_to_fill(slot)
            self._arrival = self.lane.submit(
                f"{self.letter}{self.shard.index}", partial(self._run, slot, filling), after
            )
            self._starting = False
        return self._arrival

    def make_pending(self) -> None:
        """Puts it before the next load. Increments the version of its parameters, although they are written later."""
        for job in self.tasks:
            note_update(job)
        self.shard.pending = self

    def wait_idle(self) -> None:
        """Waits until no part of it is running, successful or not; also after an interrupted start."""
        # Update lane -> host. Without this, an update whose start was interrupted runs twice at the same time.
        self.lane.wait_idle()
        # Reader -> host. Without this, weights are read into a slot that another shard uses.
        self.io_threads.wait_idle()

    def _begin_to_fill(self, slot: Tensor | None) -> Future[None] | None:
        """Begins to read the weights to be updated; the update before this one may still run."""
        home = self.shard.home
        if slot is None or home is None:
            return None

        def fill() -> None:
            with self.meter.on_lane("load", f"L{self.shard.index}", home.nbytes):
                self.shard.fill_own(slot)

        # The writes that failed in an earlier attempt have to be repeated first.
        return Future(fill) if any(job.unwritten for job in self.tasks) else self.io_threads.offer(fill)

    def filled(self, slot: Tensor) -> bool:
        """Whether the update left the shard's new values in ``slot``."""
        return self._filled is slot

    def _run(self, slot: Tensor | None, filling: Future[None] | None) -> None:
        try:
            self.flush()
            if slot is not None:
                self.buffer_pool.prefetch(self._upcoming(0))
            if filling is not None:
                # Reader -> update lane. Without this, weights are updated while they are being read.
                filling.run_or_wait()
            nbytes = sum(job.nbytes for job in self.tasks if not job.done)
            kind = None if self.shard.blocking_io else UPDATE_IN_MEMORY
            with self.meter.on_lane("update", f"{self.letter}{self.shard.index}", nbytes, kind=kind):
                for k, job in enumerate(self.tasks):
                    if not job.done:
                        job.param_block.run(job, slot, partial(self._upcoming, k + 1))
                        self._finish_job(job)
                self.flush()
        except BaseException:
            self._failed = True
            with contextlib.suppress(Exception):  # each write knows whether it is missing
                # Writer -> update lane. Without this, files are written from a slot that another shard uses.
                self.buffer_pool.wait_idle()
            raise
        self._filled = slot
        if not self.done:
            self.meter.shard_updates += 1
            self.meter.update_bytes_read += sum(job.bytes_read for job in self.tasks)
            self.meter.update_bytes_written += sum(job.bytes_written for job in self.tasks)
        self.done = True
        self.tasks.clear()
        self.shard.pending = None

    def flush(self) -> None:
        """Returns when everything computed is in its file; failed writes are repeated."""
        # Writer -> update lane. Without this, the update is done before its bytes are in their files.
        self.buffer_pool.wait_idle()
        for write in [write for job in self.tasks for write in job.unwritten]:
            write.run()

    def _finish_job(self, job: UpdateJob) -> None:
        """Called when a job is computed; its last writes may still be running."""
        job.done = True
        job.gradients = []  # frees their memory
        if (finished := self.finished()) is not None:
            finished(job)

    def _upcoming(self, first: int) -> Blocks:
        """What the unfinished jobs of this update from ``first`` on read, then those of the updates that follow."""
        update: Update | None = self
        while update is not None:
            for job in update.tasks[first:]:
                if not job.done:
                    yield from job.param_block.to_read(job)
            update, first = update.following, 0


def note_update(job: UpdateJob) -> None:
    """Increments the version of the parameters that an update writes, also for kernels that do not."""
    found = zip(job.param_block.parameters, job.gradients, strict=True)
    written = [(parameter, gradient) for parameter, gradient in found if gradient is not None]
    if job.coefficient is not None:
        for _, gradient in written:
            # Without this, a clipped gradient that is not zeroed would keep its norm from before.
            detach_norm(gradient)
    torch.autograd.graph.increment_version([parameter for parameter, _ in written])
    if job.param_block.shard.formed:
        seal(job.param_block.shard)


@dataclass(eq=False)
class StepDecision:
    """One step of an optimizer: the updates of all shards become pending together, or none does.

    Those of parameters that stay on the compute device run at once. If one fails after another has begun, the step is
    decided all the same.
    """

    #: Those of the shards that have a gradient, in the order of loads.
    updates: Sequence[Update]
    #: The updates of parameters that are on the compute device, and the thread that runs them.
    at_once: Sequence[UpdateJob]
    thread: Threads
    #: Called with each of these that is done.
    finished: Callable[[UpdateJob], None]
    meter: Meter
    #: The hyperparameters of all groups.
    options: list[dict[str, Any]]
    #: How many backwards had added to gradients, or had begun to.
    backwards: int
    #: Those of all parameters when the step raised; weakly, since zero_grad() frees them.
    gradients: Sequence[tuple[Tensor, weakref.ref[Tensor]]] = ()

    @property
    def begun(self) -> bool:
        """Whether anything is applied yet."""
        return any(job.done or job.scaled or job.param_block.stopped for job in self.at_once)

    def run_at_once(self) -> None:
        """Runs the updates on the device that are not done. After an interrupt the thread may still run one."""
        left = [job for job in self.at_once if not job.done]
        if not left:
            return
        device, nbytes = left[0].param_block.proxies[0].device, sum(job.nbytes for job in left)
        stream = current_stream(device)
        lane = self.meter.on_lane("update", "U", nbytes, kind=UPDATE_IN_MEMORY)
        measured = lane if device.type == "cpu" else contextlib.nullcontext()  # the host only begins what a device does

        def work() -> None:
            with use_device(device), use_stream(stream), torch.no_grad(), measured:
                for job in left:
                    job.param_block.run(job, None)
                    note_update(job)  # a backward that saved the old values notices the new ones
                    job.done = True
                    self.finished(job)

        try:
            future = self.thread.submit(work)
        except RuntimeError:  # in a forked process, or at exit, there is no thread
            work()
            return
        future.wait()

    def decide(self) -> None:
        """Makes all updates pending. Idempotent, for a second call after an exception in the first."""
        self.run_at_once()
        for update in self.updates:
            if update.shard.pending is not update and not update.done:
                update.make_pending()
        # The next forward loads the shards in their order.
        for update, following in itertools.pairwise(self.updates):
            update.following = following

    def repeats(self, backwards: int) -> bool:
        """Whether a call of ``step()`` repeats this one, which raised: no backward came between, and no gradient was
        replaced or removed."""
        return backwards == self.backwards and all(p.grad is gradient() for p, gradient in self.gradients)

    def start(self) -> None:
        """Starts the updates that need not wait for a load: homes in host memory are updated in place."""
        for update in self.updates:
            if not (update.shard.blocking_io or update.done):
                update.start()
