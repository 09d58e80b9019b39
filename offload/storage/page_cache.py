"""Chooses between the page cache and direct I/O (``O_DIRECT``) for each file.

The page cache keeps what was read, but costs a copy by the processor. A step reads its files forwards, then backwards,
so the last files read are read again first, and the cache serves a part of each pass even if not everything fits; the
larger the files, the smaller that part. Direct I/O reads each byte from the disk and leaves the processor to the
layers.

Measured on two cores and a disk of 3 GB/s, with files read forwards and backwards in shards of 256 MiB: as long as the
files take up to 0.88 of the available memory, the page cache reads 9 to 11 GB/s and direct I/O 3.0; between 1 and 1.25
of it 3.4 to 4.2 against 2.8; from 2 on both read 3 GB/s, direct I/O with a fifth of the processor time. So such files
use the page cache while their total is at most :data:`CACHE_PAYS_UP_TO` times the available memory.

Optimizer states are cyclic: a step uses each of them once in a fixed order, so the next one needed is the least
recently used one, which the cache drops first, and a cache that does not hold all of them serves none. So cyclic files
get what the others leave of :data:`CACHE_HOLDS` times the available memory, in order of creation, and the remaining
ones use direct I/O. With a disk of 1.2 GB/s, steps of a model of 300 M parameters with AdamW, 4.8 GB in files and
3.9 GiB available: 9.2 s with everything through the cache, 7.4 s with this rule.

The available memory is checked again after every :data:`RECHECK_BYTES`. The page cache, direct I/O and mappings of a
file show the same bytes only if the file system keeps them coherent, which is tested before direct I/O is used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from offload.machine import control_groups
from offload.storage.buffer import PAGE_BYTES, host_buffer, view_memory

__all__ = ["CACHE_HOLDS", "CACHE_PAYS_UP_TO", "RECHECK_BYTES", "CacheUsage", "PageCache", "available_bytes"]

#: Files over available memory: above this the page cache is not faster, and costs more processor time.
CACHE_PAYS_UP_TO = 1.5
#: Files over available memory: up to this the page cache keeps everything.
CACHE_HOLDS = 0.9
#: Bytes moved between two checks of the available memory.
RECHECK_BYTES = 1 << 30


@dataclass(eq=False)
class CacheUsage:
    """One block's use of the page cache."""

    nbytes: int
    #: Whether a step uses it once, in a fixed order with all other cyclic blocks.
    cyclic: bool
    #: Whether it is to use direct I/O.
    direct: bool = False


class PageCache:
    """Decides for each block of one tier, whose files are in ``folder``, in order of their creation.

    ``direct`` forces a choice, None decides by size. Without direct I/O that is coherent with the page cache, which
    depends on the file system, the page cache is used in any case.
    """

    def __init__(self, folder: Path, direct: bool | None) -> None:
        self._folder = folder
        self._wanted = direct
        self._usages: dict[CacheUsage, None] = {}  # in order of creation
        self._decided = False
        self._bytes_until_recheck = RECHECK_BYTES

    def register(self, nbytes: int, *, cyclic: bool) -> CacheUsage:
        """Registers a new block."""
        usage = CacheUsage(nbytes, cyclic)
        self._usages[usage] = None
        self._decided = False
        return usage

    def unregister(self, usage: CacheUsage) -> None:
        """Unregisters a block. Takes no lock, since it may be called wherever garbage is collected."""
        self._usages.pop(usage, None)
        self._decided = False

    def count(self, nbytes: int) -> None:
        """Counts bytes read or written; every :data:`RECHECK_BYTES` the available memory is checked again."""
        self._bytes_until_recheck -= nbytes
        if self._bytes_until_recheck <= 0:
            self._bytes_until_recheck = RECHECK_BYTES
            self._decided = False

    def direct(self, usage: CacheUsage) -> bool:
        """Whether to use direct I/O for a block now."""
        if self._wanted is None and not self._decided:
            self._decide()
        return (usage.direct if self._wanted is None else self._wanted) and self._works

    @cached_property
    def _works(self) -> bool:
        return _direct_works(self._folder)

    def _decide(self) -> None:
        self._decided = True  # first, so that a change during this call causes another one
        usages, available = list(self._usages), available_bytes()
        others = sum(usage.nbytes for usage in usages if not usage.cyclic)
        spare = available * CACHE_HOLDS - others
        for usage in usages:
            usage.direct = others > available * CACHE_PAYS_UP_TO
            if usage.cyclic:
                spare -= usage.nbytes
                usage.direct = spare < 0


def available_bytes() -> int:
    """Memory available without swapping: the machine's, or what the control groups of this process leave.

    All of a group's page cache is available: files that each step reads again are on its active list, too.
    """
    available = int(psutil.virtual_memory().available)
    for group in control_groups():
        available = min(available, max(0, group.limit - group.usage + group.inactive_file + group.active_file))
    return available


def _direct_works(folder: Path) -> bool:
    """Whether ``folder`` supports direct I/O that is coherent with mappings."""
    page = host_buffer(PAGE_BYTES)
    bytes_of_page = view_memory(page)
    try:
        with contextlib.ExitStack() as stack:
            probe = stack.enter_context(tempfile.NamedTemporaryFile(prefix="probe-", dir=folder))
            os.posix_fallocate(probe.fileno(), 0, PAGE_BYTES)
            direct = os.open(probe.name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            stack.callback(os.close, direct)
            mapped = stack.enter_context(mmap.mmap(probe.fileno(), PAGE_BYTES))
            for value in (1, 2):
                mapped[:] = bytes([value]) * PAGE_BYTES
                if os.preadv(direct, [bytes_of_page], 0) != PAGE_BYTES or not bool((page == value).all()):
                    return False
                page.fill_(value + 8)
                if os.pwritev(direct, [bytes_of_page], 0) != PAGE_BYTES or mapped[:] != bytes(bytes_of_page):
                    return False
    except OSError:  # EINVAL from a file system without direct I/O
        return False
    return True
