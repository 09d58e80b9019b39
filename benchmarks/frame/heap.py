"""glibc's heap, told to give freed blocks back at once, so that a peak is what is in use and not what once was.

The heap keeps freed blocks for the next call, and how many depends on the order of everything that was ever freed. With
a fixed threshold for blocks of their own, each large tensor comes from the system and returns to it. That costs time:
a process is timed before it calls this, or does not call it.
"""

from __future__ import annotations

import ctypes

__all__ = ["give_back_at_once", "return_freed_memory"]

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
THRESHOLD_BYTES = 1 << 18


def give_back_at_once() -> bool:
    """Gives back what is free now, and from now on what becomes free; False where the C library cannot."""
    try:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES)
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return return_freed_memory()


def return_freed_memory() -> bool:
    """Gives back what is free now, once; False where the C library cannot."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return False
    return True
