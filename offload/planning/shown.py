"""Shows a person numbers: sizes and times with their units, in tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
    rows = [row for field in dataclasses.fields(record) for row in _rows(field.name, getattr(record, field.name))]
    return table([(name.replace("_", " "), number, "") for name, number in rows])


def _rows(name: str, value: float | Mapping[str, float]) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _rows(f"{name}, {key}", each)
    elif "bytes" in name:
        yield name, shown_bytes(value)
    else:
        yield name, shown_seconds(value) if "seconds" in name else f"{value:,}"
