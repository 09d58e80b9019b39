"""``retrieval``: trains a text encoder on a contrastive batch that does not fit, in less memory, to the same losses.

Three methods from one seed, a step of each in a round: the whole batch in memory; GradCache in memory; GradCache over
an OffloadModel on disk. Then the same three under a hard memory cap, midway between what the last one needed and the
least that the others did: there only the last one trains.

Under torchrun, or with ``--ranks``, one more case: the last method with ``mesh=`` over so many processes, each with a
part of the model on disk and of the rows, to the same losses.

Every case has a cap, so that one that does not fit ends with an error of its own; without another it is what the
machine has left.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import FLOOR, Case, Outcome
from benchmarks.harness.table import at_most, case_table, markdown_table, mebibytes, spread
from benchmarks.retrieval.corpus import build_corpus
from benchmarks.retrieval.methods import RECALL_AT
from benchmarks.retrieval.workload import METHODS, OURS, Settings, write_tokens

NAMES = {"whole": "whole batch", "gradcache": "GradCache", OURS: "GradCache + offload"}
WHEN = ("before", "after")
TOLERANCE = 1e-4  # of losses
# Freed blocks are returned at once, in every case: else peaks and cap would depend on what each heap keeps.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_ARENA_MAX": "1"}


def measure(run: Run) -> None:
    """Free, and capped if a cap can be named."""
    settings = run.settings
    corpus = build_corpus(pairs=settings.pairs)
    run.facts["corpus"] = (
        f"{len(corpus.training):,} pairs to train on, {len(corpus.held_out):,} from held-out modules, "
        f"{corpus.modules_read:,} modules"
    )
    write_tokens(corpus, settings, run.folder / "tokens.npz")

    def case(method: str, suffix: str, cap_bytes: int | None) -> Case:
        how = {"method": method, "settings": asdict(settings), "cap_bytes": cap_bytes, "evaluate": not suffix}
        target = "benchmarks.retrieval.methods:train"
        dies = method != OURS  # a method in memory that finds none is an answer
        return Case(NAMES[method] + suffix, target, how, GIVE_BACK, may_lack_memory=dies)

    cases = [case(method, "", None) for method in settings.methods]
    print(
        f"{len(cases)} methods take {settings.training_steps} steps in turn, then {settings.capped_steps} under a cap"
    )
    if settings.ranks > 1:
        cases.append(_together(case(OURS, "", None), settings))
    cap_bytes = midway(run.group("free", cases, "rounds", turns=settings.training_steps))
    if settings.capped_steps and cap_bytes is not None:
        methods = [method for method in METHODS if method == OURS or method in settings.methods]
        capped = [case(method, ", capped", cap_bytes) for method in methods]
        run.group("capped", capped, turns=min(settings.capped_steps, settings.training_steps))


def _together(case: Case, settings: Settings) -> Case:
    """A copy of a case of one process that runs over several ranks."""
    arguments = {**case.arguments, "together": True}
    return replace(case, name=_name_of_ranks(settings), arguments=arguments, ranks=settings.ranks)


def _name_of_ranks(settings: Settings) -> str:
    return f"{NAMES[OURS]}, {settings.ranks} ranks"


def report(run: Run) -> list[str]:
    """What the methods need, and what happened under the cap."""
    free, settings = run.groups["free"], run.settings
    done = [outcome for outcome in free if outcome.result is not None]

    def change(kind: str, show: Callable[[float], str]) -> Callable[[Outcome], str]:
        """Before and after the training, of held-out pairs."""
        return lambda o: " -> ".join(show(o.result[when][kind]) if kind in o.result[when] else "-" for when in WHEN)

    columns = {
        "peak memory": lambda o: mebibytes(o.peak_bytes),
        "s/step": lambda o: f"{o.median():.2f}",
        "time ratio": lambda o: spread(o.ratios(), 2) if o is not done[0] else "1",
        "held-out loss": change("loss", "{:.3f}".format),
        f"recall@{RECALL_AT}": change("recall", "{:.1%}".format),
    }
    sections = [case_table(free, columns, "method")]
    if done:
        held_out, parameters = done[0].result["held_out"], done[0].result["parameters"]
        sections.append(
            f"{parameters / 1e6:.1f} M parameters, {settings.tokens_per_step:,} tokens a step, chunks of "
            f"{settings.chunk} rows. The interpreter and torch alone hold {mebibytes(done[0].moments[FLOOR])}. Loss "
            f"and recall are of {held_out} held-out pairs, untrained and after {len(done[0].steps)} steps; "
            f"chance finds {RECALL_AT / held_out:.1%}. Time ratios are those of steps in turn: median (least to "
            "greatest)."
        )
    together = run.find(_name_of_ranks(settings), "free")
    if together is not None:
        gathered, reduced = (together.median(f"bytes_{kind}") for kind in ("gathered", "reduced"))
        sections.append(
            f"The row of {settings.ranks} ranks shows the greatest peak of a rank, and the files of the first. Each "
            f"stores 1/{settings.ranks} of the model, trains on 1/{settings.ranks} of the pairs of a step, and has as "
            f"many torch threads as a case of one process. A rank receives {mebibytes(gathered)} of parameters and "
            f"{mebibytes(reduced)} of gradients a step."
        )
    if "capped" in run.groups:
        sections.append(_cap_table(run.groups["capped"]))
    elif settings.capped_steps:
        sections.append(f"No cases under a cap: {NAMES[OURS]} does not need less memory than all others.")
    difference = greatest_difference(free)
    if difference is not None:
        sections.append(f"Greatest difference between the methods' losses at any step: {difference:.1e}.")
    capped = run.groups.get("capped", [])
    dead = [outcome for outcome in capped if outcome.lacked_memory and not _is_ours(outcome)]
    alive = next((outcome for outcome in capped if _is_ours(outcome) and outcome.result is not None), None)
    if dead and alive is not None and difference is not None:
        cap = mebibytes(alive.case.arguments["cap_bytes"])
        sections.append(
            f"Under this cap of {cap} plain training dies, as intended, and {NAMES[OURS]} trains in "
            f"{mebibytes(alive.peak_bytes)}, with losses equal to {difference:.1e}."
        )
    return sections


def greatest_difference(outcomes: Sequence[Outcome]) -> float | None:
    """Greatest absolute difference between the losses of any two methods at any step; None with fewer than two.

    NaN wherever a loss is NaN: that is no agreement.
    """
    losses = [outcome.values("loss") for outcome in outcomes if outcome.result is not None]
    pairs = itertools.combinations(losses, 2)
    differences = [abs(a - b) for first, second in pairs for a, b in zip(first, second, strict=True)]
    if any(value != value for value in differences):
        return float("nan")
    return max(differences, default=None)


def _is_ours(outcome: Outcome) -> bool:
    return bool(outcome.case.arguments["method"] == OURS)


def _of_one_process(outcome: Outcome) -> bool:
    return outcome.case.ranks == 1


def midway(outcomes: Sequence[Outcome]) -> int | None:
    """A cap in the middle between what ours needs and the least that another method does.

    Another that found no memory in the whole machine needs more than any cap. None if no such cap can be named: ours
    did not run or takes no less than another, or the system does not tell.
    """
    done = [outcome for outcome in outcomes if outcome.result is not None and _of_one_process(outcome)]
    ours = [outcome.data_peak_bytes for outcome in done if _is_ours(outcome)]
    others = [outcome.data_peak_bytes for outcome in done if not _is_ours(outcome)]
    if not ours or not others or not 0 < ours[0] < min(others):
        return None
    return (ours[0] + min(others)) // 2


def _cap_table(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for outcome in outcomes:
        losses = outcome.values("loss")
        died = f"died in step {len(losses) + 1}, as intended" if outcome.lacked_memory else outcome.reason
        shown = f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses and not died else "-"
        rows.append([outcome.name, died or f"trained {len(losses)} steps", shown, mebibytes(outcome.peak_bytes)])
    words = (
        f"Under a hard cap of {mebibytes(outcomes[0].case.arguments['cap_bytes'])} of private memory (`RLIMIT_DATA`, "
        "which also counts what is mapped and not used):"
    )
    return f"{words}\n\n{markdown_table(['method', 'outcome', 'loss', 'memory held'], rows)}"


def bounds(run: Run) -> list[str]:
    """All methods have the same losses; under the cap only ours trains, and to these."""
    broken: list[str] = []
    difference = greatest_difference(run.groups["free"])
    if difference is not None:
        broken += at_most("the difference of losses", difference, TOLERANCE, "{:.1e}".format)
    for outcome in run.groups.get("capped", []):
        if not _is_ours(outcome):
            if outcome.result is not None:
                broken.append(f"{outcome.name}: expected to find no memory, but it trained")
        elif (reference := run.find(NAMES[OURS])) is not None:
            pairs = zip(outcome.values("loss"), reference.values("loss"), strict=False)  # it takes fewer steps
            if not all(abs(mine - theirs) <= TOLERANCE for mine, theirs in pairs):
                broken.append(f"{outcome.name}: losses must agree with those without a cap to {TOLERANCE:.0e}")
    return broken


def claims(run: Run) -> list[Claim]:
    """Ours on disk beside the whole batch in memory."""
    ours, whole = run.find(NAMES[OURS]), run.find(NAMES["whole"])
    size, more = ours.result["parameters"] / 1e6, "; under a cap only ours trains" if "capped" in run.groups else ""
    set_up = f"one contrastive batch of {run.settings.batch:,} pairs, {size:.0f} M parameters, all state on disk{more}"
    return [Claim(set_up, "the whole batch in memory", ours.ratios(), ours.peak_bytes / whole.peak_bytes)]


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)
