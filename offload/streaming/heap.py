"""Returns freed heap memory of the process to the system (``malloc_trim``).

A model is usually built in ordinary memory before its parameters are moved to storage. The C allocator keeps that
memory when it is freed, in pieces between other blocks, and the process would stay as large as the whole model.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["return_freed_memory"]


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim  # glibc has it, other C libraries may not
    except (AttributeError, OSError, TypeError):
        return None
    return trim


def return_freed_memory() -> None:
    """Returns free pages of the C heap, if the allocator supports it; takes milliseconds."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
