"""The files that this process has open and that have no name: homes, gradients, states, boundaries."""

from __future__ import annotations

import os
from pathlib import Path


def open_files(folder: Path | str, label: str = "") -> list[Path]:
    """Those in a folder, by the paths that open them again; ``label``: what they are called."""
    begin, found = f"{os.path.realpath(folder)}/gradstream-{label}", []
    for path in Path("/proc/self/fd").iterdir():
        try:
            name = os.readlink(path)
        except OSError:  # that of this loop
            continue
        if name.startswith(begin) and name.endswith("(deleted)"):
            found.append(path)
    return found
