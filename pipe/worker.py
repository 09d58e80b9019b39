"""Worker threads, one per device, that issue the kernels of pipeline stages in parallel.

The host may need as long to issue the kernels of one stage as the device to compute them; with one thread, devices
would be used one after another.

Guarantees
    * Tasks of one device run one at a time, in the order in which they were put.
    * A task sees the settings of the thread that called :func:`spawn_workers` (:mod:`pipe.recompute.thread_state`),
      its context variables and its phase.
    * An exception of a task, ``SystemExit`` and ``KeyboardInterrupt`` included, is put into the out queue.
    * When the context ends, by an exception or not, all threads have ended.

Assumes
    * Every task returns eventually: a thread cannot be interrupted from outside.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from pipe.microbatch import Batch
from pipe.recompute.phase import enable_checkpointing, enable_recomputing, is_checkpointing, is_recomputing
from pipe.recompute.thread_state import ThreadState
from pipe.stream import AbstractStream, normalize_device, use_device, use_stream

__all__ = ["InQueue", "OutQueue", "Task", "needs_threads", "spawn_workers", "task_runner", "worker"]


class Task:
    """One micro-batch on one stage.

    Args:
        stream: the stream of the stage's device that both parts use.
        compute: the part for the worker thread.
        finalize: the part for the calling thread, called with the result of ``compute``.
        inline: whether ``compute`` runs in the calling thread, too.
    """

    def __init__(
        self,
        stream: AbstractStream,
        *,
        compute: Callable[[], Batch],
        finalize: Callable[[Batch], None] | None,
        inline: bool = False,
    ) -> None:
        self.stream = stream
        self.inline = inline
        self._compute = compute
        self._finalize = finalize

    def compute(self) -> Batch:
        """Runs the first part."""
        with use_stream(self.stream):
            return self._compute()

    def finalize(self, batch: Batch) -> None:
        """Runs the second part."""
        if self._finalize is not None:
            with use_stream(self.stream):
                self._finalize(batch)


InQueue = SimpleQueue[Task | None]
OutQueue = SimpleQueue[tuple[bool, Any]]
"""``(True, (task, batch))`` of a task that returned, ``(False, exception)`` of one that raised."""


def worker(in_queue: InQueue, out_queue: OutQueue, device: torch.device) -> None:
    """Runs the tasks of one device until the in queue yields None."""
    with use_device(device):
        while (task := in_queue.get()) is not None:
            try:
                batch = task.compute()
            except BaseException as error:
                out_queue.put((False, error))
            else:
                out_queue.put((True, (task, batch)))
                del batch
            # Without this, the thread keeps the last micro-batch alive while it waits for the next.
            del task


@contextlib.contextmanager
def spawn_workers(devices: Sequence[torch.device]) -> Iterator[tuple[list[InQueue], list[OutQueue]]]:
    """Threads for ``devices``, repeated devices sharing one; yields an in queue and an out queue for each entry."""
    thread_state = ThreadState.capture(device.type for device in devices)
    checkpointing, recomputing = is_checkpointing(), is_recomputing()
    threads: list[Thread] = []
    queues: dict[torch.device, tuple[InQueue, OutQueue]] = {}

    def carried(in_queue: InQueue, out_queue: OutQueue, device: torch.device) -> None:
        with thread_state.again(), enable_checkpointing(checkpointing), enable_recomputing(recomputing):
            worker(in_queue, out_queue, device)

    names = [normalize_device(device) for device in devices]
    try:
        for device in dict.fromkeys(names):
            queues[device] = (SimpleQueue(), SimpleQueue())
            context = contextvars.copy_context()
            thread = Thread(target=context.run, args=(carried, *queues[device], device), daemon=True)
            thread.start()
            threads.append(thread)
        yield [queues[device][0] for device in names], [queues[device][1] for device in names]
    finally:
        for in_queue, _ in queues.values():
            in_queue.put(None)
        for thread in threads:
            thread.join()


def needs_threads(devices: Sequence[torch.device]) -> bool:
    """Whether there are several devices: tasks of one device run one after another anyway."""
    return len({normalize_device(device) for device in devices}) > 1


@contextlib.contextmanager
def task_runner(
    devices: Sequence[torch.device], *, in_order: bool = False
) -> Iterator[Callable[[Sequence[tuple[int, Task]]], list[Batch]]]:
    """Yields a function that runs the tasks of one clock, given with their positions in ``devices``.

    Tasks of several devices run in threads; those of a single device run in the calling thread. The function returns
    the results of the tasks, in their order, or raises the exception of the first failed one after all started tasks
    have ended.

    Args:
        devices: the device of each position.
        in_order: whether each task begins when the one before it has ended, instead of all in parallel.
    """
    if not needs_threads(devices):
        with use_device(devices[0]):
            yield lambda tasks: [task.compute() for _, task in tasks]
        return

    with spawn_workers(devices) as (in_queues, out_queues):

        def run_in_order(tasks: Sequence[tuple[int, Task]]) -> list[Batch]:
            return [run([task])[0] for task in tasks]

        def run(tasks: Sequence[tuple[int, Task]]) -> list[Batch]:
            here = {id(in_queues[j]) for j, task in tasks if task.inline}
            outputs: dict[int, Batch] = {}
            # Threads of other devices start before inline tasks compute here; tasks of one device keep their order.
            for j, task in tasks:
                if id(in_queues[j]) not in here:
                    in_queues[j].put(task)
            for k, (j, task) in enumerate(tasks):
                if task.inline:
                    with use_device(devices[j]):
                        outputs[k] = task.compute()
                elif id(in_queues[j]) in here:
                    in_queues[j].put(task)
            waiting = [k for k, (_, task) in enumerate(tasks) if not task.inline]
            results = [(k, *out_queues[tasks[k][0]].get()) for k in waiting]
            for k, ok, payload in results:
                if not ok:
                    raise payload
                outputs[k] = payload[1]
            return [outputs[k] for k in range(len(tasks))]

        yield run_in_order if in_order else run
