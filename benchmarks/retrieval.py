"""``retrieval``: trains a text encoder on a contrastive batch that does not fit, in less memory, to the same losses.

Three methods from one seed, a step of each in a round: the whole batch in memory; GradCache in memory; GradCache over
an OffloadModel on disk. Then the same three under a hard memory cap, midway between what the last one needed and the
least that the others did: there only the last one trains.

Every case has a cap, so that one that does not fit ends with an error of its own; without another it is what the
machine has left.
"""

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import FLOOR, Case, Outcome
from benchmarks.harness.io_counters import counts_of
from benchmarks.harness.memory import cap_memory
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, markdown_table, mebibytes, spread
from benchmarks.harness.worker import Reporter
from benchmarks.models.contrastive import GRADCACHE, WHOLE, Texts, contrastive_loss
from benchmarks.models.corpus import Corpus, Pair, build_corpus, tokens_of
from benchmarks.models.dropout import row_keys
from benchmarks.models.methods import DISK, METHODS, RESIDENT, take_turns

OURS = "gradcache-offload"
LENGTHS = (12, 28)  # tokens of a description and of a source
PAIRS_SEEN = 480  # by default: larger batches take fewer steps
#: Of each: how it is trained, with which arguments, and how a batch goes through the model.
WAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "whole": (RESIDENT, {"checkpointed": False}, WHOLE),
    "gradcache": (RESIDENT, {"checkpointed": False}, GRADCACHE),
    OURS: (DISK, {}, GRADCACHE),
}
NAMES = {"whole": "whole batch", "gradcache": "GradCache", OURS: "GradCache + offload"}
TOKENS = Path("tokens.pt")  # a case works in the folder of the run
TOLERANCE = 1e-4  # of losses
# Freed blocks are returned at once, in every case: else peaks and cap would depend on what each heap keeps.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_ARENA_MAX": "1"}


RECALL_AT = 10


