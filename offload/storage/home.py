"""``DiskHome``: the directory of a model's files, and whether they outlive the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DiskHome", "home_of"]


@dataclass(frozen=True)
class DiskHome(os.PathLike[str]):
    """A directory as ``offload_device``, with options that a plain path leaves at their defaults.

    Args:
        directory: created if it does not exist; a relative one is in the working directory of this call. For several
            disks, a directory on a RAID 0 of them.
        keep: whether the weights and buffers outlive the model. If the directory holds no home yet, one is created
            from the layers' values. If it does, the model uses it as it is and reads only the buffers; the layers must
            then be on the meta device, and may be cut into other shards. It does not support ``mesh=``. Call
            ``model.close()`` at the end; a model that lives when the program ends is closed then. The home of one that
            was killed, or was collected before, may be incomplete and raises an error. Optimizer states are not stored:
            a home is no checkpoint (see :func:`~offload.save_checkpoint`).
        overwrite: with ``keep``, create the home again and remove the one that the directory holds.
        recover: with ``keep``, accept also a home whose model ended without ``close()``, with a warning. Size, tensors
            and offsets are verified as always. Weights are those of the last update, and shards may belong to different
            steps if the process ended during one; buffers, and parameters outside of blocks, are those of the last
            ``close()``, or those that the model was made with. It is also unknown whether all writes reached the disk
            if the system crashed.
        direct: whether files are read and written without the page cache. None: whichever is faster, which depends on
            their size and the available memory (see :mod:`offload.storage.page_cache`).
    """

    directory: str | os.PathLike[str]
    keep: bool = False
    overwrite: bool = False
    recover: bool = False
    direct: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.directory, (str, os.PathLike)):
            raise TypeError(
                f"expected one directory, got {type(self.directory).__name__} (directory={self.directory!r}); for "
                f"several disks, pass a directory on a RAID 0 of them"
            )
        # A later os.chdir() does not change what it names.
        object.__setattr__(self, "directory", os.fspath(Path(self.directory).absolute()))
        for option in ("overwrite", "recover"):
            if getattr(self, option) and not self.keep:
                raise ValueError(f"{option}=True is for a persistent home; pass keep=True with it, or leave both")
        if self.recover and self.overwrite:
            raise ValueError("recover=True adopts the home that overwrite=True would remove; pass one of them")

    def __fspath__(self) -> str:
        return os.fspath(self.directory)

    def for_a_copy(self) -> DiskHome:
        """The home of a copied model: temporary files in the same directory."""
        return DiskHome(self.directory, direct=self.direct)


def home_of(offload_device: object) -> DiskHome | None:
    """The home that a directory stands for: an ``os.PathLike``, or a string with a separator; None for all else."""
    if isinstance(offload_device, DiskHome):
        return offload_device
    if isinstance(offload_device, os.PathLike) or (isinstance(offload_device, str) and os.sep in offload_device):
        return DiskHome(offload_device)
    return None
