"""A hard cap on a process's private memory, and what became of the rungs that ran under it.

``RLIMIT_DATA`` limits private writable mappings: the heap, large tensors, stacks of threads. An allocation beyond it
fails like one on a machine that has no more. Shared mappings of files are not in it: they are the kernel's to drop, and
that is what a home on disk is for.

Every rung has a cap, so that one that does not fit dies alone, of an error, and not some other process by the kernel's
choice. Unless it is to be shown how little will do, the cap is what the machine has left.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import psutil

from benchmarks.frame.memory import data_bytes
from benchmarks.frame.outcome import Outcome
from benchmarks.frame.table import markdown_table, mebibytes

__all__ = ["available_bytes", "broken_cap", "cap_memory", "cap_table", "died_of_memory", "midway"]

SHARE_OF_AVAILABLE = 0.9
LACKS_MEMORY = re.compile(r"allocate memory|MemoryError|out of memory|bad_alloc|ENOMEM", re.IGNORECASE)


def available_bytes() -> int:
    """What a process may take without hurting others."""
    return int(SHARE_OF_AVAILABLE * psutil.virtual_memory().available)


def cap_memory(nbytes: int) -> bool:
    """From here on this process maps at most ``nbytes`` of private memory; False where the system has no such limit.

    Raises:
        MemoryError: if it has mapped as much already. It could go on for as long as freed pieces are to be had, and
            would then end of whatever a library makes of an allocation that fails: seldom of an error that says so.
    """
    try:
        import resource
    except ImportError:  # Windows
        return False
    held = data_bytes(os.getpid())
    if held >= nbytes:
        raise MemoryError(
            f"cannot allocate memory: the cap of {mebibytes(nbytes)} is no more than the {mebibytes(held)} that the "
            f"process has mapped before it begins"
        )
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (OSError, ValueError):
        return False
    return True


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
