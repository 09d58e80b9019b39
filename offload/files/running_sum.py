"""Computes a CRC-32 in another thread while the caller reads or writes the next bytes.

``zlib.crc32`` processes one to two gigabytes a second without the interpreter lock, so on a second core it overlaps
with reads and writes.
"""

from __future__ import annotations

import zlib
from functools import partial

from pipe.threads import Future, Threads

__all__ = ["RunningSum"]

#: Fewer bytes are summed by the caller: submitting them to a thread takes longer.
_AT_ONCE_BYTES = 64 << 10


class RunningSum:
    """The checksum of the bytes ``first`` and all added ones, in order. At most one addition runs at a time.

    As a context manager: after its end no thread reads added bytes.
    """

    def __init__(self, first: bytes) -> None:
        self._value = zlib.crc32(first)
        self._threads = Threads(1, "offload-checksum")
        self._job: Future[None] | None = None

    def add(self, data: memoryview) -> None:
        """Starts to add bytes, which must not change until :meth:`wait`, the next :meth:`add` or the end."""
        self.wait()
        if len(data) < _AT_ONCE_BYTES:
            self._sum(data)
            return
        self._job = self._threads.offer(partial(self._sum, data))

    def _sum(self, data: memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def wait(self) -> None:
        """Returns once all added bytes are summed."""
        if self._job is not None:
            self._job.run_or_wait()
            self._job = None

    def digits(self) -> str:
        """The sum of all added bytes, in eight hexadecimal digits."""
        self.wait()
        return f"{self._value:08x}"

    def __enter__(self) -> RunningSum:
        return self

    def __exit__(self, *error: object) -> None:
        if self._job is not None:
            # Without this, the thread reads memory that the caller frees.
            self._job.cancel()
            self._job = None
