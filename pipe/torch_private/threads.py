"""The number of threads that torch's operations use, for one thread of the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable

import torch

__all__ = ["limit_operation_threads"]


def limit_operation_threads(count: int) -> None:
    """Operations that the calling thread calls use at most ``count`` threads from now on; all, without OpenMP.

    ``torch.set_num_threads`` would decide for all threads that begin later as well.
    """
    before = torch.get_num_threads()  # also gives this thread its number, which torch else does at the first operation
    set_threads = _openmp()
    if set_threads is not None and before > count:
        set_threads(count)


@functools.cache
def _openmp() -> Callable[[int], object] | None:
    """``omp_set_num_threads`` of the library that torch itself uses, found among what its extension depends on."""
    with contextlib.suppress(OSError, AttributeError):
        found: Callable[[int], object] = ctypes.CDLL(torch._C.__file__).omp_set_num_threads
        return found
    return None
