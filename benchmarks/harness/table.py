"""Markdown tables declared as columns, figures in words, and bounds that are checked."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.harness.case import Outcome

Columns = Mapping[str, Callable[[Outcome], str]]
"""The header of each column, and the cell that it shows of an outcome."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first are set to the right."""
    widths = [max(3, *(len(row[k]) for row in (header, *rows))) for k in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [f"{cell:{'>' if k else '<'}{widths[k]}}" for k, cell in enumerate(cells)]
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def case_table(outcomes: Iterable[Outcome], columns: Columns, name: str = "case") -> str:
    """A row for each outcome: its title and its cells, or ``failed`` or ``skipped``."""
    rows = []
    for outcome in outcomes:
        if outcome.result is None:
            rows.append([outcome.title, outcome.reason.partition(":")[0], *[""] * (len(columns) - 1)])
        else:
            rows.append([outcome.title, *(cell(outcome) for cell in columns.values())])
    return markdown_table([name, *columns], rows)


def mebibytes(count: float) -> str:
    """``1234567890`` bytes as ``1,177 MiB``."""
    return f"{count / 2**20:,.0f} MiB"


def spread(values: Iterable[float], digits: int = 3) -> str:
    """The median with the least and the greatest value: ``1.050 (0.95 to 1.06)``; ``-`` where there are none."""
    ordered = sorted(values)
    if not ordered:
        return "-"
    return f"{statistics.median(ordered):.{digits}f} ({ordered[0]:.2f} to {ordered[-1]:.2f})"


def at_most(what: str, value: float, bound: float, show: Callable[[float], str] = "{:.3g}".format) -> list[str]:
    """A line if ``value`` is above the bound or not a number."""
    return [] if value <= bound else [f"{what} must be at most {show(bound)}, is {show(value)}"]


def at_least(what: str, value: float, bound: float, show: Callable[[float], str] = "{:.3g}".format) -> list[str]:
    """A line if ``value`` is below the bound or not a number."""
    return [] if value >= bound else [f"{what} must be at least {show(bound)}, is {show(value)}"]
