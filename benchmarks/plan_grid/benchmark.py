"""``plan-grid``: the plan that ``memory=`` chooses, beside a grid of plans by hand in the same memory.

Three models differ in depth, width and tokens. Each gets memory in geometric steps, from the peak of the fastest way
with everything in memory down to the least that works. A point of the grid fixes all fields of a ``MemoryPolicy`` with
that memory: slots, and how what is left besides the least is divided between shards that rest in memory and graphs, and
whether gradients wait. Each point takes a few steps alone; the best five then take theirs in turn with ours.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.frontier.benchmark import SLACK, allowed, peak_of
from benchmarks.frontier.methods import OURS, PLAIN, PLANNED_AFTER, TRAINING, Work
from benchmarks.harness.benchmark import Benchmark, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes, spread

MAXIMUM_RATIO = 1.05  # of ours to the best of the grid
MODELS = {  #: blocks, channels, rows, tokens of a row
    "deep": (12, 256, 4, 64),
    "wide": (4, 512, 4, 64),
    "long": (6, 256, 8, 128),
}
SMALLEST = (3, 64, 4, 8)  # for tests
TRAIN = "benchmarks.frontier.methods:train"
LEAST_SHARE = 1.5
LEAST = "benchmarks.frontier.methods:least"
WALK = "benchmarks.plan_grid.methods:walk"
CHOSEN = "chosen by memory="
WORDS = (
    "Times are medians of steps in turn with the chosen plan, to its times (least to greatest): below 1 the plan by "
    "hand is faster. `predicted s` rests on all that was measured until the last step. `peak` is the most that a "
    "process held in a step, above what it held before the model was made."
)


@dataclass(frozen=True)
class Settings:
    """The models, and how fine the grid is."""

    models: tuple[str, ...] = option(tuple(MODELS), "models", choices=(*MODELS, "smallest"))
    budgets: int = option(5, "numbers of bytes that a model gets", least=2)
    splits: int = option(8, "parts in which memory is divided between resident shards and graphs")
    best: int = option(5, "points of the grid that are timed again")
    pairs: int = option(7, "pairs of steps of each of them")


def work_of(model: str) -> Work:
    """Training of one of :data:`MODELS`."""
    return Work(TRAINING, *MODELS.get(model, SMALLEST))


def grid(memory: int, least: int, splits: int) -> list[dict[str, int]]:
    """The points of the grid: slots, shards in memory beside graphs, gradients that wait or not; fields of a policy."""
    free, everything = max(0, memory - least), 1 << 40
    shares = [(free * k // splits, free * (splits - k) // splits) for k in range(splits + 1)] + [(0, 0)]
    points = []
    for slots in (2, 3):
        for resident, graphs in dict.fromkeys(shares):
            for gradients in (0, everything):
                fields = {"slots": slots, "resident_bytes": resident, "graph_bytes": graphs}
                points.append({**fields, "gradient_bytes": gradients, "boundary_bytes": everything})
    return points


def best_of(walked: Outcome, count: int) -> list[dict[str, Any]]:
    """The fastest points of a grid; of those that make the same plan, one."""
    ranked = sorted((step for step in walked.steps if step["seconds"] is not None), key=lambda step: step["seconds"])
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for step in ranked:
        plan = step["plan"] or {}
        found.setdefault(tuple(plan.get(key, -1) for key in ("slots", "in_memory", "kept", "waiting")), step)
    return list(found.values())[:count]


def measure(run: Run) -> None:
    """For each model: the bytes, and for each number of them the grid, then the best points in turn with ours."""
    for model in run.settings.models:
        work = work_of(model)
        how = {"work": asdict(work)}
        cases = [Case("resident", TRAIN, {"method": PLAIN, **how, "how": {}}), Case("least", LEAST, how)]
        sizes = run.group(f"{model}: bytes", cases, turns=PLANNED_AFTER + 2)
        if not sizes or any(outcome.result is None for outcome in sizes):
            continue
        fits = int(sizes[1].result["bytes"])
        for memory in budgets(peak_of(sizes[0]), fits, run.settings.budgets):
            _measure_at(run, model, memory, fits)


def budgets(resident: int, least: int, count: int) -> list[int]:
    """From the resident peak down to somewhat more than the least, which drifts, in geometric steps."""
    least = round(LEAST_SHARE * least)
    top = max(resident, least)
    return [round(top * (least / top) ** (k / (count - 1))) for k in range(count)]


def _measure_at(run: Run, model: str, memory: int, least: int) -> None:
    settings, how = run.settings, {"work": asdict(work_of(model))}
    name = f"{model}, {memory:,} bytes"
    points = grid(memory, least, settings.splits)
    walk = Case("grid", WALK, {**how, "memory": memory, "points": points})
    walked = run.group(f"{name}: grid", [walk])

    def case(title: str, **more: Any) -> Case:
        return Case(title, TRAIN, {"method": OURS, **how, "how": {"memory": memory, **more}})

    cases = [case(CHOSEN)]
    for step in best_of(walked[0], settings.best) if walked else ():
        cases.append(case(_named(step), fields=step["fields"]))
    run.group(name, cases, "pairs", turns=settings.pairs, warmup=PLANNED_AFTER)


def _named(step: dict[str, Any]) -> str:
    if not step["plan"]:
        return ", ".join(f"{key}={value}" for key, value in step["fields"].items())
    shown = "{slots} slots, {in_memory} of {shards} shards in memory, {kept} of {cells} graphs, {waiting} waiting"
    return shown.format(**step["plan"])


def _timed(run: Run) -> Iterator[tuple[str, list[Outcome]]]:
    """The groups of cases whose steps ran in turn."""
    for name, outcomes in run.groups.items():
        if outcomes and outcomes[0].name == CHOSEN:
            yield name, outcomes


def slower(outcomes: list[Outcome]) -> float:
    """Time of ours to that of the best point that was timed again; NaN where none was."""
    ratios = [outcome.ratio() for outcome in outcomes[1:] if outcome.result is not None and outcome.steps]
    return 1 / min(ratios) if ratios else math.nan


def report(run: Run) -> list[str]:
    """A table for each model and its bytes."""
    sections = []

    def predicted(outcome: Outcome) -> str:
        plan = outcome.result.get("plan")
        return f"{plan['planned_seconds']:.3f} ({plan['planned_seconds'] / outcome.median() - 1:+.1%})" if plan else "-"

    for name, outcomes in _timed(run):
        walked = run.groups[f"{name}: grid"][0]
        fitted = sum(step["seconds"] is not None for step in walked.steps)
        columns = {
            "s/step": lambda o: f"{o.median():.3f}",
            "to ours": lambda o, first=outcomes[0]: spread(o.ratios()) if o is not first else "1",
            "predicted s": predicted,
            "peak": lambda o: mebibytes(peak_of(o)),
            "plan": lambda o: _named({"plan": o.result["plan"], "fields": {}}),
        }
        sections.append(f"## {name}")
        sections.append(case_table(outcomes, columns, "plan"))
        sections.append(
            f"{fitted} of {len(walked.steps)} points fit. Ours takes {slower(outcomes):.3f} of the time of the best."
        )
    return [*sections, WORDS]


def bounds(run: Run) -> list[str]:
    """Ours is nearly the best, in the memory that it was given."""
    broken: list[str] = []
    for name, outcomes in _timed(run):
        broken += at_most(f"{name}: ours to the best of the grid", slower(outcomes), MAXIMUM_RATIO, "{:.3f}".format)
        ours = outcomes[0]
        held = max(peak_of(ours, phase) for phase in ("planning", "steps")) if ours.result else math.nan
        broken += at_most(f"{name}: the peak of ours", held, 1.03 * (allowed(ours) or 0) + SLACK, mebibytes)
    return broken or ([] if any(True for _ in _timed(run)) else ["nothing was timed"])


BENCHMARK = Benchmark(Settings, measure, report, bounds)
