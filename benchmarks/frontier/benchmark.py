"""``frontier``: memory against time, with ``memory=`` as the only setting, beside the ways that others offer.

First the fastest way with everything in memory (nothing recomputed, fused AdamW) takes some steps alone. Its peak, all
of it and parts, is what ours gets as ``memory=``. Then each method takes its steps in turn with it. Ours has planned
for the last time before the steps that count. Peaks are of the same processes, as the rise above what the process held
before the model was made, with a batch, under the allocator as it comes.

What runs is training of the transformer of ``optimizer``, or with ``--work contrastive`` steps as in
``gradcache-batch``, with an update.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.frontier.methods import (
    CHECKPOINTED,
    COMPILED,
    CONTRASTIVE,
    DEEPSPEED,
    FSDP,
    OURS,
    PLAIN,
    PLANNED_AFTER,
    STEPS,
    TIMED_BEFORE,
    TRAINING,
    TWO_PASSES,
    WARMED,
    Work,
)
from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, limit_columns, mebibytes, spread

GOALS = {1: 1.00, 2: 1.05, 3: 1.15, 5: 1.25, 10: 1.35}  #: part of the resident peak -> time to the resident way
SLACK = 8 << 20  # of a peak above memory x 1.03
MEMORY_ERROR, TIME_ERROR = 0.03, 0.07  # of predictions after planning
MAXIMUM_DIFFERENCE = 1e-3  # of losses, relative, after all steps
BEHIND_A_PEER = 0.03  # what a median may be off
ALONE = "alone"
IN_TURN = "in turn"
REFERENCE = "nothing recomputed, fused AdamW"
LEAST = "the least"
TARGET = "benchmarks.frontier.methods"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"}
WORDS = (
    "Times are medians of the steps in turn, to those of the first row (least to greatest). `peak` is the most that a "
    "process held in a step, above what it held with a batch before the model was made; `planning` the same from the "
    "first step to the last plan. `predicted peak` and `predicted s` are what was predicted before these steps, and "
    "how far that is off: of seconds, their ratio to resident steps in turn with those that the prediction rests on, "
    "beside the ratio of these steps to those in turn with them. `by all steps`: the same plan with what these steps "
    "measured, too."
)


@dataclass(frozen=True)
class Settings:
    """The model, its batch, and which points are measured."""

    work: str = option(TRAINING, "what a step is", choices=(TRAINING, CONTRASTIVE))
    blocks: int = option(16, "transformer blocks")
    dim: int = option(320, "channels", multiple=64)
    rows: int = option(4, "rows of the batch; pairs of a contrastive one")
    positions: int = option(128, "tokens of a row")
    vocabulary: int = option(4096, "rows of the embedding of a contrastive model")
    chunk: int = option(8, "rows of a chunk of a contrastive batch")
    shares: tuple[int, ...] = option(tuple(GOALS), "ours gets the resident peak divided by each of these")
    budgets: tuple[float, ...] = option((0.5, 0.1), "activation budgets of torch.compile", least=0)
    pairs: int = option(7, "pairs of steps of each method")
    ways: tuple[str, ...] = option(
        (CHECKPOINTED, TWO_PASSES, COMPILED, FSDP, DEEPSPEED),
        "methods beside the resident one and ours; two-passes only of a contrastive batch, DeepSpeed only of training",
        choices=(CHECKPOINTED, TWO_PASSES, COMPILED, FSDP, DEEPSPEED, "none"),
    )

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can."""
        if self.work == CONTRASTIVE and self.rows % self.chunk:
            return f"expected pairs that are a multiple of --chunk {self.chunk}, got --rows {self.rows}"
        return ""


def work_of(settings: Settings) -> Work:
    """The model and its steps."""
    names = ("blocks", "dim", "rows", "positions", "vocabulary", "chunk")
    return Work(settings.work, **{name: getattr(settings, name) for name in names})


