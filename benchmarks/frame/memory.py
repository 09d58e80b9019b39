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

import threading
from types import TracebackType

import psutil

__all__ = ["PeakMeter", "data_bytes", "memory_kind", "resident_bytes"]


def resident_bytes(pid: int) -> int:
    """Bytes of anonymous and shared-anonymous memory that process ``pid`` holds now.

    Raises:
        ProcessLookupError: if there is no such process, or no longer.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            fields = dict(line.split(":", 1) for line in status)
    except FileNotFoundError:
        return _unique_set_size(pid)
    try:
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024
    except KeyError:  # a process that has ended but is not yet waited for has a status without memory
        raise ProcessLookupError(f"process {pid} has ended") from None


def data_bytes(pid: int) -> int:
    """Bytes of private writable memory that process ``pid`` has mapped, used or not: what ``RLIMIT_DATA`` limits.

    0 where the system does not tell.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def memory_kind() -> str:
    """What :func:`resident_bytes` counts on this platform, for the header of a table."""
    return "anonymous + shared-anonymous" if psutil.LINUX else "unique set size"


def _unique_set_size(pid: int) -> int:
    if psutil.LINUX:
        raise ProcessLookupError(f"no process {pid}")
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
        self._stop = threading.Event()
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
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_seconds):
            if not self._sample():
                return

    def _sample(self) -> bool:
        """Takes one sample; False where the process has ended."""
        with self._lock:
            try:
                held = resident_bytes(self.pid)
            except (ProcessLookupError, PermissionError):
                return False
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), held)
            self.data_peak_bytes = max(self.data_peak_bytes, data_bytes(self.pid))
            return True
