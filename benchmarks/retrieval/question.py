"""Does a contrastive batch that does not fit train the same in less memory, and at what price in time?

Three rungs from one seed, a step of each in turn: the whole batch in memory; GradCache in memory; GradCache over an
OffloadModel whose home is on disk. Then the same three again under a hard cap on memory, midway between what the last
one needed and the least that the others did. The answer is tables, a picture, and what must hold: at no step do the
rungs' losses differ by more than :data:`TOLERANCE`, and under the cap the last one trains to the same losses while the
others find no memory.

With ``--batches`` the last one alone trains on batches of several sizes: see :mod:`benchmarks.retrieval.batch_sizes`.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks.frame.cache import cache_directory
from benchmarks.frame.cap import available_bytes
from benchmarks.frame.environment import filesystem_of, here
from benchmarks.frame.limits import measure_limits
from benchmarks.frame.pairs import run_in_turn
from benchmarks.frame.report import publish
from benchmarks.frame.rungs import Outcome, Rung, run_rungs
from benchmarks.retrieval.batch_sizes import BatchSizes
from benchmarks.retrieval.batches import write_tokens
from benchmarks.retrieval.cap import broken_cap, cap_table, died_of_memory, midway
from benchmarks.retrieval.corpus import Corpus, build_corpus
from benchmarks.retrieval.results import TOLERANCE, draw, greatest_difference, table
from benchmarks.retrieval.settings import Settings
from benchmarks.retrieval.training import WAYS

__all__ = ["add_arguments", "broken_bounds", "run"]

OURS = "gradcache-offload"
NAMES = {"whole": "whole batch", "gradcache": "GradCache", OURS: "GradCache + offload"}
PAIRS_SEEN = 768  # unless --steps says otherwise: larger batches take fewer steps
MINIMUM_STEPS = 2
# Freed blocks go back at once, in every rung: else the heap of each keeps another share of what it once held, and both
# the peaks and the cap would be about that.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_ARENA_MAX": "1"}
OPTIONS = {
    "dim": "channels of the encoder, a multiple of 64",
    "depth": "transformer blocks",
    "batch": "pairs in a batch",
    "chunk": "rows in a GradCache chunk",
    "seed": "of parameters, batches and dropout",
    "slices": "shards of the OffloadModel",
    "vocabulary": "tokens of the BPE",
    "pairs": "of the corpus, training and held-out together",
    "held_out": "held-out pairs to search, from modules that are not trained on",
    "dropout": "probability",
    "learning_rate": "of AdamW, after the warm-up",
    "boundary_bytes": "of activations between shards that stay in memory; the others rest on disk",
    "activation_bytes": "of activations inside a shard: over an OffloadModel chunks run together up to this",
    "loss_rows": "of the batch whose scores exist at a time, with GradCache",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes in :class:`Settings`, which rungs to run, and where homes are."""
    defaults = {field.name: field.default for field in fields(Settings)}
    for name, meaning in OPTIONS.items():
        flag, default = "--" + name.replace("_", "-"), defaults[name]
        parser.add_argument(flag, type=type(default), default=default, metavar="N", help=meaning)
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"training steps; by default as many as see {PAIRS_SEEN} pairs"
    )
    parser.add_argument("--rungs", nargs="+", choices=list(WAYS), default=list(WAYS), help="which ways to run")
    parser.add_argument("--cap", type=float, metavar="MIB", help="of the capped rungs; midway of what was needed")
    parser.add_argument(
        "--capped-steps", type=int, default=4, metavar="N", help="steps under the cap; 0: no such rungs"
    )
    parser.add_argument("--batches", type=int, nargs="+", metavar="N", help="recall over these batch sizes instead")
    parser.add_argument("--examples", type=int, default=16_384, metavar="N", help="pairs seen by each of --batches")
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk for the shards")
    parser.set_defaults(plot=Path("retrieval.png"))


