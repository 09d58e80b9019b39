"""The workload of ``transfers``: a file is moved past the page cache by our threads, or by a library for the kernel's
asynchronous I/O, in the same requests, as many at a time; and memory is filled and copied in huge or small pages.

``shards`` are ranges that are moved one after the other, each in :data:`offload.storage.transfer.UNSTAGED` requests.
``blocks`` are ranges of one request that are moved several at a time, as the optimizer moves them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import resource
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.case import CannotRunError
from benchmarks.harness.io_counters import measure as measure_step
from benchmarks.harness.memory import memory_of
from benchmarks.harness.settings import option
from benchmarks.harness.worker import Reporter
from offload.optim.io_buffers import CONCURRENT_CALLS
from offload.optim.update_blocks import MAX_BLOCK_BYTES
from offload.storage.buffer import host_buffer, view_memory
from offload.storage.page_cache import PageCache
from offload.storage.staging import Link
from offload.storage.transfer import UNSTAGED, Transfers
from pipe.threads import Threads

OURS, LIBAIO, LIBURING = "threads (ours)", "libaio", "liburing"
HUGE, SMALL = "huge pages (ours)", "small pages"
SHARDS, BLOCKS = "shards", "blocks"
FILL, COPY = "fill", "copy"
HUGE_BYTES = 2 << 20  #: size and alignment of a huge page
MADV_COLLAPSE = 25  #: of Linux 6.1 and later, which :mod:`mmap` does not name


@dataclass(frozen=True)
class Settings:
    """Sizes, and the number of rounds."""

    file_bytes: int = option(384 << 20, "bytes of the file", least=4096, multiple=4096)
    request_bytes: int = option(UNSTAGED.piece_bytes, "bytes of a request of a shard", least=4096, multiple=4096)
    block_bytes: int = option(MAX_BLOCK_BYTES, "bytes of a block, which is one request", least=4096, multiple=4096)
    memory_bytes: int = option(64 << 20, "bytes that are filled and copied in memory", least=4096, multiple=4096)
    rounds: int = option(9, "repetitions of each case")

    def requests(self, size: str) -> tuple[int, int]:
        """Bytes of a request, and requests at a time."""
        if size == SHARDS:
            return self.request_bytes, UNSTAGED.in_flight
        return self.block_bytes, CONCURRENT_CALLS

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can."""
        for size in (SHARDS, BLOCKS):
            nbytes, at_a_time = self.requests(size)
            if self.file_bytes % (nbytes * at_a_time):
                return f"expected a file of whole {size} ({nbytes * at_a_time:,} bytes), got {self.file_bytes:,} bytes"
        return ""


@dataclass
class _Job:
    """The file and the memory of one method."""

    path: Path
    nbytes: int
    request: int
    at_a_time: int
    write: bool
    #: ``at_a_time`` requests; begins on a page.
    memory: torch.Tensor

    @property
    def slots(self) -> list[memoryview]:
        """The memory of each of the requests that run at the same time."""
        return [view_memory(part) for part in self.memory.split(self.request)]

    def ranges(self, size: str) -> list[list[int]]:
        """Offsets of requests; a range begins when all requests of the one before have ended."""
        offsets = list(range(0, self.nbytes, self.request))
        if size == BLOCKS:
            return [offsets]
        return [offsets[k : k + self.at_a_time] for k in range(0, len(offsets), self.at_a_time)]

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """The file, past the page cache."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def measure_file(
    report: Reporter, *, settings: dict[str, Any], engine: str, size: str, write: bool, huge: bool = True
) -> dict[str, Any]:
    """Times one method, which reads or writes the whole file in each turn.

    Raises:
        CannotRunError: without direct I/O.
    """
    chosen = Settings(**settings)
    request, at_a_time = chosen.requests(size)
    path = Path(f"{engine.split()[0]}-{size}-{write}-{huge}")
    memory = host_buffer(request * at_a_time) if huge else _small_pages(request * at_a_time)
    memory.random_(generator=torch.Generator().manual_seed(0))
    job = _Job(path, chosen.file_bytes, request, at_a_time, write, memory)
    _make(job)
    move = {OURS: _threads, LIBAIO: _libaio, LIBURING: _liburing}[engine](job, size)
    try:
        move()
        for _ in report.turns():
            _, took = measure_step(move)
            report.step(**took)
    finally:
        path.unlink()
    return {"bytes": chosen.file_bytes}


def measure_memory(report: Reporter, *, settings: dict[str, Any], work: str, huge: bool) -> dict[str, Any]:
    """Times, in each turn, a write to newly allocated memory or a copy between two buffers, in huge or small pages."""
    nbytes = Settings(**settings).memory_bytes
    make = host_buffer if huge else _small_pages
    source, target = (make(nbytes).fill_(k) for k in range(2))
    grown = 0

    def fill() -> None:
        make(nbytes).fill_(1)

    def copy() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)

    for _ in report.turns():
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        _, took = measure_step(fill if work == FILL else copy)
        report.step(**took, faults=resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
        before = memory_of(os.getpid())[0]
        held = make(nbytes).fill_(1)
        grown = memory_of(os.getpid())[0] - before
        del held
    return {"bytes": nbytes, "held": grown}


def _small_pages(nbytes: int) -> torch.Tensor:
    """Memory like that of :func:`host_buffer`, but in pages of the usual size."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def _make(job: _Job) -> None:
    """Writes the file: what was only reserved would be read without the disk."""
    descriptor = os.open(job.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, job.nbytes)
    finally:
        os.close(descriptor)
    try:
        with job.opened() as direct:
            for offset in range(0, job.nbytes, job.request):
                os.pwritev(direct, [job.slots[0]], offset)
    except OSError as error:
        raise CannotRunError(f"this file system has no direct I/O: {error.strerror}") from error


