"""Training under ``memory=``, beside the ways that others offer: memory against time, predicted and measured.

First the fastest way with everything in memory (nothing recomputed, fused AdamW) takes some steps alone. Its peak, all
of it and parts, is what ours gets as ``memory=``; so is the least that works. Then each method takes its steps in turn
with it. Ours has planned before the steps that count.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Claim, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.table import at_most, case_table, mebibytes, spread
from benchmarks.memory_latency.methods import FLOOR
from benchmarks.memory_latency.trained import PLANNED_AFTER, PLANNING, training_of
from benchmarks.models.deepspeed import ENVIRONMENT
from benchmarks.models.training import DEEPSPEED, DISK, FROM_META, FSDP, NVME, RESIDENT, STEPS, Training

CASES = "benchmarks.memory_latency.trained"
ALONE, IN_TURN = "alone", "in turn"
PLAIN, LEAST = "all in memory, fused AdamW", "the least"
CONTRASTIVE = "contrastive"
ALL_OF_IT = 1.02  # time with all memory, to the plain step
MEMORY_ERROR, TIME_ERROR = 0.05, 0.15  # of predictions
SLOWER = 0.03  # than the commit before: what a median may be off
SLACK = 32 << 20  # of a peak above memory x 1.10, for the allocator
MAXIMUM_DIFFERENCE = 1e-3  # of losses, relative, after all steps
WORDS = (
    "Times are medians of the steps in turn, to those of the first row (least to greatest). `peak` is the most that a "
    "process held in a step, above what it held with a batch before the model was made; `planning` the same from the "
    "first step to the last plan. `predicted peak` and `predicted s` are what the plan predicted before these steps, "
    "and how far that is off."
)


def work_of(run: Run) -> tuple[Training, bool]:
    """The model and its steps, and whether these are contrastive."""
    contrastive = run.settings.work == CONTRASTIVE
    sizes = asdict(run.settings.stack) | {"dropout": 0.1 if contrastive else 0.0}
    return training_of(sizes, contrastive), contrastive


def measure(run: Run) -> None:
    """The peak of the plain way and the least; then all methods, each in turn with the plain one."""
    settings, (training, contrastive) = run.settings, work_of(run)
    arguments = {"training": asdict(training), "contrastive": contrastive}

    def case(name: str, method: str, how: dict[str, Any], peer: str = "", **more: str) -> Case:
        environment = ENVIRONMENT if peer else {}
        return Case(name, f"{CASES}:train", {**arguments, "method": method, "how": how, **more}, environment, peer)

    plain = case(PLAIN, RESIDENT, {"checkpointed": False})
    smallest = Case(LEAST, f"{CASES}:least", arguments)
    sizes = run.group(ALONE, [plain, smallest], turns=PLANNED_AFTER + 2)
    if not sizes or any(outcome.result is None for outcome in sizes):
        return
    whole, fits = peak_of(sizes[0]), int(sizes[1].result["bytes"])
    memory = {f"1/{share}" if share > 1 else "all of it": whole // share for share in settings.shares}
    memory = {name: nbytes for name, nbytes in memory.items() if nbytes > fits} | {LEAST: fits}
    cases, method = [], DISK if contrastive else FROM_META
    for name, nbytes in memory.items():
        cases.append(case(f"ours: {name}", method, {"memory": nbytes}))
        if settings.before:
            there = str(Path(settings.before).resolve())
            cases.append(case(f"before: {name}", method, {"memory": nbytes}, before=there))
    cases.append(case("torch.utils.checkpoint", RESIDENT, {}))
    cases.append(case("FSDP2, CPUOffloadPolicy", FSDP, {"checkpointed": False}))
    if not contrastive:
        cases.append(case("DeepSpeed ZeRO-3, CPU", DEEPSPEED, {}, "deepspeed"))
        cases.append(case("DeepSpeed ZeRO-3, NVMe", NVME, {}, "deepspeed"))
    cases = [plain, *(case for case in cases if any(word in case.name for word in settings.only))]
    run.group(IN_TURN, cases, "pairs", turns=settings.pairs, warmup=PLANNED_AFTER)


def peak_of(outcome: Outcome, phase: str = STEPS) -> int:
    """Bytes above what the process held before the model was made."""
    return outcome.above(FLOOR, phase)


def _measured(run: Run) -> list[Outcome]:
    """The cases that ran in turn, without those that gave no result."""
    return [outcome for outcome in run.groups.get(IN_TURN, ()) if outcome.result is not None and outcome.steps]


def _off(outcome: Outcome, kind: str) -> float:
    """How far a prediction is off, relative; NaN where there is none."""
    measured = outcome.median() if kind == "seconds" else peak_of(outcome)
    return float(outcome.result.get(kind, math.nan)) / measured - 1


def report(run: Run) -> list[str]:
    """One table."""
    training, contrastive = work_of(run)
    outcomes = run.groups.get(IN_TURN) or run.groups[ALONE]

    def told(kind: str, show: Callable[[float], str]) -> Callable[[Outcome], str]:
        return lambda o: f"{show(o.result[kind])} ({_off(o, kind):+.1%})" if kind in o.result and o.steps else "-"

    columns = {
        "memory": lambda o: mebibytes(memory) if (memory := o.case.arguments["how"].get("memory")) else "-",
        "peak": lambda o: mebibytes(peak_of(o)),
        "to the plain one's": lambda o: f"{peak_of(o) / peak_of(outcomes[0]):.2f}",
        "predicted peak": told("bytes", mebibytes),
        "planning": lambda o: mebibytes(peak_of(o, PLANNING)),
        "s/step": lambda o: f"{o.median():.3f}",
        "time": lambda o: spread(o.ratios()) if o is not outcomes[0] else "1",
        "predicted s": told("seconds", "{:.3f}".format),
        "kernel": lambda o: f"{o.median('kernel'):.2f} s",
    }
    words = (
        f"{training.blocks} blocks of {training.dim} channels, {training.tokens:,} tokens a step, fp32; "
        f"{'contrastive steps' if contrastive else 'training'} with AdamW and clipping; homes on disk."
    )
    if IN_TURN not in run.groups:
        return [words, case_table(outcomes, {"result": lambda o: "measured"}, "method")]
    fits, whole = int(run.find(LEAST, ALONE).result["bytes"]), peak_of(run.find(PLAIN, ALONE))
    alone = f"Alone, the plain way held {mebibytes(whole)}. The least that works for ours is {fits:,} bytes, "
    return [words, case_table(outcomes, columns, "method"), WORDS, f"{alone}1/{whole / fits:.1f} of it."]


def bounds(run: Run) -> list[str]:
    """The time with all memory, no row slower than before; memory that is kept, predictions, losses."""
    broken: list[str] = []
    outcomes = {outcome.name: outcome for outcome in _measured(run)}
    if PLAIN not in outcomes:
        return [f"{PLAIN}: no result"]
    for name, outcome in outcomes.items():
        both = list(zip(outcome.values("loss"), outcomes[PLAIN].values("loss"), strict=False))
        apart = abs(both[-1][0] / both[-1][1] - 1)
        broken += at_most(f"{name}: the difference of its loss", apart, MAXIMUM_DIFFERENCE, "{:.1e}".format)
        if not name.startswith("ours: "):
            continue
        held = max(peak_of(outcome, phase) for phase in (PLANNING, STEPS))
        broken += at_most(f"{name}: the peak", held, 1.10 * outcome.case.arguments["how"]["memory"] + SLACK, mebibytes)
        for kind, limit in (("bytes", MEMORY_ERROR), ("seconds", TIME_ERROR)):
            what = f"{name}: the error of the predicted {kind}"
            broken += at_most(what, abs(_off(outcome, kind)), limit, "{:.1%}".format)
        if name == "ours: all of it":
            broken += at_most(f"{name}: the ratio of times", outcome.ratio(), ALL_OF_IT, "{:.3f}".format)
        if (before := outcomes.get(name.replace("ours", "before"))) is not None:
            slower = (1 + SLOWER) * before.ratio()
            broken += at_most(f"{name}: the ratio of times, as before,", outcome.ratio(), slower, "{:.3f}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """Half, a fifth and a tenth of the memory, beside the plain way."""
    training, contrastive = work_of(run)
    kind = "contrastive" if contrastive else "AdamW"
    found, plain = [], run.find(PLAIN, IN_TURN)
    for share in (2, 5, 10):
        if (ours := run.find(f"ours: 1/{share}", IN_TURN)) is not None:
            set_up = f"{kind} steps of {training.tokens:,} tokens with only `memory=` set, to 1/{share} of theirs"
            found.append(Claim(set_up, PLAIN, ours.ratios(), peak_of(ours) / peak_of(plain)))
    return found


def points(run: Run) -> dict[str, tuple[float, float]]:
    """Peaks, and times to those of the plain way."""
    return {o.name: (peak_of(o) / 2**20, 1.0 if o.name == PLAIN else o.ratio()) for o in _measured(run)}
