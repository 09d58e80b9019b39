"""What became of the rungs that ran under a hard cap on memory (:mod:`benchmarks.frame.cap`).

Every rung has a cap, so that one that does not fit dies alone, of an error, and not some other process by the kernel's
choice. Unless it is to be shown how little will do, the cap is what the machine has left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.frame.outcome import Outcome
from benchmarks.frame.table import markdown_table, mebibytes

__all__ = ["broken_cap", "cap_table", "died_of_memory", "midway"]

LACKS_MEMORY = re.compile(r"allocate memory|MemoryError|out of memory|bad_alloc|ENOMEM", re.IGNORECASE)


def died_of_memory(outcome: Outcome) -> bool:
    """Whether the rung ended for want of memory."""
    return outcome.failure is not None and bool(LACKS_MEMORY.search(outcome.failure))


def midway(ours: Outcome, others: Sequence[Outcome]) -> int | None:
    """A cap in the middle between what ours needs and the least that one of the others does.

    An other that found no memory in the whole machine needs more than any cap. None if no such cap can be named: ours
    did not run, takes no less than another, or the system does not tell.
    """
    needs = [outcome.data_peak_bytes for outcome in others if outcome.result is not None]
    if ours.result is None or not needs or not 0 < ours.data_peak_bytes < min(needs):
        return None
    return (ours.data_peak_bytes + min(needs)) // 2


def cap_table(outcomes: Sequence[Outcome], cap_bytes: int) -> str:
    """What became of each rung."""
    rows = []
    for outcome in outcomes:
        if outcome.result is not None:
            losses = f"{outcome.steps[0]['loss']:.4f} -> {outcome.steps[-1]['loss']:.4f}" if outcome.steps else "-"
            rows.append(
                [outcome.rung.name, f"trained {len(outcome.steps)} steps", losses, mebibytes(outcome.peak_bytes)]
            )
        else:
            rows.append([outcome.rung.name, _death(outcome), "-", mebibytes(outcome.peak_bytes)])
    words = (
        f"Under a hard cap of {mebibytes(cap_bytes)} of private memory (`RLIMIT_DATA`, which also counts what is "
        f"mapped and not used):"
    )
    return f"{words}\n\n{markdown_table(['rung', 'what became of it', 'loss', 'memory held'], rows)}"


def _death(outcome: Outcome) -> str:
    if not died_of_memory(outcome):
        return outcome.reason
    wanted = re.search(r"allocate (\d+) bytes", outcome.failure or "")
    step = f"in step {len(outcome.steps) + 1}"
    return (
        f"died {step}: cannot allocate {int(wanted[1]):,} bytes" if wanted else f"died {step}: cannot allocate memory"
    )


def broken_cap(ours: Outcome, others: Sequence[Outcome], free: Outcome | None, tolerance: float) -> list[str]:
    """What must hold under the cap and does not: ours trains to the losses it has without, the others die of memory."""
    broken = []
    if ours.result is None:
        broken.append(f"{ours.rung.name}: {_death(ours)}")
    elif free is not None:
        pairs = zip(ours.steps, free.steps, strict=False)  # it takes fewer steps
        if not all(abs(capped["loss"] - step["loss"]) <= tolerance for capped, step in pairs):
            broken.append(f"{ours.rung.name}: losses must agree with those without a cap to {tolerance:.0e}")
    for outcome in others:
        if not died_of_memory(outcome):
            what = "it trained" if outcome.result is not None else outcome.reason
            broken.append(f"{outcome.rung.name}: expected to find no memory, but {what}")
    return broken