def _threads(job: _Job, size: str) -> Callable[[], None]:
    transfers = Transfers(PageCache(Path(), True), Link())
    call = transfers.write if job.write else transfers.read
    callers = Threads(job.at_a_time, "block")
    parts = list(job.memory.split(job.request))

    def move() -> None:
        if size == SHARDS:
            for group in job.ranges(size):
                call(job.path, job.memory, group[0])
            return
        jobs: deque[Any] = deque()
        for k, offset in enumerate(job.ranges(size)[0]):
            if len(jobs) == job.at_a_time:
                jobs.popleft().run_or_wait()
            jobs.append(callers.offer(partial(call, job.path, parts[k % job.at_a_time], offset)))
        while jobs:
            jobs.popleft().run_or_wait()

    return move


def _keep_busy(
    job: _Job, size: str, submit: Callable[[int, int, int], None], completed: Callable[[], list[tuple[int, int]]]
) -> None:
    """Keeps as many requests under way; ``submit`` gets descriptor, slot, offset, ``completed`` tells slot, bytes."""
    with job.opened() as descriptor:
        for group in job.ranges(size):
            idle = list(range(job.at_a_time))

            def collect(idle: list[int] = idle) -> None:
                for slot, moved in completed():
                    if moved != job.request:
                        raise OSError(-moved if moved < 0 else 0, f"moved {moved} of {job.request} bytes")
                    idle.append(slot)

            for offset in group:
                if not idle:
                    collect()
                submit(descriptor, idle.pop(0), offset)
            while len(idle) < job.at_a_time:
                collect()


def _libaio(job: _Job, size: str) -> Callable[[], None]:
    """Moves requests by libaio, to and from our memory. The package calls ``libaio.so.1`` through ctypes."""
    library = importlib.import_module("libaio")
    context = library.AIOContext(job.at_a_time)
    mode = library.AIOBLOCK_MODE_WRITE if job.write else library.AIOBLOCK_MODE_READ
    slots, slot_of = job.slots, {}

    def submit(descriptor: int, slot: int, offset: int) -> None:
        block = library.AIOBlock(mode, descriptor, [slots[slot]], offset)
        slot_of[block] = slot
        context.submit([block])

    def completed() -> list[tuple[int, int]]:
        return [(slot_of.pop(block), moved) for block, moved, _ in context.getEvents(1)]

    return partial(_keep_busy, job, size, submit, completed)


def _liburing(job: _Job, size: str) -> Callable[[], None]:
    """Moves requests by io_uring, to and from ``bytearray`` memory: plain reads of the package take no other."""
    library = importlib.import_module("liburing")
    ring, done = library.Ring(), library.Cqe()
    library.io_uring_queue_init(2 * job.at_a_time, ring)
    buffers = [_huge(job.request) for _ in range(job.at_a_time)]
    prepare = library.io_uring_prep_write if job.write else library.io_uring_prep_read

    def submit(descriptor: int, slot: int, offset: int) -> None:
        entry = library.io_uring_get_sqe(ring)
        prepare(entry, descriptor, buffers[slot], offset)
        entry.user_data = slot + 1
        library.io_uring_submit(ring)

    def completed() -> list[tuple[int, int]]:
        library.io_uring_wait_cqe(ring, done)
        entry = done[0]
        found = entry.user_data - 1, entry.res
        library.io_uring_cqe_seen(ring, entry)
        return [found]

    return partial(_keep_busy, job, size, submit, completed)


def _huge(nbytes: int) -> bytearray:
    """A ``bytearray`` that begins on a huge page and is in huge pages, as memory of :func:`host_buffer` is."""
    buffer = bytearray(nbytes + HUGE_BYTES)
    del buffer[: -_address(buffer) % HUGE_BYTES]
    del buffer[nbytes:]
    if _address(buffer) % HUGE_BYTES:
        raise CannotRunError("this interpreter has moved a bytearray that was cut")
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    if nbytes >= HUGE_BYTES and madvise(ctypes.c_void_p(_address(buffer)), ctypes.c_size_t(nbytes), MADV_COLLAPSE):
        raise CannotRunError(f"a bytearray cannot be in huge pages here: {os.strerror(ctypes.get_errno())}")
    return buffer


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
