"""Returns freed heap memory of the process to the system (``malloc_trim``).

A model is usually built in ordinary memory before its parameters are moved to storage. The C allocator keeps that
memory when it is freed, in pieces between other blocks, and the process would stay as large as the whole model.
"""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["return_freed_memory"]


def return_freed_memory() -> None:
    """Returns free pages of the C heap, if the allocator supports it; takes milliseconds."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc has it, other C libraries may not
        ctypes.CDLL(None).malloc_trim(0)
