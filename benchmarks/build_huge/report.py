"""Table, bounds and picture of ``build-huge``."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.benchmark import Report, Run
from benchmarks.harness.case import FLOOR, Outcome, failures, find_done
from benchmarks.harness.io_counters import medium_bytes
from benchmarks.harness.limits import adamw_bytes, gradient_bytes
from benchmarks.harness.table import at_most, case_table, limit_columns, mebibytes, reasons, spread

REFERENCE, CAPPED, OFFLOADED = "resident, no cap", "resident, capped", "offloaded, capped"
LIMIT = (
    "The limit of a step counts a forward and a backward with nothing recomputed, AdamW's reads and writes in memory, "
    "and the bytes that the offloaded model reads from files and writes there. The resident model without a cap has "
    "the default allocator, which keeps freed blocks and is faster; under the cap freed blocks are returned."
)
TOLERANCE = 1e-5  # of a loss, relative to that of the resident model


def report(run: Run[Any]) -> Report:
    """One table."""
    outcomes, settings = run.outcomes, run.settings
    cap_bytes = settings.cap << 20
    offloaded, reference = find_done(outcomes, OFFLOADED), find_done(outcomes, REFERENCE)

    def least(outcome: Outcome) -> float:
        if not outcome.steps:
            return 0.0
        parameters = settings.parameter_bytes / 4
        work = medium_bytes(outcome.steps, copied_bytes=gradient_bytes(parameters) + adamw_bytes(parameters))
        return run.limits.step_seconds(flops=settings.training_flops, **work)

    def phase(name: str, outcome: Outcome) -> str:
        return mebibytes(outcome.peaks[name]) if name in outcome.peaks else "-"

    columns = {
        "parameters": lambda o: mebibytes(settings.parameter_bytes),
        "cap": lambda o: mebibytes(cap_bytes) if o.name != REFERENCE else "none",
        "torch alone": lambda o: mebibytes(o.moments[FLOOR]),
        "peak, building": lambda o: phase("build", o),
        "peak, training": lambda o: phase("steps", o),
        "load": lambda o: f"{o.done['load_seconds']:.1f} s" if o.steps else "-",
        "s/step": lambda o: f"{o.median():.2f}" if o.steps else "-",
        "to no cap": lambda o: spread(o.ratios(), 2) if reference else "-",
        **limit_columns(run.limits, least),
        "losses": lambda o: _died(o) or ", ".join(f"{loss:.6f}" for loss in _losses(o)),
    }
    ratios: dict[str, float] = {}
    if offloaded is not None and reference is not None and offloaded.steps:
        ratios[f"{OFFLOADED}: time"] = offloaded.ratio()
        ratios[f"{OFFLOADED}: peak"] = offloaded.peak_bytes / reference.peak_bytes
    sections = [case_table(outcomes, columns), LIMIT, reasons(outcomes)]
    return Report(sections, broken_bounds(outcomes, cap_bytes), ratios=ratios)


def _died(outcome: Outcome) -> str:
    reason = (outcome.result or {}).get("out_of_memory")
    return f"out of memory: {reason}" if reason else ""


def _losses(outcome: Outcome) -> list[float]:
    return [step["loss"] for step in outcome.steps]


def broken_bounds(outcomes: Sequence[Outcome], cap_bytes: int) -> list[str]:
    """Bounds that do not hold, one line each."""
    broken = failures(outcomes)
    for outcome in outcomes:
        if outcome.name == CAPPED and outcome.result is not None and not _died(outcome):
            broken.append("the resident model must not fit under the cap, but it trained")
        elif outcome.name != CAPPED and _died(outcome):
            broken.append(f"{outcome.name}: {_died(outcome)}")
    offloaded, reference = find_done(outcomes, OFFLOADED), find_done(outcomes, REFERENCE)
    if broken or offloaded is None:
        return broken
    broken += at_most("the peak under the cap", offloaded.peak_bytes, cap_bytes, mebibytes)
    losses = _losses(offloaded)
    if len(losses) > 1 and not losses[-1] < losses[0]:
        broken.append(f"the loss must fall, went from {losses[0]:.6f} to {losses[-1]:.6f}")
    if reference is not None:
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, _losses(reference), strict=True))
        broken += at_most("the difference of losses from the resident model's", apart, TOLERANCE, "{:.1e}".format)
    return broken
