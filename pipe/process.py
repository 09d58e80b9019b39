"""What belongs to one process: a forked child shares the memory and the open files of its parent, but not its threads.

A child of ``os.fork()``, such as a worker of a ``DataLoader``, has a copy of each model that its parent made. Without
these checks it would wait for I/O threads that only the parent has, and remove the parent's files when it ends or
collects its copy.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["check_process", "finalize_here"]


def check_process(made_in: int, what: str) -> None:
    """Raises RuntimeError, which says what to do, if this is not the process in which ``what`` was made."""
    here = os.getpid()
    if here != made_in:
        raise RuntimeError(
            f"{what} was made in process {made_in}, and this is a forked child of it (process {here}): threads and "
            f"files belong to the process that made them. Make the model in the child; or start workers with the "
            f"method 'spawn' or 'forkserver'; or call the model in the parent and hand its results over"
        )


def finalize_here(owner: object, function: Callable[..., object], *arguments: Any) -> weakref.finalize[Any, Any]:
    """``weakref.finalize(owner, function, *arguments)``, which does nothing in a forked child."""
    return weakref.finalize(owner, _in_process, os.getpid(), function, *arguments)


def _in_process(made_in: int, function: Callable[..., object], *arguments: Any) -> None:
    if os.getpid() == made_in:
        function(*arguments)
