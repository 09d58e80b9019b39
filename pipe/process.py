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

__all__ = ["FORKED", "check_process", "finalize_here"]

#: What a call in a forked child raises, after the name of the object.
FORKED = (
    "was made in process {made_in}, and this is a forked child of it (process {here}): threads and files belong to "
    "the process that made them. Make the model in the child; or start workers with the method 'spawn' or "
    "'forkserver'; or call the model in the parent and hand its results over"
)


def check_process(made_in: int, what: str) -> None:
    """Raises if this is not the process in which ``what`` was made.

    Raises:
        RuntimeError: that names fork, and what to do.
    """
    here = os.getpid()
    if here != made_in:
        raise RuntimeError(f"{what} {FORKED.format(made_in=made_in, here=here)}")


def finalize_here(owner: object, function: Callable[..., object], *arguments: Any) -> weakref.finalize[Any, Any]:
    """``weakref.finalize(owner, function, *arguments)``, which does nothing in a forked child."""
    return weakref.finalize(owner, _in_process, os.getpid(), function, *arguments)


def _in_process(made_in: int, function: Callable[..., object], *arguments: Any) -> None:
    if os.getpid() == made_in:
        function(*arguments)
