"""Recall over the size of the batch: does the large batch that GradCache makes possible find more?

The offloaded rung trains from the same seed with batches of several sizes, and every size sees as many pairs: a batch
that is twice as large takes half as many steps. The learning rate grows with the square root of the batch, as is usual
for Adam (Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.frame.environment import Environment
from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells
from benchmarks.frame.outcome import Outcome
from benchmarks.frame.plot import bars, level_line, new_figure, save
from benchmarks.frame.report import publish
from benchmarks.frame.table import markdown_table, mebibytes, reasons
from benchmarks.retrieval.results import LIMIT_WORDS, limit_seconds
from benchmarks.retrieval.settings import Settings
from benchmarks.retrieval.training import FLOOR, RECALL_AT

__all__ = ["BatchSizes"]


class BatchSizes:
    """The sizes, and what is made of their outcomes.

    Raises:
        ValueError: if a size is not larger than the one before, or larger than the number of pairs to be seen.
    """

    def __init__(self, sizes: Sequence[int], examples: int, settings: Settings) -> None:
        if list(sizes) != sorted(set(sizes)) or sizes[0] < 2 or sizes[-1] > examples:
            raise ValueError(
                f"expected batch sizes from 2 to examples={examples}, each larger than the one before, "
                f"got {list(sizes)}"
            )
        self.examples = examples
        self.settings = [self._of(settings, batch, sizes[0]) for batch in sizes]

    def _of(self, settings: Settings, batch: int, smallest: int) -> Settings:
        steps = self.examples // batch
        rate = settings.learning_rate * (batch / smallest) ** 0.5
        return replace(settings, batch=batch, steps=steps, learning_rate=rate, warmup_steps=max(1, steps // 10))

    @property
    def largest(self) -> Settings:
        """Whose batch needs the most pairs."""
        return self.settings[-1]

    def publish(
        self,
        arguments: argparse.Namespace,
        environment: Environment,
        outcomes: Sequence[Outcome],
        facts: Sequence[tuple[str, str]],
        limits: Limits,
    ) -> int:
        """Prints the table and the sentence, and writes what was asked for; the exit status."""
        return publish(
            arguments,
            environment,
            sections=[self.table(outcomes, limits), sentence(outcomes)],
            outcomes=outcomes,
            broken=[f"{outcome.rung.name}: {outcome.failure}" for outcome in outcomes if outcome.failure],
            draw=lambda path: draw(path, outcomes, environment),
            facts=facts,
            limits=limits,
        )

    def table(self, outcomes: Sequence[Outcome], limits: Limits) -> str:
        """A row for each size."""
        header = ["batch", "steps", "learning rate", "s/step", *LIMIT_HEADER, "peak memory", "less torch"]
        header.append(f"recall@{RECALL_AT}")
        rows = [
            [
                outcome.rung.name,
                f"{settings.steps:,}",
                f"{settings.learning_rate:.1e}",
                f"{outcome.median('seconds'):.2f}",
                *limit_cells(outcome.median("seconds"), limit_seconds(outcome, settings, limits)),
                mebibytes(outcome.peaks["training"]),
                mebibytes(outcome.peaks["training"] - outcome.moments[FLOOR]),
                f"{result['recall_before']:.1%} -> {result['recall_after']:.1%}",
            ]
            for outcome, settings in zip(outcomes, self.settings, strict=True)
            if (result := outcome.result) is not None
        ]
        first = self.settings[0]
        parameters = next((outcome.result["parameters"] for outcome in outcomes if outcome.result), 0)
        words = (
            f"{parameters / 1e6:.1f} M parameters on disk, chunks of {first.chunk} rows, {self.examples:,} pairs seen "
            f"at every size, {_held_out(outcomes)} held-out pairs to search. {LIMIT_WORDS}"
        )
        return "\n\n".join(filter(None, (words, markdown_table(header, rows) if rows else "", reasons(outcomes))))


def _held_out(outcomes: Sequence[Outcome]) -> int:
    return max((outcome.result["held_out"] for outcome in outcomes if outcome.result), default=0)


def sentence(outcomes: Sequence[Outcome]) -> str:
    """Whether recall rises with the batch: from each size to the next, on the whole, or not."""
    found = [(outcome.rung.name, outcome.result["recall_after"]) for outcome in outcomes if outcome.result]
    values = [value for _, value in found]
    if len(values) < 2:
        return "One size says nothing about the others."
    best, most = max(found, key=lambda pair: pair[1])
    if all(later > earlier for earlier, later in itertools.pairwise(values)):
        return f"Recall@{RECALL_AT} rises with the batch, from {values[0]:.1%} to {values[-1]:.1%}."
    if values[-1] > values[0]:
        rises = "is higher with the largest batch than with the smallest, but does not rise from each to the next"
    else:
        rises = "does not rise with the batch"
    return (
        f"With as many pairs seen, recall@{RECALL_AT} {rises}: {values[0]:.1%} with {found[0][0]}, {values[-1]:.1%} "
        f"with {found[-1][0]}, at most {most:.1%} with {best}."
    )


def draw(path: Path, outcomes: Sequence[Outcome], environment: Environment) -> Path:
    """Recall and memory over the batch."""
    shown = [outcome for outcome in outcomes if outcome.result is not None]
    names = [outcome.rung.name.removesuffix(" pairs") for outcome in shown]
    results = [outcome.result or {} for outcome in shown]
    figure, axes = new_figure(2, "The same number of pairs, in batches of several sizes")
    bars(
        axes[0],
        names,
        [100 * result["recall_after"] for result in results],
        f"held-out recall@{RECALL_AT}, %",
        "{:.1f}",
    )
    level_line(axes[0], 100 * results[0]["recall_before"], "before training", ":")
    bars(axes[1], names, [outcome.peaks["training"] / 2**20 for outcome in shown], "peak memory, MiB")
    level_line(axes[1], shown[0].moments[FLOOR] / 2**20, "interpreter and torch alone")
    return save(figure, path, environment)
