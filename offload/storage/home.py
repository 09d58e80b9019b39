"""``DiskHome``: the directory, or directories, of a model's files, and whether they outlive the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DiskHome", "absolute"]


def absolute(path: str | os.PathLike[str]) -> str:
    """The path from the root of the file system: a later ``os.chdir()`` does not change what it names."""
    return os.fspath(Path(path).absolute())


@dataclass(frozen=True)
class DiskHome(os.PathLike[str]):
    """A directory as ``offload_device``, with options that a plain path leaves at their defaults.

    Args:
        directory: created if it does not exist; a relative one is in the working directory of this call. Several,
            ``DiskHome(["/disk1/home", "/disk2/home"])``, are one home that is striped over their disks: weights,
            gradients, optimizer states and boundaries are dealt over them in stripes of 8 MiB, and transfers use all of
            them at once. Each takes the same share of the bytes. The next model passes the directories of a kept home
            in the same order; they may have moved.
        keep: whether the weights and buffers outlive the model. If the directory holds no home yet, one is created
            from the layers' values. If it does, the model uses it as it is and reads only the buffers; the layers must
            then be on the meta device, and may be cut into other shards. With a mesh each rank keeps its part, which as
            many processes use again. Call ``model.close()`` at the end: a home that
            was not closed may be incomplete and raises an error. Optimizer states are not stored: a home is no
            checkpoint (see :func:`~offload.save_checkpoint`).
        overwrite: with ``keep``, create the home again and remove the one that the directory holds.
        recover: with ``keep``, accept also a home whose model ended without ``close()``, with a warning. Files, sizes,
            tensors, offsets and generations are verified as always. Contents are not, since ``close()`` computes their
            checksums: weights are those of the last update, and shards may belong to different steps if the process
            ended during one; buffers, and parameters outside of blocks, are those of the last ``close()``, or those
            that the model was made with. It is also unknown whether a home that was never closed was ever complete, and
            whether all writes reached the disk if the system crashed.
        verify: compare the contents with their checksums when a home is opened, which reads all of it once. Manifests,
            sizes, tensors and generations are always verified.
        direct: whether files are read and written without the page cache. None: whichever is faster, which depends on
            their size and the available memory (see :mod:`offload.storage.page_cache`).
    """

    directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    keep: bool = False
    overwrite: bool = False
    recover: bool = False
    verify: bool = True
    direct: bool | None = None

    def __post_init__(self) -> None:
        given = self.directory
        several: list[object] = [*given] if isinstance(given, (list, tuple)) else [given]
        if not several:
            raise ValueError("expected a directory, or several, got none (directory=[])")
        for each in several:
            if not isinstance(each, (str, os.PathLike)):
                raise TypeError(f"expected a directory, got {type(each).__name__} (directory={given!r})")
        paths = tuple(absolute(each) for each in several if isinstance(each, (str, os.PathLike)))
        # Hashable; and one of a single directory is a home in that directory.
        object.__setattr__(self, "directory", paths if len(paths) > 1 else paths[0])
        if len(several) > 1 and len(set(map(os.path.realpath, self.directories))) < len(several):
            raise ValueError(f"expected several directories, each on a disk of its own, got one twice: {given!r}")
        for option in ("overwrite", "recover"):
            if getattr(self, option) and not self.keep:
                raise ValueError(f"{option}=True is for a persistent home; pass keep=True with it, or leave both")
        if self.recover and self.overwrite:
            raise ValueError("recover=True adopts the home that overwrite=True would remove; pass one of them")

    @property
    def directories(self) -> tuple[Path, ...]:
        """One, or those over which it is striped, in their order."""
        several = (self.directory,) if isinstance(self.directory, (str, os.PathLike)) else self.directory
        return tuple(map(Path, several))

    def __fspath__(self) -> str:
        if not isinstance(self.directory, (str, os.PathLike)):
            raise TypeError(f"this home has {len(self.directory)} directories, not one path; use its ``directories``")
        return os.fspath(self.directory)

    def for_a_copy(self) -> DiskHome:
        """The home of a copied model: temporary files in the same directories."""
        return DiskHome(self.directory, direct=self.direct)
