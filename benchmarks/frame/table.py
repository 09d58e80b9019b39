"""Tables that read as text and paste as Markdown, and figures in words a person says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.frame.outcome import Outcome

__all__ = ["markdown_table", "mebibytes", "ratio", "reasons"]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with its columns in line; all but the first are set to the right.

    Raises:
        ValueError: if a row has not as many cells as the header.
    """
    for k, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(f"expected {len(header)} cells in each row, got {len(row)} in row {k}: {list(row)}")
    widths = [max(3, *(len(row[k]) for row in (header, *rows))) for k in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded[:1] + padded[2:])} |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def mebibytes(count: float) -> str:
    """``1234567890`` bytes as ``1,177 MiB``."""
    return f"{count / 2**20:,.0f} MiB"


def ratio(value: float, reference: float) -> str:
    """How many times ``reference`` it is: ``0.42x``; ``-`` where there is no reference."""
    return f"{value / reference:.2f}x" if reference else "-"


def reasons(outcomes: Iterable[Outcome]) -> str:
    """A line for each rung without a result, to stand below the table; empty where all have one."""
    return "\n".join(f"* {outcome.rung.name}: {outcome.reason}" for outcome in outcomes if outcome.reason)