@dataclass(frozen=True)
class Settings:
    """The sizes of a run. Rows are pairs; every row is a description and a source."""

    dim: int = option(512, "channels of the encoder", multiple=64)
    depth: int = option(6, "transformer blocks")
    batch: int = option(48, "pairs in a batch", least=2)
    chunk: int = option(8, "rows in a GradCache chunk")
    steps: int | None = option(None, f"training steps; by default as many as see {PAIRS_SEEN} pairs", kind=int)
    seed: int = option(0, "of parameters, batches and dropout", least=0)
    memory: str = option("128MiB", "of the OffloadModel and its steps, in one process", kind=str)
    vocabulary: int = option(4096, "hashes of words", least=2)
    pairs: int = option(12_000, "of the corpus, training and held-out together")
    held_out: int = option(256, "held-out pairs to search, from modules that are not trained on")
    dropout: float = option(0.1, "probability", least=0)
    learning_rate: float = option(1e-4, "of AdamW", least=0)
    loss_rows: int = option(512, "rows of the batch whose scores exist at a time, with GradCache")
    methods: tuple[str, ...] = option(tuple(WAYS), "which methods to run", choices=tuple(WAYS))
    capped_steps: int = option(2, "steps under the cap; 0: no such cases", least=0)

    @property
    def training_steps(self) -> int:
        """Training steps of each method."""
        return max(2, PAIRS_SEEN // self.batch) if self.steps is None else self.steps


def measure(run: Run) -> None:
    """Free, and capped if a cap can be named."""
    settings = run.settings
    corpus = build_corpus(pairs=settings.pairs)
    run.facts["corpus"] = (
        f"{len(corpus.training):,} pairs to train on, {len(corpus.held_out):,} from held-out modules, "
        f"{corpus.modules_read:,} modules"
    )
    write_tokens(corpus, settings, run.folder / TOKENS)

    def case(method: str, suffix: str, cap_bytes: int | None) -> Case:
        how = {"method": method, "settings": asdict(settings), "cap_bytes": cap_bytes, "evaluate": not suffix}
        target = "benchmarks.retrieval:train"
        dies = method != OURS  # a method in memory that finds none is an answer
        return Case(NAMES[method] + suffix, target, how, GIVE_BACK, may_lack_memory=dies)

    cases = [case(method, "", None) for method in settings.methods]
    cap_bytes = midway(run.group("free", cases, "rounds", turns=settings.training_steps))
    if settings.capped_steps and cap_bytes is not None:
        methods = [method for method in WAYS if method == OURS or method in settings.methods]
        capped = [case(method, ", capped", cap_bytes) for method in methods]
        run.group("capped", capped, turns=min(settings.capped_steps, settings.training_steps))


def report(run: Run) -> list[str]:
    """What the methods need, and what happened under the cap."""
    free, settings = run.groups["free"], run.settings
    done = [outcome for outcome in free if outcome.result is not None]

    def change(kind: str, show: Callable[[float], str]) -> Callable[[Outcome], str]:
        """Before and after the training, of held-out pairs."""
        return lambda o: " -> ".join(
            show(o.result[when][kind]) if kind in o.result[when] else "-" for when in ("before", "after")
        )

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
            f"{parameters / 1e6:.1f} M parameters, {settings.batch * sum(LENGTHS):,} tokens a step, chunks of "
            f"{settings.chunk} rows. The interpreter and torch alone hold {mebibytes(done[0].moments[FLOOR])}. Loss "
            f"and recall are of {held_out} held-out pairs, untrained and after {len(done[0].steps)} steps; "
            f"chance finds {RECALL_AT / held_out:.1%}. Time ratios are those of steps in turn: median (least to "
            "greatest)."
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


def _cap_table(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for outcome in outcomes:
        losses = outcome.values("loss")
        died = f"died in step {len(losses) + 1}, as intended" if outcome.lacked_memory else outcome.reason
        shown = ", ".join(f"{loss:.4f}" for loss in losses) if not died else "-"
        rows.append([outcome.name, died or f"trained {len(losses)} steps", shown, mebibytes(outcome.peak_bytes)])
    words = (
        f"Under a hard cap of {mebibytes(outcomes[0].case.arguments['cap_bytes'])} of private memory (`RLIMIT_DATA`, "
        "which also counts what is mapped and not used):"
    )
    return f"{words}\n\n{markdown_table(['method', 'outcome', 'losses of the batches', 'memory held'], rows)}"


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

# --- cases -----------------------------------------------------------------------------------------------------------

EVALUATION_ROWS = 32  # few: an evaluation must not set the peak that is reported for training


def write_tokens(corpus: Corpus, settings: Settings, path: Path) -> None:
    """Writes both sides of the corpus as tokens, so that all cases see the same rows.

    Raises:
        ValueError: if there are fewer training pairs than rows in a batch.
    """
    if len(corpus.training) < settings.batch:
        raise ValueError(
            f"expected at least batch={settings.batch} training pairs, got {len(corpus.training)}; use a smaller batch"
        )
    # Spread over the modules: the first ones of a corpus would be few modules with many pairs each.
    count = min(settings.held_out, len(corpus.held_out))
    spread_out = torch.linspace(0, len(corpus.held_out) - 1, count).long().tolist()

    def both(pairs: Sequence[Pair]) -> list[Tensor]:
        texts = ([pair.description for pair in pairs], [pair.source for pair in pairs])
        return [tokens_of(side, length, settings.vocabulary) for side, length in zip(texts, LENGTHS, strict=True)]

    held_out = [corpus.held_out[k] for k in spread_out]
    torch.save({"training": both(corpus.training), "held_out": both(held_out)}, path)


class Batches:
    """Rows for an encoder: int64, the row's dropout key in column 0, then its tokens."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._sides = torch.load(path, mmap=True)
        self._settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        self._order = torch.randperm(len(self._sides["training"][0]), generator=generator)

    def training(self, step: int) -> tuple[Tensor, ...]:
        """Descriptions and sources of one step's pairs; no pair is used twice before all were used once."""
        rows, seed = self._settings.batch, self._settings.seed
        chosen = self._order[torch.arange(step * rows, (step + 1) * rows) % len(self._order)]
        sides = enumerate(self._sides["training"])
        return tuple(_rows(side[chosen], row_keys(seed, step, k, rows)) for k, side in sides)

    def held_out(self) -> tuple[Tensor, ...]:
        """Descriptions and sources of all held-out pairs; evaluation does not use their keys."""
        return tuple(_rows(side, torch.zeros(len(side), dtype=torch.int64)) for side in self._sides["held_out"])


def _rows(tokens: Tensor, keys: Tensor) -> Tensor:
    return torch.cat([keys[:, None], tokens.long()], dim=1)


def train(
    report: Reporter, method: str, settings: dict[str, Any], cap_bytes: int | None, evaluate: bool
) -> dict[str, Any]:
    """One case: a step of training in each turn, under a cap of private memory from the beginning.

    None: under a cap of what the machine has left.
    """
    importlib.import_module("torch._dynamo")  # every torch optimizer imports it: a part of what torch alone takes
    report.phase(FLOOR)
    cap_memory(cap_bytes or int(0.9 * psutil.virtual_memory().available))  # the rest is for others
    chosen = Settings(**settings)
    batches = Batches(TOKENS, chosen)
    name, how, way = WAYS[method]
    function, options = METHODS[name]
    sizes = {"blocks": chosen.depth, "dim": chosen.dim, "rows": chosen.batch, "positions": max(LENGTHS)}
    sizes |= {"dropout": chosen.dropout, "seed": chosen.seed, "chunk": chosen.chunk, "tile_rows": chosen.loss_rows}
    how = {**how, "memory": chosen.memory} if method == OURS else how
    rate = chosen.learning_rate
    texts = Texts(**sizes, learning_rate=rate, max_norm=None, way=way, symmetric=True, vocabulary=chosen.vocabulary)
    made = function(texts, Path("home"), None, **options, **how)
    before = search(made.run, *batches.held_out()) if evaluate else None
    report.phase("training")
    take_turns(report, made, batches.training)
    report.phase("evaluation")
    return {
        "parameters": sum(parameter.numel() for _, parameter in made.parameters()),
        "before": before,
        "after": search(made.run, *batches.held_out()) if evaluate else None,
        "held_out": len(batches.held_out()[0]),
        "statistics": counts_of(made.model) or None,
    }


@torch.no_grad()
def search(model: nn.Module, descriptions: Tensor, sources: Tensor, at: int = RECALL_AT) -> dict[str, float]:
    """The loss over all rows, and the share of descriptions whose own source is among the ``at`` nearest of all.

    Chance finds ``at / rows``. A source that is as near as the right one counts against it, and so does a score that is
    not a number.
    """
    was_training = model.training
    model.eval()
    try:
        sides = [torch.cat([model(part) for part in side.split(EVALUATION_ROWS)]) for side in (descriptions, sources)]
    finally:
        model.train(was_training)
    scores = sides[0] @ sides[1].T
    further = (scores < scores.diagonal()[:, None]).sum(dim=1)
    found = (further >= len(scores) - at).double().mean()
    both = (contrastive_loss(*sides) + contrastive_loss(*sides[::-1])) / 2
    return {"loss": both.item(), "recall": found.item()}
