"""``retrieval``: trains a text encoder on a contrastive batch that does not fit, in less memory, to the same losses.

Three methods from one seed, a step of each in a round: the whole batch in memory; GradCache in memory; GradCache over
an OffloadModel on disk. Then the same three under a hard memory cap, midway between what the last one needed and the
least that the others did: there only the last one trains.

Every case has a cap, so that one that does not fit ends with an error of its own; without another it is what the
machine has left.
"""

import itertools
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.benchmark import Benchmark, Facts, Plan, Report, Run
from benchmarks.harness.case import FLOOR, Case, Outcome
from benchmarks.harness.io_counters import medium_bytes
from benchmarks.harness.limits import adamw_bytes, gradient_bytes
from benchmarks.harness.memory import died_of_memory
from benchmarks.harness.schedule import Group
from benchmarks.harness.table import at_most, case_table, limit_columns, markdown_table, mebibytes, reasons, spread
from benchmarks.retrieval.corpus import build_corpus
from benchmarks.retrieval.methods import BEFORE, RECALL_AT
from benchmarks.retrieval.workload import METHODS, OURS, Settings, write_tokens

NAMES = {"whole": "whole batch", "gradcache": "GradCache", OURS: "GradCache + offload"}
TOLERANCE = 1e-4  # of losses
# Freed blocks are returned at once, in every case: else peaks and cap would depend on what each heap keeps.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_ARENA_MAX": "1"}


def plan(settings: Settings, folder: str) -> Plan:
    """The groups: free, and capped if a cap can be named."""

    def case(method: str, suffix: str, cap_bytes: int) -> Case:
        home = f"{folder}/{method}{suffix}".replace(", ", "-")
        how = {"method": method, "settings": asdict(settings), "tokens": f"{folder}/tokens.npz", "home": home}
        how |= {"cap_bytes": cap_bytes, "evaluate": not suffix}
        return Case(NAMES[method] + suffix, "benchmarks.retrieval.methods:train", how, GIVE_BACK)

    available = int(0.9 * psutil.virtual_memory().available)  # the rest is for others
    cases = [case(method, "", available) for method in settings.methods]
    free = yield Group("free", cases, "rounds", settings.training_steps)
    cap_bytes = midway(free)
    if settings.capped_steps and cap_bytes is not None:
        methods = [method for method in METHODS if method == OURS or method in settings.methods]
        capped = [case(method, ", capped", cap_bytes) for method in methods]
        yield Group("capped", capped, turns=min(settings.capped_steps, settings.training_steps))


def prepare(settings: Settings, folder: Path) -> Facts:
    """Builds the corpus and encodes it."""
    corpus = build_corpus(pairs=settings.pairs)
    write_tokens(corpus, settings, folder / "tokens.npz")
    words = (
        f"{len(corpus.training):,} pairs to train on, {len(corpus.held_out):,} from held-out modules, "
        f"{corpus.modules_read:,} modules"
    )
    return [("corpus", words)]


