"""Shows a person numbers: sizes and times with their units, in tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from offload.planning.budget import shown_bytes

__all__ = ["shown_record", "shown_seconds", "table"]


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
