"""Memory of a process that the kernel cannot take back, sampled from outside; and a cap on it.

Counted are anonymous and shared-anonymous pages (``RssAnon`` and ``RssShmem`` of ``/proc/PID/status``).
Pages of a file on disk are not counted, mapped or not: the kernel drops them or writes them back when it needs the
room. Outside of Linux psutil's unique set size is the nearest figure. A peak is the greatest of many samples: it is too
low by at most what lived for less than the sampling interval, some four milliseconds.
"""

import os
import re
import threading
import time

import psutil

#: What :func:`memory_of` counts on this platform, for the header of a page.
MEMORY_KIND = "anonymous + shared-anonymous" if psutil.LINUX else "unique set size"
_FIELDS = re.compile(rb"^(RssAnon|RssShmem|VmData):\s+(\d+) kB", re.MULTILINE)


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes that a process holds, and private writable bytes that it has mapped, used or not (0 outside of Linux).

    Raises:
        ProcessLookupError: if there is no such process, or no longer.
    """
    if not psutil.LINUX:
        try:
            return int(psutil.Process(pid).memory_full_info().uss), 0
        except psutil.Error as error:
            raise ProcessLookupError(f"no process {pid}: {error}") from error
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as status:
            found = {name: 1024 * int(count) for name, count in _FIELDS.findall(status.read())}
    except FileNotFoundError:
        found = {}
    if not found:  # the status of a process that has ended but is not yet waited for shows no memory
        raise ProcessLookupError(f"no process {pid}")
    return found[b"RssAnon"] + found[b"RssShmem"], found[b"VmData"]


class PeakMeter:
    """Samples the memory of another process on a thread, from now to :meth:`stop`.

    ``peaks`` holds the greatest sample of each phase; no sample of one phase is counted to the next. A process that
    ends ends the sampling. ``pid`` must not be reused meanwhile, which holds for a child that is not yet waited for.
    """

    def __init__(self, pid: int, interval_seconds: float = 0.004) -> None:
        self.peaks: dict[str, int] = {}
        self.data_peak_bytes = 0  #: the most private memory that was mapped, used or not
        self._pid, self._interval = pid, interval_seconds
        self._phase = "start"
        self._lock = threading.Lock()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=f"memory of {pid}", daemon=True)
        self._thread.start()

    def phase(self, name: str) -> None:
        """Counts samples under another name from now on, beginning with one at once."""
        with self._lock:  # without this, a sample taken before could be counted after
            self._phase = name
        self._sample()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stop and self._sample():
            time.sleep(self._interval)  # takes half the processor time of a wait with a time limit

    def _sample(self) -> bool:
        """Takes one sample; False where the process has ended."""
        with self._lock:
            try:
                held, mapped = memory_of(self._pid)
            except (ProcessLookupError, PermissionError):
                return False
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), held)
            self.data_peak_bytes = max(self.data_peak_bytes, mapped)
            return True


def cap_memory(nbytes: int) -> None:
    """From here on this process maps at most ``nbytes`` of private memory (``RLIMIT_DATA``).

    Private writable mappings count (heap, large tensors, thread stacks), touched or not; mapped files do not.

    Raises:
        MemoryError: if it has mapped as much already.
        ImportError: if the system has no such limit.
    """
    import resource

    _, held = memory_of(os.getpid())
    if held >= nbytes:
        raise MemoryError(
            f"cannot allocate memory: the cap of {nbytes >> 20:,} MiB is no more than the {held >> 20:,} MiB that the "
            f"process has mapped before it begins"
        )
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