def run(arguments: argparse.Namespace) -> int:
    """Prepares the data, runs the rungs, and prints the tables; 0 if what must hold did."""
    sizes = {name: getattr(arguments, name) for name in OPTIONS}
    steps = arguments.steps
    if steps is None:
        steps = max(MINIMUM_STEPS, PAIRS_SEEN // max(arguments.batch, 1))
    settings = Settings(**sizes, steps=steps)
    wanted = BatchSizes(arguments.batches, arguments.examples, settings) if arguments.batches else None
    if arguments.out:
        arguments.plot = None  # it goes with the others
    environment = here()
    print("\n".join(environment.lines()))
    arguments.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="retrieval-", dir=arguments.home) as folder:
        print(f"homes    {folder} ({_kind(Path(folder))})", flush=True)
        limits = measure_limits(Path(folder))
        print(f"limits   {limits.line()}", flush=True)
        corpus = build_corpus(pairs=settings.pairs)
        tokens = write_tokens(corpus, wanted.largest if wanted else settings, Path(folder, "tokens.npz"))
        facts = [("homes", f"a directory on {_kind(arguments.home)}"), ("corpus", _words(corpus))]
        print(f"corpus   {_words(corpus)}", flush=True)

        def rung(way: str, chosen: Settings, **options: object) -> Rung:
            home = Path(tempfile.mkdtemp(prefix=f"{way}-", dir=folder))
            ordered = {"way": way, "settings": asdict(chosen), "tokens": str(tokens), "home": str(home), **options}
            name = NAMES[way] if wanted is None else f"{chosen.batch:,} pairs"
            name += ", capped" if "only_steps" in options else ""
            return Rung(name, "benchmarks.retrieval.training:train", ordered, GIVE_BACK)

        if wanted is not None:
            sizes_alone = [
                (rung(OURS, chosen, cap_bytes=available_bytes()), chosen.steps) for chosen in wanted.settings
            ]
            outcomes = [run_rungs([alone], turns=count)[0] for alone, count in sizes_alone]
            return wanted.publish(arguments, environment, outcomes, facts, limits)
        rungs = [rung(way, settings, cap_bytes=available_bytes()) for way in arguments.rungs]
        free = dict(zip(arguments.rungs, run_in_turn(rungs, settings.steps), strict=True))
        cap_bytes = _cap_bytes(arguments, free)
        capped: dict[str, Outcome] = {}
        if cap_bytes is not None:
            options = {"cap_bytes": cap_bytes, "only_steps": arguments.capped_steps}
            names = [way for way in NAMES if way == OURS or way in free]
            print(f"now under a cap of {cap_bytes / 2**20:,.0f} MiB", flush=True)
            ordered = [rung(way, settings, **options) for way in names]
            capped = dict(zip(names, run_rungs(ordered, turns=arguments.capped_steps), strict=True))
    outcomes = list(free.values())
    sections = [table(outcomes, settings, limits)]
    if cap_bytes is not None:
        sections.append(cap_table(list(capped.values()), cap_bytes))
    elif arguments.capped_steps:
        sections.append(f"No rungs under a cap: it would lie between {NAMES[OURS]} and others that need more.")
    difference = greatest_difference(outcomes)
    if difference is not None:
        sections.append(f"Greatest difference between the rungs' losses at any step: {difference:.1e}.")
    return publish(
        arguments,
        environment,
        sections=sections,
        outcomes=[*outcomes, *capped.values()],
        broken=broken_bounds(free, capped),
        draw=lambda path: draw(path, outcomes, settings, environment),
        facts=facts,
        limits=limits,
        may_fail=[outcome for outcome in (*outcomes, *capped.values()) if any(other.result for other in outcomes)],
    )


def _cap_bytes(arguments: argparse.Namespace, free: dict[str, Outcome]) -> int | None:
    """Of the capped rungs; None where there are none."""
    if arguments.capped_steps < 1:
        return None
    if arguments.cap is not None:
        return int(arguments.cap * 2**20)
    others = [outcome for way, outcome in free.items() if way != OURS]
    return midway(free[OURS], others) if OURS in free else None


def broken_bounds(free: dict[str, Outcome], capped: dict[str, Outcome]) -> list[str]:
    """What must hold and does not, one line each. That a rung in memory finds none is an answer, not a failure."""
    broken = [
        f"{outcome.rung.name}: {outcome.failure}"
        for way, outcome in free.items()
        if outcome.failure is not None and (way == OURS or not died_of_memory(outcome))
    ]
    difference = greatest_difference(list(free.values()))
    if difference is not None and not difference <= TOLERANCE:  # also where it is not a number
        broken.append(f"losses must agree to {TOLERANCE:.0e}, they differ by {difference:.1e}")
    if capped:
        others = [outcome for way, outcome in capped.items() if way != OURS]
        broken += broken_cap(capped[OURS], others, free.get(OURS), TOLERANCE)
    return broken


def _words(corpus: Corpus) -> str:
    return (
        f"{len(corpus.training):,} pairs to train on, {len(corpus.held_out):,} from held-out modules, "
        f"{corpus.modules_read:,} modules"
    )


def _kind(folder: Path) -> str:
    kind = filesystem_of(folder)
    return f"{kind}: that is memory, name a disk with --home" if kind in ("tmpfs", "ramfs") else kind
