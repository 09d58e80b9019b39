"""Markdown tables declared as columns, figures in words, and bounds that are checked."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.harness.case import Outcome
from benchmarks.harness.limits import Limits

Columns = Mapping[str, Callable[[Outcome], str]]
"""The header of each column, and the cell that it shows of an outcome."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first are set to the right.

    Raises:
        ValueError: if a row has not as many cells as the header.
    """
    for k, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(f"expected {len(header)} cells in each row, got {len(row)} in row {k}: {list(row)}")
    widths = [max(3, *(len(row[k]) for row in (header, *rows))) for k in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def case_table(outcomes: Iterable[Outcome], columns: Columns, name: str = "case") -> str:
    """A row for each outcome: its title and its cells, or why it has none."""
    rows = []
    for outcome in outcomes:
        if outcome.result is None:
            rows.append([outcome.title, outcome.status, *[""] * (len(columns) - 1)])
        else:
            rows.append([outcome.title, *(cell(outcome) for cell in columns.values())])
    return markdown_table([name, *columns], rows)


def limit_columns(
    limits: Limits, work: Callable[[Outcome], float], seconds: Callable[[Outcome], float] = Outcome.median
) -> Columns:
    """The least seconds that the machine's rates allow for ``work``, and how much longer the step took."""

    def limit(outcome: Outcome) -> str:
        least = work(outcome)
        return "-" if not least > 0 else f"{least:.3g} s" if least >= 0.1 else f"{1e3 * least:.3g} ms"

    def distance(outcome: Outcome) -> str:
        least = work(outcome)
        return f"{seconds(outcome) / least - 1:+,.0%}" if least > 0 else "-"

    return {"limit": limit, "distance": distance}


def reasons(outcomes: Iterable[Outcome]) -> str:
    """A line for each case without a result, to be shown below a table; empty where all have one."""
    return "\n".join(f"* {outcome.name}: {outcome.reason}" for outcome in outcomes if outcome.reason)


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
