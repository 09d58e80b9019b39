"""Opens and parses files that others may have written or damaged, so that no byte of them hangs or exhausts a reader.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["MOST_BYTES", "inside", "naming", "open_regular", "parse_object", "read_at", "read_regular", "shown"]

#: Most bytes of a header or an index, as in the safetensors package.
MOST_BYTES = 100_000_000

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


def read_at(fd: int, count: int, offset: int, path: Path) -> bytes:
    """Reads ``count`` bytes at an offset. Raises ValueError if the file ends before."""
    parts = []
    with naming(path):
        while count:
            part = os.pread(fd, count, offset)
            if not part:
                raise ValueError(f"{path}: the file is not complete, it ends after {offset:,} bytes")
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
    return b"".join(parts)


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """All bytes of a regular file. Raises ValueError, before it reads, for more than ``most``."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > most:
            raise ValueError(f"{path}: expected a file of at most {most:,} bytes, got {size:,}")
        return read_at(fd, size, 0, path)
    finally:
        os.close(fd)


def parse_object(text: bytes, path: Path, what: str) -> dict[str, Any]:
    """The object in JSON text. Raises ValueError for other values, damaged text, and an object with two equal names."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the name {shown(next(n for n in names if names.count(n) > 1))} appears twice")
        return found

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=once)
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
