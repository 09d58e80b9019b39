"""Returns freed heap memory of the process to the system (``malloc_trim``).

A model is usually built in ordinary memory before its parameters are moved to storage. The C allocator keeps that
memory when it is freed, in pieces between other blocks, and the process would stay as large as the whole model.

The same happens slowly while layers compute on the CPU: activations are freed between tensors that live longer, the
gaps fit no later block, and the heap grows from step to step. Returning every block at once is no solution: the first
write to a new page takes eight times as long as to one that the process has. So free memory is kept until it exceeds
:data:`KEEP_BYTES`. Set that to None to leave the heap to the C library.
Where memory is so scarce that gaps would not fit, blocks are returned one by one when they are freed.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import weakref
from collections.abc import Callable

from offload.storage.buffer import mapped_bytes

__all__ = ["KEEP_BYTES", "LEAST_BYTES", "Heap", "anonymous_bytes", "return_freed_memory"]

#: Growth of the process beyond its earlier need after which free memory is returned.
KEEP_BYTES: int | None = 512 << 20


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim  # glibc has it, other C libraries may not
    except (AttributeError, OSError, TypeError):
        return None
    return trim


class _HeapInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: of all arenas."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


@functools.cache
def _mallinfo() -> Callable[[], _HeapInfo] | None:
    try:
        read = ctypes.CDLL(None).mallinfo2  # since glibc 2.33
    except (AttributeError, OSError, TypeError):
        return None
    read.restype = _HeapInfo
    found: Callable[[], _HeapInfo] = read
    return found


def _allocated_bytes() -> int | None:
    """Bytes that the C allocator has given out; None where it does not say. Takes microseconds."""
    read = _mallinfo()
    if read is None:
        return None
    found = read()
    return int(found.uordblks + found.hblkhd)


#: Parameters of ``mallopt``; and the most to which glibc raises the second by itself when it frees large blocks, the
#: first to twice as much.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_MMAP_THRESHOLD = 32 << 20
#: Blocks of at least so many bytes can be returned as soon as they are freed.
RETURNED_BYTES = 256 << 10
#: How users set these or others with which glibc raises nothing by itself.
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_TUNABLES = ("mmap_threshold", "trim_threshold", "top_pad", "mmap_max")
#: Identities of the heaps that want it.
_returning: set[int] = set()


def _set_by_user() -> bool:
    """Whether the environment sets when the C library returns blocks."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in _SETTINGS) or any(f"malloc.{name}=" in tunables for name in _TUNABLES)


def _set_returning(heap: int, wanted: bool) -> None:
    """Counts a heap among those that want large blocks to be returned at once, or removes it."""
    before = bool(_returning)
    (_returning.add if wanted else _returning.discard)(heap)
    if before == bool(_returning) or _mallinfo() is None or _set_by_user():
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD if before else RETURNED_BYTES)
    if before:
        mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_MMAP_THRESHOLD)


def return_freed_memory() -> None:
    """Returns free pages of the C heap, if the allocator supports it; takes milliseconds."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def anonymous_bytes() -> int:
    """Anonymous memory of this process; 0 if the system does not say."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, resident, shared, *_ = map(int, os.read(statm, 256).split())
        finally:
            os.close(statm)
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


#: So much may be kept, however small the limit: returning takes milliseconds.
LEAST_BYTES = 4 << 20


class Heap:
    """Bounds the free heap memory of the process, for one model that computes on the CPU.

    Free memory is returned when the process has grown. While a step runs whose memory is predicted, it is also returned
    before a cell that could exceed the limit with it: what a cell allocates may not fit into the gaps of what was freed
    before it, so in the worst case these stay beside it. At all other times it is kept for reuse.
    """

    def __init__(self) -> None:
        self._needed: int | None = None
        self._most = math.inf
        #: Bytes of the process that are not the model's, now and before its first step; None before they were measured.
        self._others: int | None = None
        self._others_before: int | None = None
        #: Bytes of the process beside what the allocator has given out, when free memory was returned: gaps in pages
        #: that are not free as a whole, and what the allocator does not manage.
        self._unmanaged = 0
        #: The same without buffers; and that before the first step.
        self._gaps = 0
        self._gaps_before: int | None = None
        #: What is taken for gaps between the model's blocks.
        self.gaps_bytes = 0
        weakref.finalize(self, _set_returning, id(self), False).atexit = False

    def allow(self, nbytes: int) -> None:
        """Sets how much free memory may be kept."""
        self._most = max(nbytes, LEAST_BYTES)

    def return_at_once(self, wanted: bool) -> None:
        """Sets whether the C library returns large blocks as soon as they are freed, as long as any model wants that.

        Otherwise it keeps them for reuse, without gaps only where the next blocks fit: in a backward that allocates 30
        MiB, gaps came to 20. Returned ones have none, but their pages are taken from the system anew, which takes time.
        Gaps that are there already are used, so this has to begin before they are made. What the environment of the
        process sets stays.
        """
        _set_returning(id(self), wanted and KEEP_BYTES is not None)

    def trim(self) -> None:
        """Returns free memory; takes milliseconds."""
        return_freed_memory()
        self._needed = anonymous_bytes()
        self._unmanaged = self._needed - (_allocated_bytes() or 0)
        self._gaps = self._unmanaged - mapped_bytes()

    def trim_if_grown(self) -> None:
        """Called after much was freed: trims the heap if it has grown. Usually takes microseconds."""
        if KEEP_BYTES is None:
            return
        held = anonymous_bytes()
        if self._needed is not None and held > self._needed + min(KEEP_BYTES, self._most):
            self.trim()
        elif self._needed is None or held < self._needed:
            self._needed = held

    def measure_others(self, held: int, gaps_bytes: int = 0) -> None:
        """Measures what the process holds besides the ``held`` bytes of the model, without free memory.

        What steps have added to memory that is neither given out nor returned nor a buffer is taken for gaps between
        the model's blocks, up to ``gaps_bytes``: this is the model's.
        """
        self.trim()
        known = self._gaps_before is not None and _allocated_bytes() is not None
        self.gaps_bytes = max(0, min(self._gaps - (self._gaps_before or 0), gaps_bytes)) if known else 0
        self._others = anonymous_bytes() - held - self.gaps_bytes

    def measure_others_before(self, held: int) -> None:
        """The same before the first step, once."""
        if self._others_before is None:
            self.measure_others(held)
            self._others_before, self._others = self._others, None
            self._gaps_before = self._gaps

    @property
    def others_grown(self) -> int:
        """Bytes that the interpreter, libraries and threads have taken since the first step, beside the model."""
        before, now = self._others_before, self._others
        return 0 if before is None or now is None else max(0, now - before)

    def held(self) -> int | None:
        """Bytes that the model holds now, with free memory; None before the others were measured."""
        return None if self._others is None else anonymous_bytes() - self._others

    def make_room(self, there: int, rise: int, limit_bytes: int) -> None:
        """Trims the heap if ``rise`` more bytes could exceed the limit where ``there`` are predicted now."""
        held = self.held()
        if held is None or held + rise <= limit_bytes:
            return
        allocated = _allocated_bytes()
        free = held - there if allocated is None else anonymous_bytes() - allocated - self._unmanaged
        if free >= LEAST_BYTES // 4:
            self.trim()
