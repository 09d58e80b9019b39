"""The rungs side by side: a table for the terminal and the README, a picture, and the difference of their losses."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame.environment import Environment
from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells
from benchmarks.frame.pairs import spread, step_ratios
from benchmarks.frame.plot import COLOURS, bars, level_line, new_figure, save
from benchmarks.frame.rungs import Outcome
from benchmarks.frame.table import markdown_table, mebibytes, ratio
from benchmarks.frame.traffic import medium_bytes
from benchmarks.frame.work import adamw_bytes, gradient_bytes
from benchmarks.retrieval.settings import Settings
from benchmarks.retrieval.training import BEFORE, FLOOR, RECALL_AT

__all__ = ["LIMIT_WORDS", "TOLERANCE", "draw", "greatest_difference", "limit_seconds", "table"]

TOLERANCE = 1e-4
LIMIT_WORDS = (
    "Limits count a forward and a backward with nothing recomputed, AdamW's reads and writes, and the bytes that the "
    "offloaded rung reads from files and writes there."
)


def greatest_difference(outcomes: Sequence[Outcome]) -> float | None:
    """Greatest absolute difference between the losses of any two rungs at any step; None with fewer than two rungs.

    Not a number wherever a loss is not a number: that is no agreement.
    """
    losses = [[step["loss"] for step in outcome.steps] for outcome in outcomes if outcome.result is not None]
    if len(losses) < 2:
        return None
    pairs = itertools.combinations(losses, 2)
    differences = [abs(a - b) for first, second in pairs for a, b in zip(first, second, strict=True)]
    return float("nan") if any(value != value for value in differences) else max(differences)


def limit_seconds(outcome: Outcome, settings: Settings, limits: Limits) -> float:
    """The least seconds of a step: the encoder's arithmetic with nothing recomputed, AdamW, and the bytes of files."""
    parameters = int((outcome.result or {})["parameters"])
    copied = gradient_bytes(parameters) + adamw_bytes(parameters)
    return limits.step_seconds(flops=settings.training_flops, **medium_bytes(outcome.steps, copied_bytes=copied))


def table(outcomes: Sequence[Outcome], settings: Settings, limits: Limits) -> str:
    """One row for each rung; ratios are to the first rung that ran: its peak, and its steps in the same rounds."""
    finished = [outcome for outcome in outcomes if outcome.result is not None]
    header = [
        "rung",
        "peak memory",
        "ratio",
        "less torch",
        "before step 1",
        "s/step",
        "ratio",
        *LIMIT_HEADER,
        "loss, first quarter",
        "last quarter",
    ]
    header.append(f"recall@{RECALL_AT}")
    rows = []
    for outcome in outcomes:
        if outcome.result is None:
            rows.append([outcome.rung.name, "failed", *[""] * (len(header) - 2)])
            continue
        reference, result = finished[0], outcome.result
        quarter = max(1, len(outcome.steps) // 4)  # one batch says little: each is another one
        rows.append(
            [
                outcome.rung.name,
                mebibytes(outcome.peak_bytes),
                ratio(outcome.peak_bytes, reference.peak_bytes),
                mebibytes(outcome.peak_bytes - outcome.moments[FLOOR]),
                mebibytes(outcome.moments[BEFORE]),
                f"{outcome.median('seconds'):.2f}",
                spread(step_ratios(outcome, reference), 2) if outcome is not reference else "1",
                *limit_cells(outcome.median("seconds"), limit_seconds(outcome, settings, limits)),
                f"{_mean_loss(outcome.steps[:quarter]):.4f}",
                f"{_mean_loss(outcome.steps[-quarter:]):.4f}",
                f"{result['recall_before']:.1%} -> {result['recall_after']:.1%}",
            ]
        )
    notes = [markdown_table(header, rows)]
    notes += [f"\n{outcome.rung.name}: {outcome.failure}" for outcome in outcomes if outcome.result is None]
    for outcome in finished[:1]:
        assert outcome.result is not None
        held_out = outcome.result["held_out"]
        notes.append(
            f"\n{outcome.result['parameters'] / 1e6:.1f} M parameters, {settings.tokens_per_step:,} tokens a step, "
            f"chunks of {settings.chunk} rows, {settings.slices} shards. The interpreter and torch alone hold "
            f"{mebibytes(outcome.moments[FLOOR])}. Recall before and after {settings.steps} steps; chance finds "
            f"{RECALL_AT / held_out:.1%} of {held_out} held-out pairs. The rungs take their steps in turn; ratios of "
            f"times are those of the steps in a round: median (least to greatest). {LIMIT_WORDS}"
        )
    return "\n".join(notes)


def draw(path: Path, outcomes: Sequence[Outcome], settings: Settings, environment: Environment) -> Path:
    """Memory, time, losses over the steps, and recall, in one PNG."""
    finished = [outcome for outcome in outcomes if outcome.result is not None]
    names = [outcome.rung.name for outcome in finished]
    results = [outcome.result or {} for outcome in finished]
    difference = greatest_difference(outcomes)
    title = f"One contrastive batch of {settings.batch} pairs, {len(finished)} ways"
    figure, axes = new_figure(4, title if difference is None else f"{title}: losses differ by at most {difference:.0e}")
    bars(axes[0], names, [outcome.peak_bytes / 2**20 for outcome in finished], "peak memory, MiB")
    floor = statistics.median(outcome.moments[FLOOR] for outcome in finished) / 2**20
    level_line(axes[0], floor, "interpreter and torch alone")
    bars(axes[1], names, [outcome.median("seconds") for outcome in finished], "seconds a step, median", "{:.2f}")
    for k, outcome in enumerate(finished):
        losses = [step["loss"] for step in outcome.steps]
        # Lines that lie on each other must all be seen: the first ones are wide, the last one is thin.
        width = 1.5 + 2.5 * (len(finished) - 1 - k)
        axes[2].plot(range(1, len(losses) + 1), losses, color=COLOURS[k % len(COLOURS)], linewidth=width)
    axes[2].set_title("loss at each step", fontsize=10)
    axes[2].set_xlabel("step", fontsize=8)
    after = [100 * result["recall_after"] for result in results]
    bars(axes[3], names, after, f"held-out recall@{RECALL_AT}, %", "{:.1f}")
    level_line(axes[3], 100 * results[0]["recall_before"], "before training", ":")
    level_line(axes[3], 100 * RECALL_AT / results[0]["held_out"], "chance")
    return save(figure, path, environment)


def _mean_loss(steps: Sequence[dict[str, Any]]) -> float:
    return float(sum(step["loss"] for step in steps) / len(steps))
