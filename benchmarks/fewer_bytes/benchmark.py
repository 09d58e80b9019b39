"""``fewer-bytes``: what the options that store fewer bytes cost in accuracy, each beside exact training.

Losses and recall are compared with the spread of the seeds of exact training. Time is not: the models are small. The
picture shows the curves of each option beside those of exact training.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.fewer_bytes.methods import CURVE, EXACT, Settings
from benchmarks.harness.benchmark import Benchmark, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.plot import Point
from benchmarks.harness.table import markdown_table
from benchmarks.retrieval.corpus import build_corpus
from benchmarks.retrieval.methods import RECALL_AT
from benchmarks.retrieval.workload import write_tokens

SHARE, SPREADS = 0.10, 2.0  # of exact training: of its mean, and of the standard deviation of its seeds
SMOOTHED = 50  # points of a curve of losses, each the mean of as many steps
WORDS = (
    "Mean and standard deviation of the seeds. The loss at the end is that of the last tenth of the steps. Bytes are "
    "what is stored between uses of each parameter, weights, states and gradients, small tensors in full included."
)


def measure(run: Run) -> None:
    """A case for each model, seed and option, one after the other."""
    settings: Settings = run.settings
    corpus = build_corpus(pairs=settings.pairs)
    run.facts["corpus"] = f"{len(corpus.training):,} pairs to train on, {len(corpus.held_out):,} held out"
    write_tokens(corpus, settings.of_retrieval(0), run.folder / "tokens.npz")
    for which in settings.models:
        cases = [
            Case(
                f"{which}, {option}, seed {seed}",
                "benchmarks.fewer_bytes.methods:train",
                {"which": which, "option": option, "seed": seed, "settings": asdict(settings)},
            )
            for seed in range(settings.seeds)
            for option in settings.options
        ]
        run.group(which, cases)


def outcomes_of(run: Run, which: str, option: str) -> list[Outcome]:
    """The runs of a model and an option that have a result."""
    return [o for o in run.groups[which] if o.case.arguments["option"] == option and o.result is not None]


def values(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """A result of each run; ``loss`` is the mean of the last tenth of the steps."""
    results = [outcome.result or {} for outcome in outcomes]
    if name == "loss":
        return [statistics.fmean(result["losses"][-max(1, len(result["losses"]) // 10) :]) for result in results]
    return [result[name] for result in results]


def compared(which: str) -> dict[str, str]:
    """The results that are compared: their names and titles."""
    found = {"loss": "loss at the end", "held_out_loss": "held-out loss"}
    return found | ({"recall": f"recall@{RECALL_AT}"} if which == "encoder" else {})


def report(run: Run) -> list[str]:
    """Two tables for each model: results at the end of training, and losses over the steps."""
    settings, sections = run.settings, [WORDS]
    size = max(1, settings.steps // CURVE)
    for which in settings.models:
        rows, curves = [], []
        for option in settings.options:
            outcomes = outcomes_of(run, which, option)
            if len(outcomes) < 2:
                continue
            stored = (values(outcomes, name)[0] for name in ("weight_bytes", "state_bytes", "gradient_bytes"))
            cells = [f"{nbytes / values(outcomes, 'parameters')[0]:.2f}" for nbytes in stored]
            for name in compared(which):
                each = values(outcomes, name)
                cells.append(f"{statistics.fmean(each):.4f} ± {statistics.stdev(each):.4f}")
            rows.append([option, *cells])
            losses = [statistics.fmean(step) for step in zip(*values(outcomes, "losses"), strict=True)]
            means = [statistics.fmean(losses[k : k + size]) for k in range(0, size * CURVE, size) if k < len(losses)]
            curves.append([option, *(f"{mean:.3f}" for mean in means)])
        titles = ["", "weights B", "states B", "gradients B", *compared(which).values()]
        sections += [f"## {which}", markdown_table(titles, rows)]
        ends = [f"to {min(k + size, settings.steps)}" for k in range(0, size * CURVE, size) if k < settings.steps]
        sections += ["Loss, the mean of the seeds and of the steps", markdown_table(["", *ends], curves)]
        slowest = max((o.result["step_seconds"] for o in run.groups[which] if o.result is not None), default=0.0)
        sections.append(f"{settings.steps} steps, of {slowest:.2f} s in the slowest run (median of its steps).")
    return sections


def curves(run: Run) -> dict[str, dict[str, list[list[Point]]]]:
    """Losses of each model, and recall of the encoder, as (step, value): a curve for each seed of each option."""
    size = max(1, run.settings.steps // SMOOTHED)

    def smoothed(losses: list[float]) -> list[Point]:
        parts = [losses[k : k + size] for k in range(0, len(losses) - size + 1, size)]
        return [(k * size + (size + 1) / 2, statistics.fmean(part)) for k, part in enumerate(parts)]

    found: dict[str, dict[str, list[list[Point]]]] = {}
    for which in run.settings.models:
        done = {option: outcomes_of(run, which, option) for option in run.settings.options}
        found[f"{which}: loss"] = {
            option: [smoothed(o.result["losses"]) for o in each] for option, each in done.items()
        }
        if which == "encoder":
            recalls = {
                option: [[tuple(point) for point in o.result["recalls"]] for o in each] for option, each in done.items()
            }
            found[f"{which}: {compared(which)['recall']}"] = recalls
    return found


def bounds(run: Run) -> list[str]:
    """Each mean is within twice the spread of the seeds of exact training, or within a tenth."""
    broken = []
    for which in run.settings.models:
        for name, title in compared(which).items():
            exact = values(outcomes_of(run, which, EXACT), name)
            mean, allowed = statistics.fmean(exact), SPREADS * statistics.stdev(exact)
            for option in run.settings.options:
                other = statistics.fmean(values(outcomes_of(run, which, option), name))
                if not abs(other - mean) <= max(allowed, SHARE * abs(mean)):
                    broken.append(f"{which}, {option}: the {title} is {other:.4f}, in exact training {mean:.4f}")
    return broken


BENCHMARK = Benchmark(
    Settings, measure, report, bounds, curves=lambda run: (EXACT, curves(run)), rates=lambda settings: {"threads": 1}
)
