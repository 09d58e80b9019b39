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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "MOST_BYTES",
    "WINDOW_BYTES",
    "inside",
    "naming",
    "open_regular",
    "read_object",
    "shown",
    "sum_of",
    "sum_of_values",
    "sync",
    "write_new",
]

#: Most bytes of an index, as of a header in the safetensors package.
MOST_BYTES = 100_000_000

#: Bytes read, written and summed at a time.
WINDOW_BYTES = 4 << 20

#: What a path leads to if it cannot be opened, though something is there.
_NO_FILE = {errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.EISDIR}


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context whose OSErrors name a file: those of calls on a descriptor do not."""
    try:
        yield
    except OSError as error:
        if str(path) in str(error):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def open_regular(path: Path) -> BinaryIO:
    """A file to read. Raises ValueError if it is not a regular one, FileNotFoundError without one."""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ValueError(f"{path}: expected a regular file, got what cannot be read: {error}") from error
        raise
    if not stat.S_ISREG(mode := os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path}: expected a regular file, got one of mode {stat.filemode(mode)}")
    return file


def sum_of(path: Path) -> str:
    """Size and checksum of a file."""
    size, crc = 0, 0
    with naming(path), open_regular(path) as file:
        while part := file.read(WINDOW_BYTES):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return f"{size} bytes, crc32 {crc:08x}"


def write_new(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Writes a new file, and waits until it is on the disk; returns its size and checksum, as :func:`sum_of`.

    Nothing else may write to a part before the next one is asked for. Raises OSError, which names the file, if it
    exists or cannot be written.
    """
    size, crc = 0, 0
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for part in parts:
                size, crc = size + len(part), zlib.crc32(part, crc)
                rest = memoryview(part)
                while rest:  # one system call may write less
                    rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    return f"{size} bytes, crc32 {crc:08x}"


def sync(folder: Path) -> None:
    """Waits until the entries of a directory are on the disk."""
    with naming(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def sum_of_values(values: Any) -> str:
    """A checksum of what JSON can hold, in any order of its keys."""
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError for other values, damaged text, more than :data:`MOST_BYTES`."""
    with naming(path), open_regular(path) as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path}: expected an {what} of at most {MOST_BYTES:,} bytes, got more")
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
