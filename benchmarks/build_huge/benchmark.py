"""``build-huge``: builds, loads and trains a model whose parameters alone exceed the memory cap of its process.

Three cases train the same model from the same files, a step of each in a round. The resident one without a cap gives
the reference losses; the resident one under the cap fails; the offloaded one must train under the cap to these losses.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.build_huge.workload import Settings, write_weights
from benchmarks.harness.benchmark import Benchmark, Facts, Plan, Report, Run
from benchmarks.harness.case import FLOOR, Case, Outcome, failures, find_done
from benchmarks.harness.io_counters import medium_bytes
from benchmarks.harness.limits import adamw_bytes, gradient_bytes
from benchmarks.harness.schedule import Group
from benchmarks.harness.table import at_most, case_table, limit_columns, mebibytes, reasons, spread

REFERENCE, CAPPED, OFFLOADED = "resident, no cap", "resident, capped", "offloaded, capped"
LIMIT = (
    "The limit of a step counts a forward and a backward with nothing recomputed, AdamW's reads and writes in memory, "
    "and the bytes that the offloaded model reads from files and writes there. The resident model without a cap has "
    "the default allocator, which keeps freed blocks and is faster; under the cap freed blocks are returned."
)
TOLERANCE = 1e-5  # of a loss, relative to that of the resident model
#: glibc raises the size from which blocks are mapped, and then keeps what was freed in its heap, which the cap counts.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def plan(settings: Settings, folder: str) -> Plan:
    """One group."""
    cases = []
    for name, offloaded, capped in ((REFERENCE, False, False), (CAPPED, False, True), (OFFLOADED, True, True)):
        how = {"offloaded": offloaded, "capped": capped, "settings": asdict(settings), "weights": f"{folder}/weights"}
        cases.append(Case(name, "benchmarks.build_huge.workload:train", how, GIVE_BACK if capped else {}))
    yield Group("training", cases, "rounds", settings.steps)


def prepare(settings: Settings, folder: Path) -> Facts:
    """Writes the weights."""
    if not sys.platform.startswith("linux"):
        raise ValueError(f"expected Linux, whose RLIMIT_DATA counts mappings too, got {sys.platform}")
    weights = folder / "weights"
    weights.mkdir()
    stored = write_weights(weights, settings)
    return [
        ("model", f"{mebibytes(settings.parameter_bytes)} of float32 parameters in {settings.blocks} shards, AdamW"),
        ("weights", f"{mebibytes(stored)} of bfloat16 in {settings.blocks} safetensors files with an index"),
        ("cap", f"RLIMIT_DATA of {settings.cap:,} MiB, which counts heap, stacks and private mappings"),
    ]


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


BENCHMARK = Benchmark(Settings, plan, report, prepare)
