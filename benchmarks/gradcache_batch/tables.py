"""What came of the rungs, in tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells
from benchmarks.frame.outcome import Outcome
from benchmarks.frame.pairs import Paired, spread
from benchmarks.frame.table import markdown_table, mebibytes
from benchmarks.gradcache_batch.shape import Shape
from benchmarks.gradcache_batch.steps import FLOOR

__all__ = [
    "above_torch",
    "chunk_table",
    "difference",
    "loss_bytes",
    "loss_table",
    "memory_table",
    "seconds_of",
    "time_table",
]


def difference(mine: Outcome, theirs: Outcome) -> float:
    """Relative difference of two gradients, by their sketches; nan where there are not two."""
    if mine.result is None or theirs.result is None:
        return float("nan")
    a, b = mine.result["sketch"], theirs.result["sketch"]
    return math.dist(a, b) / math.hypot(*b)


def above_torch(outcome: Outcome) -> int:
    """Bytes of the peak over what interpreter and torch take."""
    return outcome.peaks["steps"] - outcome.moments[FLOOR]


def seconds_of(outcome: Outcome, chunks: int) -> float:
    """Median of the steps with so many chunks."""
    found = [step["seconds"] for step in outcome.steps if step["chunks"] == chunks]
    return statistics.median(found) if found else float("nan")


def forward_flops(shape: Shape) -> float:
    """Of one forward of the batch: products with weights, and attention."""
    weights = shape.depth * 12 * shape.dim**2
    return shape.tokens * (2.0 * weights + 4.0 * shape.depth * shape.positions * shape.dim)


def time_table(
    shape: Shape,
    reference: Outcome,
    timed: Sequence[Paired],
    peaks: Sequence[Outcome],
    limits: Limits,
) -> str:
    """Each way beside the reference."""
    held = {outcome.rung.name: mebibytes(above_torch(outcome)) for outcome in peaks if outcome.result is not None}
    header = ["way", "s/step", "median ratio of pairs", "of processor time", "peak above torch", "gradient differs by"]
    header += LIMIT_HEADER
    least = limits.step_seconds(flops=3 * forward_flops(shape))
    rows = []
    for outcome, paired in ((reference, None), *((paired.outcome, paired) for paired in timed)):
        if outcome.result is None:
            rows.append([outcome.rung.name, outcome.reason, *[""] * (len(header) - 2)])
            continue
        steps = outcome.steps[1:] if paired is None else paired.steps
        seconds = statistics.median(step["seconds"] for step in steps) if steps else float("nan")
        rows.append(
            [
                outcome.rung.name,
                f"{seconds:.2f}",
                spread(paired.ratios()) if paired else "1",
                spread(paired.ratios("processor")) if paired else "1",
                held.get(outcome.rung.name, "-"),
                f"{difference(outcome, reference):.1e}" if paired else "0",
                *limit_cells(seconds, least),
            ]
        )
    parameters = next((o.result["parameters"] for o in (reference, *(p.outcome for p in timed)) if o.result), 0)
    words = (
        f"{parameters / 1e6:.0f} M parameters, {shape.tokens:,} tokens in {2 * shape.pairs} rows of {shape.positions}, "
        f"chunks of {shape.chunk} rows ({shape.chunk * shape.positions} tokens). The limit is a forward and a backward "
        f"with nothing recomputed."
    )
    return f"## Time\n\n{words}\n\n{markdown_table(header, rows)}"


def memory_table(limit_mebibytes: int, grown: Sequence[Outcome], limits: Limits) -> str:
    """The largest batch of each way."""
    header = ["way", "largest batch, pairs", "s/step there", "pairs/s", "ended by", *LIMIT_HEADER]
    rows = []
    for outcome in grown:
        if outcome.result is None:
            rows.append([outcome.rung.name, outcome.reason, *[""] * (len(header) - 2)])
            continue
        last = outcome.steps[-1] if outcome.steps else {"seconds": float("nan"), "pairs": 0}
        ended = "memory" if outcome.result["ended"] else "the end of the question"
        shape = Shape(**outcome.rung.arguments["shape"] | {"pairs": int(last["pairs"])})
        rows.append(
            [
                outcome.rung.name,
                f"{outcome.result['pairs']:,}",
                f"{last['seconds']:.2f}",
                f"{last['pairs'] / last['seconds']:,.0f}",
                ended,
                *limit_cells(last["seconds"], limits.step_seconds(flops=3 * forward_flops(shape))),
            ]
        )
    words = f"Each process may take {limit_mebibytes} MiB beyond interpreter, torch and a step of two pairs."
    return f"## Largest exact batch in fixed memory\n\n{words}\n\n{markdown_table(header, rows)}"


def loss_table(outcome: Outcome, limits: Limits) -> str:
    """What the loss of a very big batch takes by itself."""
    header = ["representations", "width", "seconds", "memory, representations included", *LIMIT_HEADER]
    if outcome.result is None:
        row = [outcome.reason, *[""] * (len(header) - 1)]
    else:
        found = outcome.result
        least = limits.step_seconds(flops=3 * 2.0 * found["rows"] ** 2 * found["width"])  # scores, and both gradients
        row = [f"{found['rows']:,}", str(found["width"]), f"{found['seconds']:.0f}", mebibytes(loss_bytes(outcome))]
        row += limit_cells(found["seconds"], least)
    return f"## The loss alone, by tiles\n\n{markdown_table(header, [row])}"


def loss_bytes(outcome: Outcome) -> int:
    """What the loss's process held at most, representations included, over interpreter and torch."""
    return above_torch(outcome) + int((outcome.result or {})["given"])


def chunk_table(counts: Sequence[int], laddered: Sequence[Outcome], limits: Limits) -> str:
    """Seconds of each way, over the number of chunks; the distance is that of the most chunks."""
    header = [
        "way",
        *(f"{count} chunks, s" for count in counts),
        "bytes loaded a step, fewest to most chunks",
        *LIMIT_HEADER,
    ]
    rows = []
    for outcome in laddered:
        if outcome.result is None:
            rows.append([outcome.rung.name, outcome.reason, *[""] * (len(header) - 2)])
            continue
        loads = [outcome.result["bytes_loaded"][str(count)] for count in counts]
        words = "-" if loads[0] is None else f"{mebibytes(loads[0])} to {mebibytes(loads[-1])}"
        # The least that a model on disk must load is what the fewest chunks load.
        flops = 3 * forward_flops(Shape(**outcome.rung.arguments["shape"]))
        least = limits.step_seconds(flops=flops, read_bytes=min((n for n in loads if n is not None), default=0))
        cells = limit_cells(seconds_of(outcome, counts[-1]), least)
        rows.append([outcome.rung.name, *(f"{seconds_of(outcome, count):.2f}" for count in counts), words, *cells])
    about = "The same batch in each column. The distance from the limit is that of the most chunks."
    return f"## Chunks\n\n{about}\n\n{markdown_table(header, rows)}"