def report(run: Run[Any]) -> Report:
    """What the methods need, and what happened under the cap."""
    free, capped = run.groups["free"], run.groups.get("capped", [])
    settings, done = run.settings, [outcome for outcome in free if outcome.result is not None]

    def least(outcome: Outcome) -> float:
        parameters = int(outcome.done["parameters"])
        copied = gradient_bytes(parameters) + adamw_bytes(parameters)
        work = medium_bytes(outcome.steps, copied_bytes=copied)
        return run.limits.step_seconds(flops=settings.training_flops, **work)

    def quarter(outcome: Outcome, *, last: bool) -> str:
        size = max(1, len(outcome.steps) // 4)  # one batch says little: each is another one
        steps = outcome.steps[-size:] if last else outcome.steps[:size]
        return f"{statistics.fmean(step['loss'] for step in steps):.4f}"

    columns = {
        "peak memory": lambda o: mebibytes(o.peak_bytes),
        "memory ratio": lambda o: f"{o.peak_bytes / done[0].peak_bytes:.2f}x",
        "less torch": lambda o: mebibytes(o.peak_bytes - o.moments[FLOOR]),
        "before step 1": lambda o: mebibytes(o.moments[BEFORE]),
        "s/step": lambda o: f"{o.median():.2f}",
        "time ratio": lambda o: spread(o.ratios(), 2) if o is not done[0] else "1",
        **limit_columns(run.limits, least),
        "loss, first quarter": lambda o: quarter(o, last=False),
        "last quarter": lambda o: quarter(o, last=True),
        f"recall@{RECALL_AT}": lambda o: f"{o.done['recall_before']:.1%} -> {o.done['recall_after']:.1%}",
    }
    sections = [case_table(free, columns, "method"), reasons(free)]
    if done:
        held_out = done[0].done["held_out"]
        sections.append(
            f"{done[0].done['parameters'] / 1e6:.1f} M parameters, {settings.tokens_per_step:,} tokens a step, chunks "
            f"of {settings.chunk} rows, {settings.slices} shards. The interpreter and torch alone hold "
            f"{mebibytes(done[0].moments[FLOOR])}. Recall before and after {settings.training_steps} steps; chance "
            f"finds {RECALL_AT / held_out:.1%} of {held_out} held-out pairs. Methods take their steps in turn; time "
            "ratios are those of the steps in a round: median (least to greatest). Limits count a forward and a "
            "backward with nothing recomputed, AdamW's reads and writes, and the bytes of files."
        )
    if capped:
        sections.append(_cap_table(capped, capped[0].case.arguments["cap_bytes"]))
    elif settings.capped_steps:
        sections.append(f"No cases under a cap: {NAMES[OURS]} does not need less memory than all others.")
    difference = greatest_difference(free)
    if difference is not None:
        sections.append(f"Greatest difference between the methods' losses at any step: {difference:.1e}.")
    return Report(sections, broken_bounds(free, capped))


def greatest_difference(outcomes: Sequence[Outcome]) -> float | None:
    """Greatest absolute difference between the losses of any two methods at any step; None with fewer than two.

    NaN wherever a loss is NaN: that is no agreement.
    """
    losses = [[step["loss"] for step in outcome.steps] for outcome in outcomes if outcome.result is not None]
    if len(losses) < 2:
        return None
    pairs = itertools.combinations(losses, 2)
    differences = [abs(a - b) for first, second in pairs for a, b in zip(first, second, strict=True)]
    return float("nan") if any(value != value for value in differences) else max(differences)


def _is_ours(outcome: Outcome) -> bool:
    return bool(outcome.case.arguments["method"] == OURS)


def midway(outcomes: Sequence[Outcome]) -> int | None:
    """A cap in the middle between what ours needs and the least that another method does.

    Another that found no memory in the whole machine needs more than any cap. None if no such cap can be named: ours
    did not run or takes no less than another, or the system does not tell.
    """
    done = [outcome for outcome in outcomes if outcome.result is not None]
    ours = [outcome.data_peak_bytes for outcome in done if _is_ours(outcome)]
    others = [outcome.data_peak_bytes for outcome in done if not _is_ours(outcome)]
    if not ours or not others or not 0 < ours[0] < min(others):
        return None
    return (ours[0] + min(others)) // 2


def _cap_table(outcomes: Sequence[Outcome], cap_bytes: int) -> str:
    rows = []
    for outcome in outcomes:
        what, losses = _death(outcome), "-"
        if outcome.result is not None:
            what = f"trained {len(outcome.steps)} steps"
            losses = f"{outcome.steps[0]['loss']:.4f} -> {outcome.steps[-1]['loss']:.4f}" if outcome.steps else "-"
        rows.append([outcome.name, what, losses, mebibytes(outcome.peak_bytes)])
    words = (
        f"Under a hard cap of {mebibytes(cap_bytes)} of private memory (`RLIMIT_DATA`, which also counts what is "
        "mapped and not used):"
    )
    return f"{words}\n\n{markdown_table(['method', 'outcome', 'loss', 'memory held'], rows)}"


def _death(outcome: Outcome) -> str:
    if not died_of_memory(outcome):
        return outcome.reason
    wanted = re.search(r"allocate (\d+) bytes", outcome.failure or "")
    what = f"{int(wanted[1]):,} bytes" if wanted else "memory"
    return f"died in step {len(outcome.steps) + 1}: cannot allocate {what}"


def broken_bounds(free: Sequence[Outcome], capped: Sequence[Outcome]) -> list[str]:
    """Bounds that do not hold, one line each. A method in memory that finds none is an answer, not a failure."""
    broken = [
        f"{outcome.name}: {outcome.failure}"
        for outcome in free
        if outcome.failure is not None and (_is_ours(outcome) or not died_of_memory(outcome))
    ]
    difference = greatest_difference(free)
    if difference is not None:
        broken += at_most("the difference of losses", difference, TOLERANCE, "{:.1e}".format)
    reference = next((outcome for outcome in free if _is_ours(outcome)), None)
    for outcome in capped:
        if not _is_ours(outcome):
            if not died_of_memory(outcome):
                what = "it trained" if outcome.result is not None else outcome.reason
                broken.append(f"{outcome.name}: expected to find no memory, but {what}")
        elif outcome.result is None:
            broken.append(f"{outcome.name}: {_death(outcome)}")
        elif reference is not None:
            pairs = zip(outcome.steps, reference.steps, strict=False)  # it takes fewer steps
            if not all(abs(mine["loss"] - theirs["loss"]) <= TOLERANCE for mine, theirs in pairs):
                broken.append(f"{outcome.name}: losses must agree with those without a cap to {TOLERANCE:.0e}")
    return broken


BENCHMARK = Benchmark(Settings, plan, report, prepare)
