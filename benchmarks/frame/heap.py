"""The C library's heap, told to give back what is free, so that a floor is what is in use and not what once was.

To have all that is freed given back at once, a rung's process starts with ``MALLOC_MMAP_THRESHOLD_`` in its
environment. Set later, the threshold is for new memory only: what the heap has of its own it hands out again and keeps.
"""

from __future__ import annotations

import ctypes

__all__ = ["return_freed_memory"]


def return_freed_memory() -> bool:
    """Gives back what is free now, once; False where the C library cannot."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return True
