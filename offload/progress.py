"""A bar for what takes long, on a terminal, if tqdm is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

__all__ = ["progress"]

T = TypeVar("T")


def progress(items: Sequence[T], what: str, unit: str = "tensor") -> Iterable[T]:
    """The items, with a bar on standard error while they are used; without one where that is no terminal."""
    try:
        tqdm: Any = importlib.import_module("tqdm")
    except ImportError:
        return items
    bar: Any = tqdm.tqdm(items, desc=what, unit=unit, disable=None, leave=False)  # None: where there is no terminal
    found: Iterable[T] = bar
    return found
