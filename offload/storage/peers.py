"""Compares the parts of one kept home that the ranks of a mesh have opened, each in a directory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.storage.manifest import RESTORE, HomeError

__all__ = ["Opened", "check_peers"]


@dataclass(frozen=True)
class Opened:
    """What one process found in its directory."""

    #: Why the home cannot be used; None if it can.
    error: str | None
    #: Whether there was one.
    adopted: bool
    #: Its identity, or that of a new one.
    home: bytes
    #: For each file, its generation and whether it was closed.
    files: tuple[tuple[int, bool], ...]


def check_peers(mine: Opened, everybody: Sequence[Opened], folder: Path, *, recover: bool) -> None:
    """Raises HomeError if the directories do not hold parts of one home and generation. All processes raise."""
    for rank, other in enumerate(everybody):
        if other.error is not None:
            raise HomeError(f"rank {rank} of the mesh cannot use its part of the home: {other.error}")
        if other.adopted != mine.adopted:
            some, none = ("this rank", f"rank {rank}") if mine.adopted else (f"rank {rank}", "this rank")
            raise HomeError(
                f"expected a home on all ranks of the mesh or on none, but {some} has its part and {none} has none "
                f"(in {folder} for this rank). {RESTORE}"
            )
    if not mine.adopted:
        return
    files = [file for other in everybody for file in other.files]
    shut, opened = ({generation for generation, clean in files if clean is state} for state in (True, False))
    # A process that ended while it opened a home wrote nothing but some manifests, of the next generation.
    one_step = recover and len(shut) == len(opened) == 1 and opened == {min(shut) + 1}
    if len({other.home for other in everybody}) > 1 or not (len(shut | opened) == 1 or one_step):
        parts = (f"rank {k}: {other.home.hex()[:8]} {[*other.files]}" for k, other in enumerate(everybody))
        raise HomeError(
            f"expected parts of one home and one generation in the directories of all ranks of the mesh, got "
            f"{', '.join(parts)} (home; generation of each file, and whether it was closed). {RESTORE}"
        )
