"""The directory of a checkpoint while it is saved to: one save at a time, and only files of saves are removed.

The names of all files of a save have its identity, 32 random hexadecimal digits. So a save that was killed at any
moment is known by them, and the next one removes it. Whatever has another name is the user's, and stays.

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.files.tensor_file import SAVE, TensorFile, write_all
from offload.files.untrusted import inside, naming, parse_object, read_regular, shown

__all__ = ["CRC", "INDEX", "Save", "read_index", "state_folder", "write_file"]

# --- Reads the index of safetensors files, and opens these: all fit the index and are of one save, or none is used ---

#: The name of the index of a checkpoint.
INDEX = "model.safetensors.index.json"

#: Key of the checksum of ``state.pt`` in the metadata of the index of a checkpoint, beside the identity of the save.
CRC = "gradstream_state_crc32"

_FORMS = {
    SAVE: ("32 hexadecimal digits", re.compile(r"[0-9a-f]{32}")),
    CRC: ("8 hexadecimal digits", re.compile(r"[0-9a-f]{8}")),
}


def state_folder(save: str) -> str:
    """The name of the folder of the states of a save."""
    return f"state-{save}"


@dataclass(frozen=True)
class Index:
    """An index: the file of each tensor, and metadata whose fields of checkpoints have the right types."""

    path: Path
    weight_map: dict[str, str]
    metadata: dict[str, Any]

    @property
    def save(self) -> str | None:
        """The identity of the save that wrote it; None for an index of another tool."""
        return self.metadata.get(SAVE)

    def open(self) -> dict[str, TensorFile]:
        """All files, by name.

        Raises FileNotFoundError if some do not exist, ValueError if a name leaves the folder, a file is damaged, of
        another save, or holds other tensors than the index says.
        """
        paths: dict[str, Path] = {}
        for tensor, name in self.weight_map.items():
            if name not in paths:
                paths[name] = inside(self.path.parent, name, f"{self.path}: weight_map: {shown(tensor)}")
        if absent := sorted(name for name, path in paths.items() if not os.path.exists(path)):
            raise FileNotFoundError(f"{self.path} names files that do not exist: {', '.join(absent)}")
        files = {name: TensorFile(path) for name, path in sorted(paths.items())}
        if lost := [f"{tensor} in {name}" for tensor, name in self.weight_map.items() if tensor not in files[name]]:
            raise ValueError(f"{self.path} names tensors that the files do not hold: {', '.join(lost)}")
        for name, file in files.items() if self.save is not None else ():
            file.check_save(self.save)
            if more := [tensor for tensor in file if self.weight_map.get(tensor) != name]:
                raise ValueError(f"{file.path}: holds {', '.join(more)}, which {self.path} does not expect there")
        return files


def read_index(path: Path) -> Index:
    """Reads an index. Raises FileNotFoundError without one, ValueError that names the field if it is damaged."""
    found = parse_object(read_regular(path), path, "index")
    weight_map, metadata = found.get("weight_map"), found.get("metadata", {})
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: expected an index with a weight_map, got {shown(weight_map)}")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise ValueError(f"{path}: weight_map: {shown(name)}: expected a file name, got {shown(file)}")
    if not isinstance(metadata, dict):
        raise ValueError(f"{path}: metadata: expected an object, got {shown(metadata)}")
    for key, (form, pattern) in _FORMS.items():
        value = metadata.get(key)
        if not metadata.keys().isdisjoint(_FORMS) and not (isinstance(value, str) and pattern.fullmatch(value)):
            raise ValueError(f"{path}: metadata: {key}: expected {form}, got {shown(value)}")
    return Index(path, weight_map, metadata)


#: The folder of the states of a save, or a file of its model.
_SAVED = re.compile(r"state-([0-9a-f]{32})|model-([0-9a-f]{32})-\d+-of-\d+\.safetensors")
#: What a save writes into the folder of its states.
_STATES = re.compile(r"index\.json|state\.pt|optimizer-\d+-of-\d+\.safetensors|\.metadata(?:\.tmp)?|__\d+_\d+\.distcp")

#: What file systems without locks answer: some of networks lock only descriptors to write, which directories lack.
_NO_LOCKS = {errno.ENOLCK, errno.EBADF, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class Save:
    """One save into a directory. One process calls :meth:`begin`; others set ``id`` to its result."""

    _lock: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = ""

    @property
    def state(self) -> Path:
        """The folder of the states."""
        return self.folder / state_folder(self.id)

    def model_files(self, count: int) -> list[str]:
        """The names of the files of the model."""
        return [f"model-{self.id}-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]

    def begin(self) -> str:
        """Makes the directory and the folder of the states; returns the identity.

        Raises ValueError, and changes nothing, if another save writes to the directory, or if its index is not one of a
        checkpoint.
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
        if before is not None and before.save is None:
            raise ValueError(
                f"expected a folder for checkpoints, got {self.folder}, whose {INDEX} is of weights of another tool "
                f"and would be replaced; nothing was changed. Pass another folder, or move these weights"
            )
        self.id = uuid.uuid4().hex
        self._remove(lambda id: before is None or id != before.save)
        with naming(self.state):
            self.state.mkdir()
        return self.id

    def commit(self, index: dict[str, Any]) -> None:
        """Makes the save the one that is loaded; then removes those before."""
        new = self.state / "index.json"
        write_file(new, json.dumps(index, indent=2).encode())
        _sync(self.state)
        _sync(self.folder)
        with naming(self.folder / INDEX):
            os.replace(new, self.folder / INDEX)
        _sync(self.folder)
        self._remove(lambda id: id != self.id)

    def discard(self) -> None:
        """Removes what the save has written, unless the index names it."""
        # An interrupt may be raised just after the index was replaced. Without this, its files would be removed.
        try:
            named = self._index()
        except (OSError, ValueError):
            return  # The next save removes them, if it can read the index.
        if named is None or named.save != self.id:
            self._remove(lambda id: id == self.id)

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

    def _remove(self, chosen: Callable[[str], bool]) -> None:
        """Removes what saves with ``chosen`` identities have written, and folders of theirs with nothing else in it."""
        for entry in self.folder.iterdir():
            match = _SAVED.fullmatch(entry.name)
            if match is None or entry.is_symlink() or not chosen(match[1] or match[2]):
                continue
            with contextlib.suppress(OSError):
                if match[2]:
                    entry.unlink()
                    continue
                for name in filter(_STATES.fullmatch, os.listdir(entry)):
                    os.unlink(entry / name)
                os.rmdir(entry)


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
