"""Compares a run with an earlier one of the same settings on the same machine: how far did each ratio move?"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.case import Outcome
from benchmarks.harness.environment import Environment
from benchmarks.harness.table import markdown_table

MAXIMUM_CHANGE = 0.10
MACHINE = ("cpu", "cores", "threads", "accelerator")  # the size of its memory differs by a few MiB


class Earlier(NamedTuple):
    """An earlier run, as the header of its results file records it."""

    environment: Environment
    settings: Any
    ratios: Mapping[str, float]

    def why_not(self, environment: Environment, settings: Any, ratios: Mapping[str, float]) -> str:
        """Why the two runs cannot be compared, in a sentence; empty where they can."""
        if any(getattr(self.environment, name) != getattr(environment, name) for name in MACHINE):
            return f"The run of {self.environment.date} was on another machine: its ratios are not compared."
        if self.settings != settings:
            return f"The run of {self.environment.date} had other settings: its ratios are not compared."
        common = self.ratios.keys() & ratios.keys()
        return "" if common else f"The run of {self.environment.date} has no ratio in common with this one."

    def changes(self, ratios: Mapping[str, float]) -> dict[str, float]:
        """The change of each common ratio, as a share of the earlier one."""
        return {name: ratios[name] / self.ratios[name] - 1 for name in ratios if name in self.ratios}

    def broken(self, ratios: Mapping[str, float]) -> list[str]:
        """A line for each ratio that moved by more than :data:`MAXIMUM_CHANGE` or is not a number."""
        moved = {name: change for name, change in self.changes(ratios).items() if not abs(change) <= MAXIMUM_CHANGE}
        words = f"must be within {MAXIMUM_CHANGE:.0%} of before, moved by"
        return [f"{name}: {words} {change:+.1%}" for name, change in moved.items()]

    def table(self, ratios: Mapping[str, float]) -> str:
        """Each ratio before and now."""
        changes = self.changes(ratios)
        greatest = max(changes, key=lambda name: abs(changes[name]))
        words = (
            f"Again: the same settings on the same machine, {self.environment.date} and now. "
            f"{len(changes) - len(self.broken(ratios))} of {len(changes)} ratios are within {MAXIMUM_CHANGE:.0%}; the "
            f"largest change is that of {greatest}, by {changes[greatest]:+.1%}."
        )
        rows = [[n, f"{self.ratios[n]:.3f}", f"{ratios[n]:.3f}", f"{change:+.1%}"] for n, change in changes.items()]
        return f"{words}\n\n{markdown_table(['ratio', 'before', 'now', 'change'], rows)}"


def ratios_of(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of each case its time to the reference's and its peak to the first case's, where a benchmark names no ratios."""
    found: dict[str, float] = {}
    done = [outcome for outcome in outcomes if outcome.result is not None]
    for outcome in done:
        ratio = outcome.ratio()
        if ratio == ratio and outcome.reference is not outcome.steps:
            found.setdefault(f"{outcome.name}: time", ratio)
    for outcome in done[1:]:
        if done[0].peak_bytes and outcome.name != done[0].name:
            found.setdefault(f"{outcome.name}: peak", outcome.peak_bytes / done[0].peak_bytes)
    return found
