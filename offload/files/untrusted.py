"""Writes files with checksums; reads those that others may have written or damaged, so that none hangs a reader.

Guarantees
    * Only regular files are read, which the opened descriptor shows: a FIFO or a device never blocks.
    * A name in a file stays in the folder of the file.
    * JSON is at most :data:`MOST_BYTES` long; every damage is a ValueError that names the file.
    * An OSError names the file, whatever call raised it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "MOST_BYTES",
    "WINDOW_BYTES",
    "NewFile",
    "inside",
    "naming",
    "new_file",
    "open_regular",
    "parse_object",
    "read_regular",
    "shown",
    "sum_of",
]

#: Most bytes of an index, as of a header in the safetensors package.
MOST_BYTES = 100_000_000

#: Bytes read, written and summed at a time.
WINDOW_BYTES = 4 << 20

#: What a path leads to if it cannot be opened, though something is there.
_NO_FILE = {errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO, errno.ENODEV}


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context whose OSErrors name a file: those of calls on a descriptor do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or str(path) in str(error):
            raise
        if error.errno is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_regular(path: Path) -> int:
    """A descriptor of a file to read. Raises ValueError if it is not a regular one, FileNotFoundError without one."""
    with naming(path):
        try:
            # Without O_NONBLOCK, opening a FIFO waits for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise ValueError(f"{path}: expected a regular file, got what cannot be read: {error}") from error
            raise
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise ValueError(f"{path}: expected a regular file, got one of mode {stat.filemode(mode)}")
        except BaseException:
            os.close(fd)
            raise
    return fd


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file. Raises ValueError, before it reads, for more than :data:`MOST_BYTES`."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > MOST_BYTES:
            raise ValueError(f"{path}: expected a file of at most {MOST_BYTES:,} bytes, got {size:,}")
        with naming(path), open(fd, "rb", closefd=False) as file:
            return file.read(size)
    finally:
        os.close(fd)


def sum_of(path: Path, fd: int | None = None) -> str:
    """Size and checksum of a file (open as ``fd``); equal to :attr:`NewFile.sum` of what was written."""
    size, value, opened = 0, 0, open_regular(path) if fd is None else fd
    try:
        with naming(path):
            while part := os.pread(opened, WINDOW_BYTES, size):
                size, value = size + len(part), zlib.crc32(part, value)
    finally:
        if fd is None:
            os.close(opened)
    return _sum(size, value)


def _sum(size: int, value: int) -> str:
    return f"{size} bytes, crc32 {value:08x}"


class NewFile:
    """A file that is being written, see :func:`new_file`."""

    def __init__(self, fd: int) -> None:
        self._fd, self._size, self._crc = fd, 0, 0

    @property
    def sum(self) -> str:
        """Size and checksum of what was written."""
        return _sum(self._size, self._crc)

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of ``data``, which nothing else may write to meanwhile."""
        self._size, self._crc = self._size + len(data), zlib.crc32(data, self._crc)
        rest = memoryview(data)
        while rest:  # one system call may write less
            rest = rest[os.write(self._fd, rest) :]


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """A context that writes a new file; at its end the bytes are on the disk, or it raises and there is no file.

    Raises OSError, which names the file, if it exists or cannot be written.
    """
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield NewFile(fd)
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)


def parse_object(text: bytes, path: Path, what: str) -> dict[str, Any]:
    """The object in JSON text. Raises ValueError for other values and damaged text."""
    try:
        found = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the {what} cannot be understood: {error or type(error).__name__}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: the {what} cannot be understood: expected an object, got {shown(found)}")
    return found


def inside(folder: Path, name: Any, named_by: str) -> Path:
    """The path of a file that another one names. Raises ValueError if it is not a name, or leaves the folder.

    Links may lead into the ``blobs`` of the Hugging Face Hub's cache, in which a folder of ``snapshots`` consists of
    links.
    """
    if not isinstance(name, str) or not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise ValueError(f"{named_by}: expected the name of a file in {folder}, got {shown(name)}")
    try:
        root, target = (Path(os.path.realpath(path)) for path in (folder, folder / name))
    except ValueError as error:  # a name that no file system encodes
        raise ValueError(f"{named_by}: expected the name of a file in {folder}, got {shown(name)}: {error}") from error
    blobs = [parent.parent / "blobs" for parent in (root, *root.parents) if parent.name == "snapshots"]
    if not any(target.is_relative_to(allowed) for allowed in (root, *blobs)):
        raise ValueError(
            f"{named_by}: expected a file in {folder}, got {shown(name)}, a link to {target}; put the file itself into "
            f"the folder"
        )
    return folder / name


def shown(value: Any) -> str:
    """A value for an error message, cut off after some characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a nested {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."
