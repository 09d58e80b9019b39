"""The tables of the question: times beside the resident model's and beside the machine's limit, bytes, memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells
from benchmarks.frame.outcome import Outcome
from benchmarks.frame.pairs import Paired, spread, step_ratios
from benchmarks.frame.table import markdown_table, mebibytes, reasons
from benchmarks.frame.traffic import bytes_of_step, from_disk, medium_bytes
from benchmarks.optimizer.shape import Shape
from benchmarks.optimizer.steps import FLOOR, STEPS

__all__ = ["beside", "large_table", "paired_table"]


def paired_table(
    reference: Outcome, found: Mapping[str, Paired], differences: Mapping[str, float], shape: Shape, limits: Limits
) -> str:
    """A row for the reference and for each way beside it."""
    header = [
        "way",
        "s/step",
        "beside the resident",
        "kernel",
        "waiting",
        "read B/parameter",
        "of it from disk",
        "written",
        "peak memory",
        "less torch",
        "parameters differ",
        *LIMIT_HEADER,
    ]
    rows = [_row(reference, reference.steps, None, None, shape, limits)] if reference.result else []
    for way, paired in found.items():
        if paired.outcome.result is not None:
            ratio = spread(paired.ratios())
            rows.append(_row(paired.outcome, paired.steps, ratio, differences.get(way), shape, limits))
    notes = reasons([reference, *(paired.outcome for paired in found.values())])
    words = (
        f"{shape.parameters / 1e6:.0f} M parameters in {shape.blocks} blocks, fp32, {shape.tokens:,} tokens a step, "
        f"AdamW, gradients clipped to a global norm of {shape.max_norm:g}."
    )
    return "\n\n".join(filter(None, (words, markdown_table(header, rows) if rows else "", notes)))


def _row(
    outcome: Outcome,
    steps: Sequence[Mapping[str, Any]],
    ratio: str | None,
    difference: float | None,
    shape: Shape,
    limits: Limits,
) -> list[str]:
    seconds = _median(steps, "seconds")
    read, written = bytes_of_step(steps)
    return [
        outcome.rung.name,
        f"{seconds:.2f}",
        ratio or "1",
        f"{_median(steps, 'kernel'):.2f} s",
        f"{_median(steps, 'waited') / seconds:.1%}",
        f"{read / shape.parameters:.1f}",
        f"{from_disk(steps) / shape.parameters:.1f}",
        f"{written / shape.parameters:.1f}",
        mebibytes(outcome.peaks[STEPS]),
        mebibytes(outcome.peaks[STEPS] - outcome.moments[FLOOR]),
        "-" if difference is None else f"{difference:.0e}" if difference else "0",
        *limit_cells(seconds, limits.step_seconds(flops=shape.flops, **medium_bytes(steps))),
    ]


def large_table(ours: Outcome, theirs: Outcome | None, shape: Shape, limits: Limits, *, alone: bool) -> str:
    """The two ways that can train what nobody else can; ``alone``: whether each had the machine to itself."""
    header = [
        "way",
        "s/step",
        "beside ours",
        "kernel",
        "waiting",
        "read B/parameter",
        "of it from disk",
        "written",
        "peak memory",
        "less torch",
        "losses",
        *LIMIT_HEADER,
    ]
    outcomes = [ours] if theirs is None else [ours, theirs]
    complete = [outcome for outcome in outcomes if outcome.result is not None]
    rows = []
    for outcome in complete:
        ratio = None if outcome is complete[0] else spread(step_ratios(outcome, complete[0]), 2)
        cells = _row(outcome, outcome.steps, ratio, None, shape, limits)
        losses = [outcome.result["first"]["loss"] if outcome.result else 0.0]
        losses += [step["loss"] for step in outcome.steps]
        cells[header.index("losses")] = f"{losses[0]:.1f} to {losses[-1]:.1f}"
        rows.append(cells)
    words = (
        f"{shape.parameters / 1e9:.3f} billion parameters in {shape.blocks} blocks, fp32: "
        f"{16 * shape.parameters / 1e9:.1f} GB of parameters, gradients and moments in files. {shape.tokens:,} tokens "
        f"a step, AdamW, gradients clipped to a global norm of {shape.max_norm:g}."
    )
    closing = ""
    if theirs is not None and len(complete) == 2:
        speedup, share = beside(ours, theirs)
        closing = (
            f"Ours takes 1/{speedup:.2f} of the time of {theirs.rung.name} {theirs.version or ''} and {share:.2f} of "
            f"its memory. {_TURNS[alone]} The allocator is as it comes; a ratio is the median of the steps' and from "
            f"where to where they go. What is read, but not from disk, is from the page cache."
        )
    table = markdown_table(header, rows) if rows else ""
    return "\n\n".join(filter(None, (words, table, closing, reasons(outcomes))))


_TURNS = {
    False: "They took their steps in turn, while both held their memory, so that the page cache had what both left.",
    True: "Each had the machine to itself: in each round a process of one, then a process of the other.",
}


def beside(ours: Outcome, theirs: Outcome) -> tuple[float, float]:
    """How many times as fast ours is, step beside step, and its share of the memory."""
    return statistics.median(step_ratios(theirs, ours)), ours.peaks[STEPS] / theirs.peaks[STEPS]


def _median(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(step.get(key, 0.0) for step in steps))
