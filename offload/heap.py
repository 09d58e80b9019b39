"""Memory that was freed goes back to the system.

A model is usually built in ordinary memory before its parameters go home. Freed then, that memory stays with the C
allocator, piece by piece between other things, and the process would look as large as the whole model for ever.
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
    """Gives free pages of the C heap back, where the allocator can; takes milliseconds."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
