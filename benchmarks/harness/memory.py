"""Memory of a process that the kernel cannot take back, sampled from outside; and a cap on it.

Counted are anonymous and shared-anonymous pages (``RssAnon`` and ``RssShmem`` of ``/proc/PID/status``).
Pages of a file on disk are not counted, mapped or not: the kernel drops them or writes them back when it needs the
room. Outside of Linux psutil's unique set size is the nearest figure. A peak is the greatest of many samples: it is too
low by at most what lived for less than the sampling interval, some four milliseconds.
"""

import contextlib
import ctypes
import os
import re
import threading
import time

import psutil

from benchmarks.harness.case import Outcome

#: What :func:`resident_bytes` counts on this platform, for the header of a page.
MEMORY_KIND = "anonymous + shared-anonymous" if psutil.LINUX else "unique set size"
LACKS_MEMORY = re.compile(
    r"allocate memory|MemoryError|out of memory|bad_alloc|ENOMEM|start new thread", re.IGNORECASE
)  # a thread needs a stack, and its error says nothing of memory


class ProcessMemory:
    """The kernel's figures of one process. The file stays open, so that a reading is one system call.

    Raises:
        ProcessLookupError: if there is no such process, or, from :meth:`read`, no longer.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._file: int | None = None
        try:
            self._file = os.open(f"/proc/{pid}/status", os.O_RDONLY)
        except FileNotFoundError:
            if psutil.LINUX:
                raise ProcessLookupError(f"no process {pid}") from None

    def read(self) -> tuple[int, int]:
        """:func:`resident_bytes` and :func:`data_bytes` of one moment."""
        if self._file is None:
            try:
                return int(psutil.Process(self.pid).memory_full_info().uss), 0
            except psutil.Error as error:
                raise ProcessLookupError(f"no process {self.pid}: {error}") from error
        text = os.pread(self._file, 1 << 13, 0)
        try:
            return _kibibytes(text, b"RssAnon:") + _kibibytes(text, b"RssShmem:"), _kibibytes(text, b"VmData:")
        except ValueError:  # the status of a process that has ended but is not yet waited for shows no memory
            raise ProcessLookupError(f"process {self.pid} has ended") from None

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _kibibytes(text: bytes, name: bytes) -> int:
    start = text.index(name) + len(name)
    return int(text[start : text.index(b"kB", start)]) * 1024


def _read(pid: int) -> tuple[int, int]:
    with contextlib.closing(ProcessMemory(pid)) as memory:
        return memory.read()


def resident_bytes(pid: int) -> int:
    """Bytes of anonymous and shared-anonymous memory that a process holds; ProcessLookupError if there is none."""
    return _read(pid)[0]


def data_bytes(pid: int) -> int:
    """Bytes of private writable memory that a process has mapped, used or not; 0 where the system does not tell."""
    return _read(pid)[1]


def return_freed_memory() -> None:
    """Has glibc return free heap pages to the kernel, once.

    A process that is to return all freed blocks at once must start with ``MALLOC_MMAP_THRESHOLD_`` in its environment.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class PeakMeter:
    """Samples the memory of another process on a thread for as long as the context is open.

    ``peaks`` holds the greatest sample of each phase; no sample of one phase is counted to the next. A process that
    ends ends the sampling. ``pid`` must not be reused meanwhile, which holds for a child that is not yet waited for.
    """

    def __init__(self, pid: int, interval_seconds: float = 0.004) -> None:
        self.interval_seconds = interval_seconds
        self.peaks: dict[str, int] = {}
        self.data_peak_bytes = 0  #: the most private memory that was mapped, see :func:`data_bytes`
        self._phase = "start"
        self._lock = threading.Lock()
        self._memory = ProcessMemory(pid)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=f"memory of {pid}", daemon=True)

    def phase(self, name: str) -> None:
        """Counts samples under another name from now on, beginning with one at once."""
        with self._lock:  # without this, a sample taken before could be counted after
            self._phase = name
        self._sample()

    def __enter__(self) -> "PeakMeter":
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        self._memory.close()

    def _run(self) -> None:
        while not self._stop:
            time.sleep(self.interval_seconds)  # takes half the processor time of a wait with a time limit
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


def lacks_memory(text: str) -> bool:
    """Whether an error message tells of a failed allocation."""
    return bool(LACKS_MEMORY.search(text))


def died_of_memory(outcome: Outcome) -> bool:
    """Whether the case ended for want of memory."""
    return outcome.failure is not None and lacks_memory(outcome.failure)


def cap_memory(nbytes: int) -> None:
    """From here on this process maps at most ``nbytes`` of private memory (``RLIMIT_DATA``).

    Private writable mappings count (heap, large tensors, thread stacks), touched or not; mapped files do not.

    Raises:
        MemoryError: if it has mapped as much already.
        OSError: if the system has no such limit, or refuses it.
    """
    held = data_bytes(os.getpid())
    if held >= nbytes:
        raise MemoryError(
            f"cannot allocate memory: the cap of {nbytes >> 20:,} MiB is no more than the {held >> 20:,} MiB that the "
            f"process has mapped before it begins"
        )
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (ImportError, OSError, ValueError) as error:
        raise OSError(f"expected a system that caps a process at {nbytes:,} bytes of private memory") from error
