"""Memory that was freed goes back to the system.

A model is usually built in ordinary memory before its parameters go home. Freed then, that memory stays with the C
allocator, piece by piece between other things, and the process would look as large as the whole model for ever.

The same happens slowly while layers compute on the CPU: activations come and go between tensors that live longer, holes
are left that nothing fits into, and the heap grows from step to step. To give every freed block back at once is no way
out: a page that is new to a process costs eight times as long to write to as one that it has. So free memory is kept,
until :data:`KEEP_BYTES` of it have come together, or as much as the model's budget. Set that to None to leave the heap
to the C library.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["KEEP_BYTES", "Heap", "anonymous_bytes", "return_freed_memory"]

#: Memory by which a process may outgrow what it needed before, until what is free of it is given back.
KEEP_BYTES: int | None = 512 << 20


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim  # glibc has it, other C libraries may not
    except (AttributeError, OSError, TypeError):
        return None
    return trim


def return_freed_memory() -> None:
    """Gives free pages of the C heap back, where the allocator can; takes milliseconds."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs; 0 where the system does not tell."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_bytes().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


#: Less than this is not given back, however small a budget is: it takes milliseconds.
LEAST_BYTES = 16 << 20


class Heap:
    """Keeps the free memory of the process within bounds, for one model that computes on the CPU.

    Args:
        budget_bytes: of the model, if it has one: no more than that is kept free.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self._needed: int | None = None
        self._most = math.inf if budget_bytes is None else max(budget_bytes, LEAST_BYTES)

    def bound(self) -> None:
        """To be called now and then, where much has been freed; takes microseconds most of the time."""
        if KEEP_BYTES is None:
            return
        held = anonymous_bytes()
        if self._needed is not None and held > self._needed + min(KEEP_BYTES, self._most):
            return_freed_memory()
            self._needed = anonymous_bytes()
        elif self._needed is None or held < self._needed:
            self._needed = held
