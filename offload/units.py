"""Sizes as users write them; sizes and times as they are shown, with their units, in tables.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

__all__ = ["parse_bytes", "shown_bytes", "shown_record", "shown_seconds", "table"]

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for base, suffix in ((1000, "b"), (1024, "ib"))
    for power, prefix in enumerate("kmgt", start=1)
}
_SHOWN = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def parse_bytes(value: int | str, name: str = "memory", *, least: int = 1) -> int:
    """Bytes from an integer of at least ``least``, or a string such as ``"2GiB"``, ``"1.5 GB"`` or ``"300MiB"``."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"expected bytes such as 2147483648 or '2GiB', got {name}={value!r}")
        number = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    elif not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected bytes such as 2147483648 or '2GiB', got {name}={value!r}")
    else:
        number = value
    if number < least:
        raise ValueError(
            f"expected {'a positive number of' if least else 'no fewer than 0'} bytes, got {name}={value!r}"
        )
    return number


def shown_bytes(nbytes: float) -> str:
    """Bytes in words, in the largest unit of which there is one, rounded up: so much is enough."""
    for unit, factor in _SHOWN:
        if nbytes >= factor:
            return f"{math.ceil(10 * nbytes / factor) / 10:,.1f} {unit}"
    return f"{nbytes:,.0f} bytes"


def table(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Rows of equally many cells as lines; columns are aligned to the right, except those in ``left`` and the last."""
    last = len(rows[0]) - 1
    widths = [max(len(row[k]) for row in rows) for k in range(last)]

    def line(row: Sequence[str]) -> str:
        cells = (row[k].ljust(width) if k in left else row[k].rjust(width) for k, width in enumerate(widths))
        return "  ".join([*cells, row[last]]).rstrip()

    return "\n".join(map(line, rows))


def shown_seconds(seconds: float) -> str:
    """A time in three digits: in milliseconds below one second."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def shown_record(record: Any) -> str:
    """The fields of a dataclass as a table, with the unit that their names tell."""
    rows = []
    for field in dataclasses.fields(record):
        name, value = field.name, getattr(record, field.name)
        number = shown_seconds(value) if "seconds" in name else shown_bytes(value) if "bytes" in name else f"{value:,}"
        rows.append((name.replace("_", " "), number, ""))
    return table(rows)
