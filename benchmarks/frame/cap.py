"""A hard cap on a process's private memory.

``RLIMIT_DATA`` limits private writable mappings: the heap, large tensors, stacks of threads. An allocation beyond it
fails like one on a machine that has no more. Shared mappings of files are not in it: they are the kernel's to drop, and
that is what a home on disk is for.
"""

from __future__ import annotations

import os

import psutil

from benchmarks.frame.memory import data_bytes
from benchmarks.frame.table import mebibytes

__all__ = ["available_bytes", "cap_memory"]

SHARE_OF_AVAILABLE = 0.9


def available_bytes() -> int:
    """What a process may take without hurting others."""
    return int(SHARE_OF_AVAILABLE * psutil.virtual_memory().available)


def cap_memory(nbytes: int) -> bool:
    """From here on this process maps at most ``nbytes`` of private memory; False where the system has no such limit.

    Raises:
        MemoryError: if it has mapped as much already. It could go on for as long as freed pieces are to be had, and
            would then end of whatever a library makes of an allocation that fails: seldom of an error that says so.
    """
    try:
        import resource
    except ImportError:  # Windows
        return False
    held = data_bytes(os.getpid())
    if held >= nbytes:
        raise MemoryError(
            f"cannot allocate memory: the cap of {mebibytes(nbytes)} is no more than the {mebibytes(held)} that the "
            f"process has mapped before it begins"
        )
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (OSError, ValueError):
        return False
    return True
