"""Files written whole or not at all, and the user's cache folder.

A file is written under another name and renamed at the end: an interrupted run leaves no half-written file behind.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/gradstream``, or the platform's usual place for caches; not created here."""
    configured = os.environ.get("XDG_CACHE_HOME")
    if configured and os.path.isabs(configured):  # the XDG specification says to ignore a relative one
        return Path(configured, "gradstream")
    if sys.platform == "win32" and "LOCALAPPDATA" in os.environ:
        return Path(os.environ["LOCALAPPDATA"], "gradstream", "cache")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gradstream"
    return Path.home() / ".cache" / "gradstream"


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """``path``, replaced by the file that ``write(temporary_path)`` filled.

    Whatever ``write`` raises, ``path`` is either as it was or complete, and no other file is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".", suffix=f"-{path.name}", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
