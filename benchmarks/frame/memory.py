"""How much memory a process holds that nobody else could have: measured from outside, some two hundred times a second.

What a user runs out of is memory that the kernel cannot take back: anonymous pages (the heap) and shared-anonymous
pages (tmpfs, ``MAP_SHARED | MAP_ANONYMOUS``). Pages of a file on disk are not in it, mapped or not: the kernel drops
or writes them back when it needs the room, and that is exactly what a home on disk is for. Linux tells both apart in
``/proc/PID/status`` (``RssAnon``, ``RssShmem``); elsewhere psutil's unique set size is the nearest figure.

The kernel keeps no high-water mark of these two, so the peak is the greatest of many samples. It is taken by the
parent, whose allocations and whose Python threads are not part of what is measured. A rise and fall shorter than the
interval can be missed; the peak is a lower bound, too low by at most what lives for less than the interval.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType

import psutil

__all__ = ["PeakMeter", "ProcessMemory", "data_bytes", "memory_kind", "resident_bytes"]


class ProcessMemory:
    """What the kernel tells of one process's memory. Held open: a reading is one system call.

    A reading is taken hundreds of times a second beside work that is timed, so its cost is the work's.

    Raises:
        ProcessLookupError: if there is no such process, or, from :meth:`read`, no longer.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._page: int | None = None
        try:
            self._page = os.open(f"/proc/{pid}/status", os.O_RDONLY)
        except FileNotFoundError:
            if psutil.LINUX:
                raise ProcessLookupError(f"no process {pid}") from None

    def read(self) -> tuple[int, int]:
        """:func:`resident_bytes` and :func:`data_bytes`, of one moment."""
        if self._page is None:
            return _unique_set_size(self.pid), 0
        text = os.pread(self._page, 1 << 13, 0)
        try:
            return _kibibytes(text, b"RssAnon:") + _kibibytes(text, b"RssShmem:"), _kibibytes(text, b"VmData:")
        except ValueError:  # a process that has ended but is not yet waited for has a status without memory
            raise ProcessLookupError(f"process {self.pid} has ended") from None

    def __enter__(self) -> ProcessMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._page is not None:
            os.close(self._page)
            self._page = None


def _kibibytes(text: bytes, name: bytes) -> int:
    """The field's value in bytes; ValueError where there is none."""
    start = text.index(name) + len(name)
    return int(text[start : text.index(b"kB", start)]) * 1024


def resident_bytes(pid: int) -> int:
    """Bytes of anonymous and shared-anonymous memory that process ``pid`` holds now.

    Raises:
        ProcessLookupError: if there is no such process, or no longer.
    """
    with ProcessMemory(pid) as memory:
        return memory.read()[0]


def data_bytes(pid: int) -> int:
    """Bytes of private writable memory that process ``pid`` has mapped, used or not: what ``RLIMIT_DATA`` limits.

    0 where the system does not tell.
    """
    try:
        with ProcessMemory(pid) as memory:
            return memory.read()[1]
    except ProcessLookupError:
        return 0


def memory_kind() -> str:
    """What :func:`resident_bytes` counts on this platform, for the header of a table."""
    return "anonymous + shared-anonymous" if psutil.LINUX else "unique set size"


def _unique_set_size(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error as error:
        raise ProcessLookupError(f"no process {pid}: {error}") from error


class PeakMeter:
    """Samples the memory of another process on a thread for as long as the context is open.

    Guarantees: ``peaks`` holds the greatest sample of each phase, and no sample of a phase is counted to the next one;
    the thread is gone when the context is left; a process that ends ends the sampling. Assumes: ``pid`` is not given
    to another process meanwhile, as while it is a child not yet waited for.
    """

    def __init__(self, pid: int, interval_seconds: float = 0.004) -> None:
        self.pid = pid
        self.interval_seconds = interval_seconds
        self.peaks: dict[str, int] = {}
        #: The most private memory that was mapped, see :func:`data_bytes`.
        self.data_peak_bytes = 0
        self._phase = "start"
        self._lock = threading.Lock()
        self._memory = ProcessMemory(pid)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=f"memory of {pid}", daemon=True)

    @property
    def peak_bytes(self) -> int:
        """The greatest sample of all; 0 before the first one."""
        return max(self.peaks.values(), default=0)

    def phase(self, name: str) -> None:
        """Counts what is sampled from now on under another name, beginning with a sample at once."""
        with self._lock:  # without this, a sample taken before could be counted after
            self._phase = name
        self._sample()

    def __enter__(self) -> PeakMeter:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        self._thread.join()
        self._memory.__exit__(kind, error, trace)

    def _run(self) -> None:
        while not self._stop:
            time.sleep(self.interval_seconds)  # takes half the processor time of a wait with a limit
            if not self._sample():
                return

    def _sample(self) -> bool:
        """Takes one sample; False where the process has ended."""
        with self._lock:
            try:
                held, mapped = self._memory.read()
            except (ProcessLookupError, PermissionError):
                return False
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), held)
            self.data_peak_bytes = max(self.data_peak_bytes, mapped)
            return True
