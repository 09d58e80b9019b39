"""The directory of a checkpoint while it is saved to: one save at a time, and only files of saves are removed.

The names of all files of a save have its identity, 32 random hexadecimal digits. So a save that was killed at any
moment is known by them, and the next one removes it. Whatever has another name is the user's, and stays.

The directory itself is locked (``flock``), so there is no lock file that could be left behind. Where the file system
has no locks, users see to it that one process saves.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from offload.files.index import CRC, FILES, INDEX, SAVE, Index, read_index
from offload.untrusted import sum_of_values, sync, write_new

__all__ = ["Save"]

#: The folder of the states of a save, or a file of its model.
_SAVED = re.compile(r"state-([0-9a-f]{32})|model-([0-9a-f]{32})-\d+-of-\d+\.safetensors")
#: What a save writes into the folder of its states.
_STATES = re.compile(
    r"index\.json|(?:state|parts)\.pt|optimizer-\d+-of-\d+\.safetensors|\.metadata(?:\.tmp)?|__\d+_\d+\.distcp"
)


class Save:
    """One save into a directory. One process calls :meth:`begin`; others set ``id`` to its result."""

    _lock: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = ""
        #: Size and checksum of each file that was written.
        self.files: dict[str, str] = {}

    @property
    def state(self) -> Path:
        """The folder of the states."""
        return self.folder / f"state-{self.id}"

    def path(self, name: str) -> Path:
        """Where a file of the save is; those of the model are beside the index, others in the folder of the states."""
        return (self.folder if name.startswith("model-") else self.state) / name

    def note(self, name: str, sum: str) -> str:
        """Notes size and checksum of a file that was written; returns its name in the index."""
        found = str(self.path(name).relative_to(self.folder))
        self.files[found] = sum
        return found

    def write(self, name: str, data: bytes) -> None:
        """Writes a file, and waits until it is on the disk."""
        self.note(name, write_new(self.path(name), [data]))

    def begin(self) -> str:
        """Makes the directory and the folder of the states; returns the identity.

        Raises ValueError, and changes nothing, if another save writes to the directory, or if its index is not one of a
        checkpoint.
        """
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            sync(self.folder.parent)
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
        self.state.mkdir()
        return self.id

    def commit(self, weight_map: Mapping[str, str], total_size: int) -> None:
        """Makes the save the one that is loaded; then removes those before. ``weight_map``: see :class:`Index`."""
        metadata = {"total_size": total_size, SAVE: self.id, FILES: self.files}
        metadata[CRC] = sum_of_values([weight_map, metadata])
        new = self.state / "index.json"
        write_new(new, [json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode()])
        sync(self.state)
        sync(self.folder)
        os.replace(new, self.folder / INDEX)
        sync(self.folder)
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

    def _acquire(self, lock: int) -> None:
        """Locks the directory as long as the descriptor is open."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"expected a folder to which no other save writes, got {self.folder}, to which one of this process or "
                f"of another does; nothing was changed. Save again when that one has ended, or pass another folder"
            ) from error
        except OSError:
            pass  # a file system without locks; some of networks lock only descriptors to write, which directories lack

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
