"""Page cache, or past it: which way a tier's files are read and written.

The page cache keeps what was read, at the price of a copy by the processor. A step reads its files forth and back, so
what was read last is read again first, and the cache serves a part of each pass even where not everything fits. That
part shrinks as the files grow. Past the cache (``O_DIRECT``) each byte comes from the disk, and the processor is left
to the layers.

Measured on two cores and a disk of 3 GB/s: files read forth and back, in shards of 256 MiB, in the second round or
later, with all memory but a few GiB taken away. GB/s, and processor seconds for each GB:

==========================  ================  ============
files / available memory    page cache        direct
==========================  ================  ============
0.50 to 0.88                9.3 to 11   0.09  3.0    0.02
1.00                        3.5         0.15  2.8    0.03
1.25                        3.4 to 4.2  0.14  2.8    0.04
2.00                        3.1         0.15  3.1    0.02
3 to 6                      2.8 to 3.0  0.13  3.1    0.03
==========================  ================  ============

So such files go through the page cache while all of them together take at most :data:`CACHE_PAYS_UP_TO` times the
memory that is available, and past it where they take more.

States of an optimizer are another matter. They are cyclic: a step passes each of them once, always in the same order,
so what was used longest ago, which the cache drops first, is what is needed next. Where not everything fits, nothing of
them is found there, and they drive out what would be. So they get what others leave of :data:`CACHE_HOLDS` times the
available memory, the first ones in order, and the rest of them go past the cache. Steps of a model of 300 M parameters
(256 tokens, 4.8 GB in files, AdamW) with 3.9 GiB available, on the same two cores and a disk of 1.2 GB/s: 9.2 s with
everything through the cache, 7.4 s so.

Others may take memory, or give it back, so it is looked at again after every :data:`LOOK_AGAIN_BYTES`. Both ways see
the same bytes at any moment, and so does a mapping of the file. That is a promise of the file system; it is put to the
test before it is relied on.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from offload.storage.buffer import PAGE_BYTES, host_buffer, view_memory

__all__ = ["CACHE_HOLDS", "CACHE_PAYS_UP_TO", "LOOK_AGAIN_BYTES", "Claim", "PageCache", "available_bytes"]

#: Files over available memory: between where the page cache is faster, and where it only costs the processor more.
CACHE_PAYS_UP_TO = 1.5
#: Files over available memory: up to where the page cache keeps all that it is given.
CACHE_HOLDS = 0.9
#: Bytes that are moved before memory is looked at again.
LOOK_AGAIN_BYTES = 1 << 30


@dataclass(eq=False)
class Claim:
    """The part that one block would take of the page cache."""

    nbytes: int
    #: Whether a step passes it once, in the same order as all that is cyclic.
    cyclic: bool
    #: Whether all that comes before it and is kept leaves it no room.
    past: bool = False


class PageCache:
    """Decides for one tier, block by block; blocks are in the order in which they were made.

    Args:
        folder: where the files are.
        direct: True or False to choose, None to let the sizes decide. Where the file system does not do direct
            transfers, or does them apart from the page cache, the answer is the page cache in any case.
    """

    def __init__(self, folder: Path, direct: bool | None) -> None:
        self._folder = folder
        self._wanted = direct
        self._claims: dict[Claim, None] = {}
        self._decided = False
        self._too_large = False
        self._until_next_look = LOOK_AGAIN_BYTES
        self._works: bool | None = None
        self._lock = threading.Lock()

    def claim(self, nbytes: int, *, cyclic: bool) -> Claim:
        """A block was made."""
        claim = Claim(nbytes, cyclic)
        self._claims[claim] = None
        self._decided = False
        return claim

    def release(self, claim: Claim) -> None:
        """A block has gone. Takes no lock, since it may be called wherever garbage is collected."""
        self._claims.pop(claim, None)
        self._decided = False

    def moved(self, nbytes: int) -> None:
        """So many bytes went either way. Now and then this leads to another look at how much memory is available."""
        self._until_next_look -= nbytes
        if self._until_next_look <= 0:
            self._until_next_look = LOOK_AGAIN_BYTES
            self._decided = False

    def direct(self, claim: Claim | None = None) -> bool:
        """Whether to go past the page cache now: with a block, or with files at large."""
        if self._wanted is None and not self._decided:
            self._decide()
        wanted = self._wanted
        if wanted is None:
            wanted = claim.past if claim is not None and claim.cyclic else self._too_large
        if wanted and self._works is None:
            with self._lock:
                if self._works is None:
                    self._works = _direct_works(self._folder)
        return wanted and bool(self._works)

    def _decide(self) -> None:
        self._decided = True  # at the begin: what changes meanwhile asks for another time
        claims, available = list(self._claims), available_bytes()
        others = sum(claim.nbytes for claim in claims if not claim.cyclic)
        self._too_large = others > available * CACHE_PAYS_UP_TO
        room = available * CACHE_HOLDS - others
        for claim in claims:
            if claim.cyclic:
                room -= claim.nbytes
                claim.past = room < 0


def available_bytes() -> int:
    """Memory that can be had now without swapping: the machine's, or what the control groups of this process leave."""
    available = int(psutil.virtual_memory().available)
    for limit, usage, cached in _control_groups():
        available = min(available, max(0, limit - usage + cached))
    return available


#: Where a control group counts its page cache: both lists, since what each step reads again is on the active one.
_LISTS = ["inactive_file", "active_file"]


def _control_groups() -> list[tuple[int, int, int]]:
    """(limit, usage, page cache within it) of each group around this process, in bytes."""
    groups = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, inner = line.split(":", 2)
            if controllers == "":
                root, names, lists = Path("/sys/fs/cgroup"), ("memory.max", "memory.current"), _LISTS
            elif "memory" in controllers.split(","):
                root = Path("/sys/fs/cgroup/memory")
                names, lists = ("memory.limit_in_bytes", "memory.usage_in_bytes"), [f"total_{name}" for name in _LISTS]
            else:
                continue
            group = root / inner.lstrip("/")
            for folder in [group, *group.parents]:
                if not folder.is_relative_to(root):
                    break
                with contextlib.suppress(OSError, ValueError):  # no limit is "max", or no such file
                    limit, usage = (int((folder / name).read_text(encoding="utf-8")) for name in names)
                    counts = dict(
                        line.split(maxsplit=1)
                        for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
                    )
                    groups.append((limit, usage, sum(int(counts.get(name, 0)) for name in lists)))
    return groups


def _direct_works(folder: Path) -> bool:
    """Whether files in ``folder`` can be read and written directly, and mappings and direct transfers agree."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return False
    page = host_buffer(PAGE_BYTES)
    bytes_of_page = view_memory(page)
    try:
        probe, path = tempfile.mkstemp(prefix="probe-", dir=folder)
        try:
            os.posix_fallocate(probe, 0, PAGE_BYTES)
            direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | flag)
            try:
                with mmap.mmap(probe, PAGE_BYTES) as mapped:
                    for value in (1, 2):
                        mapped[:] = bytes([value]) * PAGE_BYTES
                        if os.preadv(direct, [bytes_of_page], 0) != PAGE_BYTES or not bool((page == value).all()):
                            return False
                        page.fill_(value + 8)
                        if os.pwritev(direct, [bytes_of_page], 0) != PAGE_BYTES or mapped[:] != bytes(bytes_of_page):
                            return False
            finally:
                os.close(direct)
        finally:
            os.close(probe)
            os.unlink(path)
    except OSError:  # EINVAL from a file system that does not do this at all
        return False
    return True
