"""Whether a question answers the same when it is asked again: its ratios of times and of peaks, beside those of before.

Seconds differ from day to day and from machine to machine; what a user decides by is how the ways stand to each other.
So every run writes its ratios into the first line of its JSON file, and a run that replaces such a file, or is told to
look at one (``--against``), shows how far each ratio moved. Only runs of the same command on the same machine are set
beside each other: anything else would be another question.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frame.environment import Environment
from benchmarks.frame.outcome import Outcome
from benchmarks.frame.table import markdown_table

__all__ = ["MAXIMUM_CHANGE", "Earlier", "again_table", "asked_words", "broken_again", "ratios_of", "read_earlier"]

MAXIMUM_CHANGE = 0.10
MACHINE = ("cpu", "cores", "threads", "accelerator")  # what must be the same; its memory's size moves by a few MiB
PLACES = ("--out", "--json", "--markdown", "--plot", "--against", "--home")  # options that say where, not what


@dataclass(frozen=True)
class Earlier:
    """The first line of a file that an earlier run wrote."""

    environment: Mapping[str, Any]
    ratios: Mapping[str, float]

    @property
    def date(self) -> str:
        """When it ran."""
        return str(self.environment.get("date", "unknown date"))

    def why_not(self, environment: Environment, ratios: Mapping[str, float]) -> str:
        """Why its ratios cannot be set beside these, in a sentence; empty where they can."""
        now = environment.as_json()["environment"]
        if any(self.environment.get(name) != now[name] for name in MACHINE):
            return f"The run of {self.date} was on another machine: its ratios are not set beside these."
        if asked_words(str(self.environment.get("command", ""))) != asked_words(now["command"]):
            return f"The run of {self.date} was of another command: its ratios are not set beside these."
        if not self.ratios.keys() & ratios.keys():
            return f"The run of {self.date} has no ratio in common with this one."
        return ""

    def changes(self, ratios: Mapping[str, float]) -> dict[str, float]:
        """How far each ratio that both have moved, as a share of what it was."""
        return {name: ratios[name] / self.ratios[name] - 1 for name in ratios if name in self.ratios}

    def moved(self, ratios: Mapping[str, float]) -> list[str]:
        """The ratios that moved by more than :data:`MAXIMUM_CHANGE`."""
        return [name for name, change in self.changes(ratios).items() if not abs(change) <= MAXIMUM_CHANGE]


def ratios_of(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """A question's ratios, unless it names them itself: of each rung its time to the reference's of the same moment,
    and its peak to the first rung's."""
    found: dict[str, float] = {}
    done = [outcome for outcome in outcomes if outcome.result is not None]
    for outcome in done:
        pairs = [step["ratio"] for step in outcome.steps if "ratio" in step]
        ratio = statistics.median(pairs) if pairs else outcome.ratio
        if ratio is not None and ratio == ratio:
            found.setdefault(f"{outcome.rung.name}: time", ratio)
    for outcome in done[1:]:
        if done[0].peak_bytes and outcome.rung.name != done[0].rung.name:
            found.setdefault(f"{outcome.rung.name}: peak", outcome.peak_bytes / done[0].peak_bytes)
    return found


def read_earlier(path: Path) -> Earlier | None:
    """What an earlier run left at ``path``; None if it left no ratios there."""
    try:
        with path.open(encoding="utf-8") as lines:
            first = json.loads(lines.readline())
        return Earlier(first["environment"], first["ratios"])
    except (OSError, ValueError, KeyError, TypeError):  # not there, or of a version that wrote none
        return None


def again_table(earlier: Earlier, environment: Environment, ratios: Mapping[str, float]) -> str:
    """Each ratio before and now; one sentence where the two runs cannot be set beside each other."""
    if reason := earlier.why_not(environment, ratios):
        return reason
    changes = earlier.changes(ratios)
    greatest = max(changes, key=lambda name: abs(changes[name]))
    within = len(changes) - len(earlier.moved(ratios))
    words = (
        f"Again: the same command on the same machine, {earlier.date} and now. {within} of {len(changes)} ratios are "
        f"within {MAXIMUM_CHANGE:.0%}; the one that moved most is {greatest}, by {changes[greatest]:+.1%}."
    )
    rows = [
        [name, f"{earlier.ratios[name]:.3f}", f"{ratios[name]:.3f}", f"{change:+.1%}"]
        for name, change in changes.items()
    ]
    return f"{words}\n\n{markdown_table(['ratio', 'before', 'now', 'change'], rows)}"


def broken_again(path: Path, environment: Environment, ratios: Mapping[str, float]) -> list[str]:
    """What must hold beside the run at ``path`` and does not, one line each."""
    earlier = read_earlier(path)
    if earlier is None:
        return [f"{path.name}: holds no ratios of an earlier run"]
    if reason := earlier.why_not(environment, ratios):
        return [reason]
    changes = earlier.changes(ratios)
    return [
        f"{name}: must be within {MAXIMUM_CHANGE:.0%} of before, moved by {changes[name]:+.1%}"
        for name in earlier.moved(ratios)
    ]


def asked_words(command: str) -> list[str]:
    """The command without the options that only say where things lie."""
    words, kept = shlex.split(command), []
    k = 0
    while k < len(words):
        if words[k] in PLACES:
            k += 2
            continue
        if not words[k].startswith(tuple(f"{place}=" for place in PLACES)):
            kept.append(words[k])
        k += 1
    return kept
