"""Sizes of batches: of how many something is remembered, and how they are shown."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["remember", "shown"]

#: Different sizes of batches of which something is remembered: their choices, and the bytes of their boundaries.
SIZES_REMEMBERED = 64


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def remember(table: dict[_Key, _Value], key: _Key, value: _Value, *, per_size: int = 1) -> None:
    """Records a value as the last one; forgets the first where batches have very many sizes.

    ``per_size``: values that are recorded for one size.
    """
    table.pop(key, None)
    table[key] = value
    if len(table) > SIZES_REMEMBERED * per_size:
        del table[next(iter(table))]


def shown(units: float) -> str:
    """In words of a message."""
    return f"{units:.2f}".rstrip("0").rstrip(".")