def measure(run: Run) -> None:
    """The resident peak and the least; then all methods, each in turn with the resident one."""
    settings, work = run.settings, work_of(run.settings)

    def case(name: str, method: str, peer: str = "", **how: Any) -> Case:
        arguments = {"method": method, "work": asdict(work), "how": how}
        environment = ENVIRONMENT if method == DEEPSPEED else {}
        return Case(name, f"{TARGET}:train", arguments, environment, peer, {"flops": work.training_flops})

    reference = case(REFERENCE, PLAIN)
    smallest = Case(LEAST, f"{TARGET}:least", {"work": asdict(work)})
    sizes = run.group(ALONE, [reference, smallest], turns=PLANNED_AFTER + 2)
    if any(outcome.result is None for outcome in sizes) or not sizes:
        return
    resident, fits = peak_of(sizes[0]), int(sizes[1].result["bytes"])
    memory = {f"1/{share}" if share > 1 else "all of it": resident // share for share in settings.shares}
    memory = {name: nbytes for name, nbytes in memory.items() if nbytes > fits} | {LEAST: fits}
    cases = [reference, *(case(f"ours: {name}", OURS, memory=nbytes) for name, nbytes in memory.items())]
    if CHECKPOINTED in settings.ways:
        cases.append(case("torch.utils.checkpoint", CHECKPOINTED))
    if TWO_PASSES in settings.ways and not work.trains:
        cases.append(case("GradCache in two passes", TWO_PASSES))
    if COMPILED in settings.ways:
        cases += [case(f"torch.compile, budget {budget:g}", COMPILED, budget=budget) for budget in settings.budgets]
    if FSDP in settings.ways:
        cases.append(case("FSDP2, CPU offload", FSDP))
    if DEEPSPEED in settings.ways and work.trains:
        cases.append(case("DeepSpeed ZeRO-3, NVMe", DEEPSPEED, peer=DEEPSPEED))
    run.group(IN_TURN, cases, "pairs", turns=settings.pairs, warmup=PLANNED_AFTER)


def peak_of(outcome: Outcome, phase: str = STEPS) -> int:
    """Bytes above what the process held before the model was made."""
    return outcome.above(WARMED, phase)


def is_ours(outcome: Outcome) -> bool:
    """Whether a case sets ``memory=``: it is an OffloadModel."""
    return outcome.name.startswith("ours")


def allowed(outcome: Outcome) -> int | None:
    """The ``memory`` of a case of ours."""
    nbytes: int | None = outcome.case.arguments.get("how", {}).get("memory")
    return nbytes


def goal_of(outcome: Outcome) -> float | None:
    """The ratio of times that is aimed at."""
    return {("ours: all of it" if share == 1 else f"ours: 1/{share}"): goal for share, goal in GOALS.items()}.get(
        outcome.name
    )


def planned_off(outcome: Outcome) -> float:
    """How far the seconds that were predicted with the plan are off, relative.

    The rate of a host changes between a prediction and the steps that it is about. So the predicted time is taken to
    that of resident steps in turn before it, and the measured one to that of resident steps in turn with it.
    """
    planned = float(outcome.result["plan"]["planned_seconds"])
    if not outcome.before:
        return planned / outcome.median() - 1
    before = statistics.median(each["seconds"] for each in outcome.before[-TIMED_BEFORE:])
    return planned / before / outcome.ratio() - 1


def loss_difference(outcome: Outcome, reference: Outcome) -> float:
    """Relative difference of two losses, at the last step that both cases have taken; NaN without steps."""
    both = list(zip(outcome.values("loss"), reference.values("loss"), strict=False))
    return abs(both[-1][0] - both[-1][1]) / abs(both[-1][1]) if both else math.nan


def _measured(run: Run) -> list[Outcome]:
    """The cases of the group that ran in turn, without those that gave no result."""
    return [outcome for outcome in run.groups.get(IN_TURN, ()) if outcome.result is not None and outcome.steps]


def report(run: Run) -> list[str]:
    """One table, and the cases that did not fit in memory."""
    settings, work, outcomes = run.settings, work_of(run.settings), run.groups.get(IN_TURN, [])
    sections = [
        f"{work.blocks} blocks of {work.dim} channels, {work.tokens:,} tokens a step, fp32; "
        f"{'training' if work.trains else 'contrastive steps'} with AdamW and clipping; homes on disk."
    ]
    if not outcomes:
        return [*sections, case_table(run.groups[ALONE], {"result": lambda o: "measured"}, "method")]
    reference = outcomes[0]

    def plan(outcome: Outcome, show: str) -> str:
        found = outcome.result.get("plan")
        return show.format(**found) if found else "-"

    def predicted_bytes(outcome: Outcome) -> str:
        found = outcome.result.get("plan")
        if not found or not outcome.steps:
            return "-"
        return f"{mebibytes(found['bytes'])} ({found['bytes'] / peak_of(outcome) - 1:+.1%})"

    def seconds(outcome: Outcome, when: str, off: Callable[[Outcome], float]) -> str:
        found = outcome.result.get("plan")
        return f"{found[when]:.3f} ({off(outcome):+.1%})" if found else "-"

    columns = {
        "memory": lambda o: mebibytes(allowed(o)) if allowed(o) else "-",
        "peak": lambda o: mebibytes(peak_of(o)),
        "to the resident's": lambda o: f"{peak_of(o) / peak_of(reference):.2f}",
        "predicted peak": predicted_bytes,
        "planning": lambda o: mebibytes(peak_of(o, "planning")),
        "s/step": lambda o: f"{o.median():.3f}",
        "time": lambda o: spread(o.ratios()) if o is not reference else "1",
        "goal": lambda o: f"{goal_of(o):.2f}" if goal_of(o) else "-",
        "predicted s": lambda o: seconds(o, "planned_seconds", planned_off),
        "slots": lambda o: plan(o, "{slots}"),
        "shards in memory": lambda o: plan(o, "{in_memory} of {shards}"),
        "graphs kept": lambda o: plan(o, "{kept} of {cells}"),
        "gradients waiting": lambda o: plan(o, "{waiting}"),
        "kernel": lambda o: f"{o.median('kernel'):.2f} s",
        **limit_columns(run.rates, files=True),
    }
    sections += [case_table(outcomes, columns, "method"), WORDS]
    least, resident = run.find(LEAST, ALONE), run.find(REFERENCE, ALONE)
    if least is not None and resident is not None:
        fits, whole = int(least.result["bytes"]), peak_of(resident)
        missing = [f"1/{share}" for share in settings.shares if whole // share <= fits]
        more = f" That is more than {', '.join(missing)} of it." if missing else ""
        sections.append(
            f"Alone, the resident way held {mebibytes(whole)}. The least that works for ours is {fits:,} bytes, "
            f"1/{whole / fits:.1f} of it.{more}"
        )
    told = [f"* {o.name} warned: {line}" for o in outcomes if o.result for line in o.result.get("warnings", ())]
    return [*sections, "\n".join(told)]


def bounds(run: Run) -> list[str]:
    """The goals, memory that is kept, predictions, losses, and peers that are not better in both."""
    broken: list[str] = []
    outcomes = _measured(run)
    reference = run.find(REFERENCE, IN_TURN)
    if reference is None:
        return [f"{REFERENCE}: no result"]
    mine = [outcome for outcome in outcomes if is_ours(outcome)]
    for outcome in mine:
        name, memory, found = outcome.name, allowed(outcome) or 0, outcome.result.get("plan")
        if (goal := goal_of(outcome)) is not None:
            broken += at_most(f"{name}: the ratio of times", outcome.ratio(), goal, "{:.3f}".format)
        held = max(peak_of(outcome, phase) for phase in ("planning", STEPS))
        broken += at_most(f"{name}: the peak", held, 1.03 * memory + SLACK, mebibytes)
        if found is None:
            broken.append(f"{name}: no plan was made")
            continue
        off = abs(found["bytes"] / peak_of(outcome) - 1)
        broken += at_most(f"{name}: the prediction of memory is off, which", off, MEMORY_ERROR, "{:.1%}".format)
        off = abs(planned_off(outcome))
        broken += at_most(f"{name}: the prediction of time is off, which", off, TIME_ERROR, "{:.1%}".format)
    for outcome in outcomes:
        difference = loss_difference(outcome, reference)
        what = f"{outcome.name}: the difference of its last loss from the resident one"
        broken += at_most(what, difference, MAXIMUM_DIFFERENCE, "{:.1e}".format)
    for peer in outcomes:
        if is_ours(peer) or peer is reference:
            continue
        room = 1.03 * peak_of(peer) + SLACK
        ratios = [outcome.ratio() for outcome in mine if peak_of(outcome) <= room]
        if ratios:
            bound = (1 + BEHIND_A_PEER) * peer.ratio()
            broken += at_most(f"ours in the memory of {peer.name}: the ratio", min(ratios), bound, "{:.3f}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """Half, a fifth and a tenth of the memory, beside the resident way."""
    work, reference = work_of(run.settings), run.find(REFERENCE, IN_TURN)
    if reference is None:
        return []
    kind = "AdamW steps" if work.trains else "contrastive steps"
    found = []
    for share in (2, 5, 10):
        ours = run.find(f"ours: 1/{share}", IN_TURN)
        if ours is not None and ours.steps:
            set_up = f"{kind} of {work.tokens:,} tokens with only `memory=` set, to 1/{share} of theirs"
            peaks = peak_of(ours) / peak_of(reference)
            found.append(Claim(set_up, "all in memory, nothing recomputed, fused AdamW", ours.ratios(), peaks))
    return found


def points(run: Run) -> dict[str, tuple[float, float]]:
    """Peaks, and times to those of the resident way."""
    found = {outcome.name: (peak_of(outcome) / 2**20, outcome.ratio()) for outcome in _measured(run)}
    return {name: (nbytes, 1.0 if name == REFERENCE else ratio) for name, (nbytes, ratio) in found.items()}


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims, points)
