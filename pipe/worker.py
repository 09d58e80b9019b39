"""Runs the cells of a clock: those of several devices in a thread each, those of one device in the calling thread.

The host may need as long to issue the kernels of one stage as the device to compute them; with one thread, devices
would be used one after another.

Guarantees
    * Tasks of one device run one at a time, in the order in which they were put.
    * A task sees the settings of the calling thread (:mod:`pipe.recompute.thread_state`), its context variables and its
      phase.
    * An exception of a task, ``SystemExit`` and ``KeyboardInterrupt`` included, is raised in the calling thread.
    * When the context ends, by an exception or not, all threads have ended.

Assumes
    * Every task returns eventually: a thread cannot be interrupted from outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from pipe.recompute.thread_state import in_settings_of_this_thread
from pipe.stream import AbstractStream, normalize_device, use_device, use_stream
from pipe.threads import Threads

__all__ = ["Task", "needs_threads", "task_runner"]


class Task(NamedTuple):
    """One micro-batch on one stage."""

    stage: int
    compute: Callable[[], Any]
    stream: AbstractStream
    inline: bool = False
    """Whether it runs in the calling thread, whatever its device."""

    def run(self) -> Any:
        """The result of ``compute`` on the stream."""
        with use_stream(self.stream):
            return self.compute()


def needs_threads(devices: Sequence[torch.device]) -> bool:
    """Whether there are several devices: tasks of one device run one after another anyway."""
    return len({normalize_device(device) for device in devices}) > 1


@contextlib.contextmanager
def task_runner(
    devices: Sequence[torch.device], *, in_order: bool = False
) -> Iterator[Callable[[Sequence[Task]], list[Any]]]:
    """Yields a function that runs the tasks of one clock.

    It returns the results of the tasks, in their order, or raises the exception of the first failed one after all
    started tasks have ended.

    Args:
        devices: the device of each stage.
        in_order: whether each task begins when the one before it has ended, instead of all in parallel.
    """
    if not needs_threads(devices):
        with use_device(devices[0]):
            yield lambda tasks: [task.run() for task in tasks]
        return
    names = [normalize_device(device) for device in devices]
    kinds = {device.type for device in devices}
    threads = {name: Threads(1, f"pipe-{name}", operation_threads=None) for name in names}

    def run_on(task: Task) -> Any:
        with use_device(devices[task.stage]):
            return task.run()

    def run(tasks: Sequence[Task]) -> list[Any]:
        # Tasks of one device keep their order: beside an inline one all of them run here, after the others have begun.
        here = {names[task.stage] for task in tasks if task.inline}
        futures = [
            None
            if names[task.stage] in here
            else threads[names[task.stage]].submit(in_settings_of_this_thread(partial(run_on, task), kinds))
            for task in tasks
        ]
        outputs = [run_on(task) if future is None else None for task, future in zip(tasks, futures, strict=True)]
        started = [(k, future) for k, future in enumerate(futures) if future is not None]
        for _, future in started:
            future.wait_idle()
        for k, future in started:
            outputs[k] = future.wait()
        return outputs

    try:
        yield (lambda tasks: [run([task])[0] for task in tasks]) if in_order else run
    finally:
        for pool in threads.values():
            pool.close(wait=True)
