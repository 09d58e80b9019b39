"""A CRC-32 that another thread computes, while its caller reads or writes the bytes that come next.

``zlib.crc32`` sums one to two gigabytes a second and releases the interpreter's lock, so beside a read or a write it
takes no time of its own as long as a second processor is there.
"""

from __future__ import annotations

import zlib
from functools import partial
from types import TracebackType

from offload.storage.io_thread_pool import IOThreadPool, PooledCall

__all__ = ["RunningSum"]

#: Fewer bytes are summed at once: to hand them to a thread takes longer.
_AT_ONCE_BYTES = 64 << 10


class RunningSum:
    """The checksum of what was added, in the order of the calls. At most one addition is under way.

    As a context manager: at its end nothing reads what was added any more.

    Args:
        first: bytes that the sum begins with.
    """

    def __init__(self, first: bytes) -> None:
        self._value = zlib.crc32(first)
        self._io_threads: IOThreadPool | None = None
        self._job: PooledCall | None = None

    def add(self, data: memoryview) -> None:
        """Begins to add bytes, which must not change until :meth:`wait`, the next :meth:`add` or the end."""
        self.wait()
        if len(data) < _AT_ONCE_BYTES:
            self._sum(data)
            return
        if self._io_threads is None:
            self._io_threads = IOThreadPool(1)
        self._job = self._io_threads.submit(partial(self._sum, data))

    def _sum(self, data: memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def wait(self) -> None:
        """Returns when all that was added is summed."""
        if self._job is not None:
            self._job.synchronize()
            self._job = None

    def digits(self) -> str:
        """The sum of all that was added, in eight hexadecimal digits."""
        self.wait()
        return f"{self._value:08x}"

    def __enter__(self) -> RunningSum:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._job is not None:
            # Without this, memory that the caller frees is read.
            self._job.cancel()
            self._job = None
