"""Stores weights and buffers in files that outlive the model: the next model adopts them without a copy.

::

    directory/weights.home    weights of all layers, and a manifest (offload.storage.manifest)
    directory/buffers.home    the buffers of all layers, and a manifest
    directory/home.lock       locked by the model that uses the home
    directory/gradstream-*    removed with the model: gradients, optimizer states, boundaries

With a mesh of processes each rank has such a directory of its own below the one that is given, ``rank0-of-2``. What it
has opened is compared with what its peers have.

Weights lie layer by layer, so the files do not depend on the cuts into shards: a model of the same layers adopts the
home with any cuts (:mod:`offload.streaming.layer_homes`).

Guarantees
    * Files are adopted only if all are complete, of one home and one generation, closed, and hold the same tensors at
      the same offsets. They are neither copied nor initialised. Refused files are not changed.
    * From :meth:`PersistentTier.mark_open`, before the first write, until :meth:`PersistentTier.write_manifests` no
      manifest is clean, so a home that a crash left half written is recognised.
    * Files are overwritten only on request, and only one model at a time uses a home.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import secrets
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from offload.storage.contract import Block
from offload.storage.disk import DiskBlock, DiskTier, open_lock, reserve
from offload.storage.home import DiskHome
from offload.storage.manifest import (
    RESTORE,
    HomeError,
    Manifest,
    checksum,
    describe,
    digest,
    file_bytes,
    is_of_a_home,
    read_description,
    read_manifest,
    write_manifest,
)
from offload.storage.peers import Opened, check_peers
from offload.storage.stored_file import StoredFile
from pipe.process import finalize_here

__all__ = ["RANKS", "Contents", "PersistentTier", "homes_in"]

_SUFFIX = ".home"
#: Names of the directories of the ranks of a mesh.
RANKS = "rank*-of-*"


@dataclass(frozen=True)
class Contents:
    """Expected contents of one file of a home."""

    #: Name of the file, and its name in errors.
    stem: str
    what: str
    nbytes: int
    #: One for each tensor: name, type, shape, strides, offset.
    lines: Sequence[str]


class _Phase(enum.Enum):
    CREATING = "new files are removed if the model's constructor fails"
    OPEN = "no manifest is clean"
    CLOSED = "all manifests are clean"


@dataclass
class _Usage:
    """The use of a home by one tier, which ends when the tier is closed or collected."""

    directory: Path
    lock: int
    phase: _Phase = _Phase.CREATING
    created: list[Path] = field(default_factory=list)

    def release(self) -> None:
        if self.phase is _Phase.CREATING:
            for path in self.created:
                with contextlib.suppress(OSError):
                    path.unlink()
        with contextlib.suppress(OSError):
            os.close(self.lock)
        if self.phase is _Phase.OPEN:
            warnings.warn(
                f"the model with the persistent home in {str(self.directory)!r} ended without close(): the home is "
                f"marked as open, and the next model will refuse it",
                RuntimeWarning,
                stacklevel=2,
            )


class PersistentTier(DiskTier):
    """Weights and buffers in persistent files; gradients, optimizer states and boundaries in temporary ones.

    Call in this order: :meth:`adopt`, :meth:`file` for each file, :meth:`mark_open`, :meth:`write_manifests`. Raises
    HomeError if another model uses the home.

    ``exchange``: returns what each of the processes that store the model together answers; None if there is one.
    """

    keeps = True

    def __init__(
        self, home: DiskHome, device: torch.device, exchange: Callable[[Any], list[Any]] | None = None
    ) -> None:
        super().__init__(home, device, direct=home.direct)
        self._home = home
        self.recovers = home.recover
        self._exchange = exchange
        #: That of the home when it was opened, the highest of all processes.
        self._generation = 0
        self._contents: list[Contents] = []
        #: By the index of the contents.
        self._manifests: dict[int, Manifest] = {}
        #: The files that are in use, by the index of the contents.
        self._files: dict[int, StoredFile] = {}
        self._number = b""
        try:
            lock = open_lock(self._root / "home.lock", os.O_CREAT)
        except OSError as error:
            raise HomeError(
                f"{self._root / 'home.lock'}: expected a regular file that can be locked: {error.strerror}. Remove it, "
                f"or use another directory"
            ) from error
        self._usage = _Usage(self._root, lock)
        self._release_home = finalize_here(self, _Usage.release, self._usage)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._release_home()
            raise HomeError(
                f"the home in {str(self._root)!r} is in use by another model, of this process or of another; close() "
                f"that one first, or use another directory"
            ) from error

    def adopt(self, contents: Sequence[Contents], *, blank: bool) -> bool:
        """Verifies the home in the directory, if there is one; returns whether there is.

        ``contents``: of each file; there is no file for contents without bytes. ``blank``: whether the layers have no
        values of their own. Raises HomeError, which names the file and what to do, if the unchanged home cannot be
        used.
        """
        self._contents = list(contents)
        if self._exchange is None:
            return self._adopt(contents, blank=blank)
        error = None
        try:
            adopted = self._adopt(contents, blank=blank)
        except HomeError as found:
            error, adopted = found, False
        files = tuple((m.generation, m.clean) for m in self._manifests.values())
        number = next((m.home for m in self._manifests.values()), self._number)
        mine = Opened(None if error is None else str(error), adopted, number, files)
        everybody = self._exchange(mine)
        if error is not None:
            raise error
        check_peers(mine, everybody, self._root, recover=self._home.recover)
        self._number = everybody[0].home
        self._generation = max((generation for other in everybody for generation, _ in other.files), default=0)
        return adopted

    def _adopt(self, contents: Sequence[Contents], *, blank: bool) -> bool:
        root = self._root
        found = {path.stem: path for path in homes_in(root, {each.stem for each in contents})}
        if self._home.overwrite:
            for path in found.values():
                path.unlink()
            found = {}
        if not found:
            others = sorted(path.parent.name for path in homes_in(root, below=f"{RANKS}/"))
            if others:
                raise HomeError(
                    f"{str(root)!r} holds the home of a mesh of processes ({others[0]}). Use as many processes, "
                    f"or load a checkpoint into a home in another directory"
                )
            self._number = secrets.token_bytes(16)
            return False
        if not blank:
            raise HomeError(
                f"{str(root)!r} holds a home already, and the layers have values, too. Build the layers on the "
                f"meta device (and without pretrained=) to adopt the home; or replace it with "
                f"DiskHome(..., overwrite=True); or use another directory"
            )
        wanted = {part.stem: place for place, part in enumerate(contents) if part.nbytes}
        for stem, path in found.items():
            if stem not in wanted:
                read_manifest(path, stem)  # raises for files of another format version
                raise HomeError(
                    f"{path}: unexpected file in a home of {', '.join(wanted) or 'no tensors'}. Pass the layers that "
                    f"the home was created with, or use another directory"
                )
        for stem, place in wanted.items():
            if stem not in found:
                raise HomeError(f"{self._where(place)}: expected a file, there is none. {RESTORE}")
        for place in wanted.values():
            self._manifests[place] = self._checked(place)
        first = next(iter(self._manifests.values()))
        for place, manifest in self._manifests.items():
            if not self._belong_together(first, manifest):
                raise HomeError(
                    f"{self._where(place)}: expected generation {first.generation} of home "
                    f"{first.home.hex()[:8]}, got generation {manifest.generation} of home {manifest.home.hex()[:8]}: "
                    f"the files were not written together. {RESTORE}"
                )
        closed = [place for place, manifest in self._manifests.items() if manifest.clean]
        if partial := [contents[place].what for place in self._manifests if place not in closed]:
            warnings.warn(
                f"recovering the home in {str(root)!r}, whose model ended without close(): the contents of "
                f"{', '.join(partial)} cannot be verified. Shards may be of different steps, and buffers are those of "
                f"the last close(), with parameters outside of blocks; compare with a checkpoint or an evaluation "
                f"before you continue",
                RuntimeWarning,
                stacklevel=2,
            )
        if self._home.verify:
            # The checksum of one that was not closed is that of the last close().
            for place in closed:
                if self._checksum(place) != self._manifests[place].contents_digest:
                    raise HomeError(f"{self._where(place)}: the contents do not match their checksum. {RESTORE}")
        return True

    def _checksum(self, place: int) -> bytes:
        return checksum(self._file(place).path, self._contents[place].nbytes, self.transfers)

    def _where(self, place: int) -> str:
        """The file of the contents with this index, as errors name it."""
        return f"{self._file(place).path} ({self._contents[place].what})"

    def _belong_together(self, first: Manifest, other: Manifest) -> bool:
        if first.home != other.home:
            return False
        if first.generation == other.generation:
            return True
        # A process that ended in mark_open() wrote nothing but some manifests, of the next generation.
        opened, shut = sorted((first, other), key=lambda manifest: -manifest.generation)
        return self._home.recover and shut.clean and not opened.clean and opened.generation == shut.generation + 1

    def _checked(self, place: int) -> Manifest:
        contents, path, where = self._contents[place], self._file(place).path, self._where(place)
        places = len(self._contents)
        manifest = read_manifest(path, contents.what)
        if manifest.places != places:
            raise HomeError(f"{where}: expected one of {places} files, got one of {manifest.places}. {RESTORE}")
        if manifest.place != place:
            raise HomeError(f"{where}: expected file {place} of the home, got file {manifest.place}; it was renamed")
        if not (manifest.clean or self._home.recover):
            raise HomeError(
                f"{where}: expected a home that was closed, but the model that used it ended without close(), and may "
                f"have left it incomplete. Load the last checkpoint into a new home, DiskHome(..., overwrite=True); or "
                f"use it without verification, DiskHome(..., recover=True)"
            )
        expected, got = describe(contents.lines), read_description(path, manifest)
        if digest(got) != manifest.description_digest:
            raise HomeError(f"{where}: the description of the tensors does not match its checksum. {RESTORE}")
        if got != expected or manifest.contents_bytes != contents.nbytes:
            raise HomeError(
                f"{where}: expected {_difference(expected, got)}. Pass the layers that the home was created with, or "
                f"use another directory"
            )
        return manifest

    def _file(self, place: int) -> StoredFile:
        return self._files.get(place) or StoredFile(self._root / f"{self._contents[place].stem}{_SUFFIX}")

    def weights(self, nbytes: int) -> Block:
        """The file of the weights, the first of the contents."""
        return self.file(0, nbytes)

    def file(self, place: int, nbytes: int) -> Block:
        """The file of the contents with this index."""
        contents = self._contents[place]
        assert contents.nbytes == nbytes, f"{contents.what}: {nbytes:,} bytes, described as {contents.nbytes:,}"
        if place not in self._manifests:
            path, description = self._file(place).path, describe(contents.lines)
            self._usage.created.append(path)
            reserve(path, file_bytes(nbytes, len(description)), nbytes)
            blank = Manifest(
                place=place,
                places=len(self._contents),
                clean=False,
                contents_bytes=nbytes,
                description_bytes=len(description),
                generation=1,
                home=self._number,
                description_digest=digest(description),
                contents_digest=bytes(32),
            )
            write_manifest(path, blank, description)
            self._manifests[place] = blank
        self._files[place] = self._file(place).as_it_is()
        return DiskBlock(self._files[place], nbytes, self.transfers)

    def mark_open(self) -> None:
        """Marks all manifests as not clean, before the contents change: the model is constructed."""
        if not self._usage.created:
            generations = (manifest.generation for manifest in self._manifests.values())
            generation = 1 + max(generations, default=0) if self._exchange is None else 1 + self._generation
            for place, manifest in self._manifests.items():
                self._manifests[place] = replace(manifest, clean=False, generation=generation)
                write_manifest(self._file(place), self._manifests[place])
        self._usage.phase = _Phase.OPEN

    def write_manifests(self) -> None:
        """Computes the checksums, writes clean manifests and unlocks the home, after the last write.

        After an OSError the home is open, and this may be called again.
        """
        if self._usage.phase is _Phase.CLOSED:
            return
        places = [place for place, contents in enumerate(self._contents) if contents.nbytes]
        # All are computed before the first manifest is clean.
        for place, contents_digest in [(place, self._checksum(place)) for place in places]:
            self._manifests[place] = replace(self._manifests[place], clean=True, contents_digest=contents_digest)
            write_manifest(self._file(place), self._manifests[place])
        self._usage.phase = _Phase.CLOSED
        self._release_home()

    def close(self) -> None:
        """Unlocks the home, with or without clean manifests."""
        super().close()
        self._release_home()


def homes_in(root: Path, stems: Collection[str] = (), below: str = "") -> list[Path]:
    """The files of homes in a directory, or ``below`` it: those with one of the ``stems`` as name, and all that end
    with a manifest. Others that have the suffix are the user's."""
    found = sorted(root.glob(f"{below}*{_SUFFIX}"))
    return [path for path in found if path.stem in stems or is_of_a_home(path)]


def _difference(expected: bytes, got: bytes) -> str:
    """The first tensor in which two descriptions differ."""
    theirs, ours = got.decode(errors="replace").splitlines(), expected.decode().splitlines()
    for line, other in zip(ours, theirs, strict=False):
        if line != other:
            return f"'{line}', got '{other}'"
    return f"{len(ours) - 1} tensors, got {len(theirs) - 1}"
