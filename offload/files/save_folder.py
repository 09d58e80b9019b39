"""The directory of a checkpoint while it is saved to: one save at a time, and only files of saves are removed.

A save begins with a folder ``state-N`` that appears complete with ``save.json``: the identity of the save, and the
files that it will write beside. So a save that was killed at any moment is known by it, and the next one removes what
it lists. Whatever no such file lists is the user's, and stays. N is a number that no name in the directory has.

The directory itself is locked (``flock``), so there is no lock file that could be left behind. Where the file system
has no locks, users see to it that one process saves.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload.files.index import INDEX, STATE, Index, read_index
from offload.files.tensor_file import SAVE, write_all
from offload.files.untrusted import naming, parse_object, read_regular

__all__ = ["Save", "write_file"]

_MANIFEST = "save.json"
_NUMBERED = re.compile(r"(?:model|state|index)-(\d{1,18})(?:-.*|\.json)?")
_MODEL = re.compile(r"model-(\d{1,18})-\d+-of-\d+\.safetensors")
#: What a save writes into the folder of its states.
_STATES = re.compile(
    rf"{re.escape(_MANIFEST)}|index\.json|state\.pt|optimizer-\d+-of-\d+\.safetensors|\.metadata(?:\.tmp)?|__\d+_\d+\.distcp"
)
#: The folder of states before it has its name, and after.
_UNNAMED = re.compile(r"\.gradstream-[0-9a-f]{32}")

#: What file systems without locks answer: some of networks lock only descriptors to write, which directories lack.
_NO_LOCKS = {errno.ENOLCK, errno.EBADF, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class Save:
    """One save into a directory. One process calls :meth:`begin`; others set ``number`` and ``id`` to its result."""

    _lock: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number, self.id = 0, ""
        #: Files of the checkpoint before, by a release that did not list them.
        self._unlisted: list[Path] = []

    @property
    def state(self) -> Path:
        """The folder of the states."""
        return self.folder / f"state-{self.number}"

    def model_files(self, count: int) -> list[str]:
        """The names of the files of the model."""
        return [f"model-{self.number}-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]

    def begin(self, count: int) -> tuple[int, str]:
        """Makes the directory and the folder of the states; returns number and identity.

        ``count``: of files of the model. Raises ValueError, and changes nothing, if another save writes to the
        directory, or if its index is not one of a checkpoint.
        """
        with naming(self.folder):
            if not self.folder.exists():
                self.folder.mkdir(parents=True)
                _sync(self.folder.parent)
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._acquire(self._lock)
        try:
            before = self._index()
        except ValueError as error:
            raise ValueError(f"{error}; nothing was changed. Move the file away, or pass another folder") from error
        if before is not None and before.state is None:
            raise ValueError(
                f"expected a folder for checkpoints, got {self.folder}, whose {INDEX} is of weights of another tool "
                f"and would be replaced; nothing was changed. Pass another folder, or move these weights"
            )
        self.id = uuid.uuid4().hex
        self._sweep(before.save if before is not None else None)
        if before is not None and before.save is None:
            self._unlisted = [*_unlisted(before)]
        with naming(self.folder):
            numbers = [m.group(1) for entry in os.listdir(self.folder) if (m := _NUMBERED.fullmatch(entry))]
        self.number = 1 + max(map(int, numbers), default=0)
        manifest = {SAVE: self.id, "number": self.number, "files": self.model_files(count)}
        unnamed = self.folder / f".gradstream-{self.id}"
        try:
            with naming(unnamed):
                unnamed.mkdir()
            write_file(unnamed / _MANIFEST, json.dumps(manifest).encode())
            _sync(unnamed)
            with naming(self.state):
                os.rename(unnamed, self.state)
        except BaseException:
            self.discard()
            raise
        return self.number, self.id

    def commit(self, index: dict[str, Any]) -> None:
        """Makes the save the one that is loaded; then removes those before."""
        new = self.state / "index.json"
        write_file(new, json.dumps(index, indent=2).encode())
        _sync(self.state)
        _sync(self.folder)
        with naming(self.folder / INDEX):
            os.replace(new, self.folder / INDEX)
        _sync(self.folder)
        self._sweep(self.id)
        for path in self._unlisted:
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()

    def discard(self) -> None:
        """Removes what the save has written, unless the index names it."""
        # An interrupt may be raised just after the index was replaced. Without this, its files would be removed.
        try:
            named = self._index()
        except (OSError, ValueError):
            return  # The next save removes them, if it can read the index.
        if named is None or named.save != self.id:
            _remove(self.state, self.id)
            _empty(self.folder / f".gradstream-{self.id}")

    def release(self) -> None:
        """Lets others save."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                # Without this, a process that was forked meanwhile keeps the lock.
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            lock, self._lock = self._lock, None
            os.close(lock)

    def __del__(self) -> None:
        self.release()

    def _acquire(self, lock: int) -> None:
        """Locks the directory as long as the descriptor is open."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"expected a folder to which no other save writes, got {self.folder}, to which one of this process or "
                f"of another does; nothing was changed. Save again when that one has ended, or pass another folder"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def _index(self) -> Index | None:
        try:
            return read_index(self.folder / INDEX)
        except FileNotFoundError:
            return None

    def _sweep(self, keep: str | None) -> None:
        """Removes all saves in the directory but one."""
        for entry in self.folder.iterdir():
            if _UNNAMED.fullmatch(entry.name):
                _empty(entry)
            elif entry.name.startswith("state-"):
                _remove(entry, None, keep)


def write_file(path: Path, data: bytes) -> None:
    """Writes a new file, and waits until it is on the disk."""
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)


def _sync(folder: Path) -> None:
    """Waits until the entries of a directory are on the disk."""
    with naming(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _remove(state: Path, id: str | None, keep: str | None = None) -> None:
    """Removes the save whose folder of states this is: that of an identity, or any but the one to keep.

    A folder whose ``save.json`` was not written for its name is not ours, and stays.
    """
    path = state / _MANIFEST
    try:
        if state.is_symlink():
            return
        manifest = parse_object(read_regular(path), path, "manifest")
    except (OSError, ValueError):
        return
    number, found, files = (manifest.get(key) for key in ("number", SAVE, "files"))
    if f"state-{number}" != state.name or found == keep or id not in (None, found) or not isinstance(files, list):
        return
    for name in files:
        match = _MODEL.fullmatch(name) if isinstance(name, str) else None
        if match is not None and int(match.group(1)) == number:
            with contextlib.suppress(OSError):
                os.unlink(state.parent / name)
    unnamed = state.parent / f".gradstream-{found}"
    with contextlib.suppress(OSError):
        if _UNNAMED.fullmatch(unnamed.name) and all(map(_STATES.fullmatch, os.listdir(state))):
            os.rename(state, unnamed)  # So that it is known without its manifest.
            state = unnamed
    _empty(state)


def _empty(folder: Path) -> None:
    """Removes what saves write into a folder of states, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        if folder.is_symlink():
            return
        for name in sorted(os.listdir(folder), key=lambda name: name == _MANIFEST):  # the manifest last
            if _STATES.fullmatch(name):
                os.unlink(folder / name)
        os.rmdir(folder)


def _unlisted(index: Index) -> Iterator[Path]:
    """The files and the folder of a checkpoint that lists them in its index only."""
    folder, state = index.path.parent, index.metadata[STATE]
    for name in sorted(set(index.weight_map.values())):
        match = _MODEL.fullmatch(name)
        if match is not None and f"state-{match.group(1)}" == state:
            yield folder / name
    if not (folder / state).is_symlink():
        with contextlib.suppress(OSError):
            for name in os.listdir(folder / state):
                if _STATES.fullmatch(name):
                    yield folder / state / name
        yield folder / state
