"""Does a contrastive batch that does not fit train the same in less memory, and at what price in time?

Three rungs from one seed: the whole batch in memory; GradCache in memory; GradCache over an OffloadModel whose home is
on disk. The answer is a table, a picture, and one thing that must hold: at no step do the rungs' losses differ by more
than :data:`TOLERANCE`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks.frame.cache import cache_directory
from benchmarks.frame.environment import filesystem_of, here
from benchmarks.frame.report import write_json_lines
from benchmarks.frame.rungs import Outcome, Rung, run_rungs
from benchmarks.retrieval.batches import write_tokens
from benchmarks.retrieval.corpus import build_corpus
from benchmarks.retrieval.results import TOLERANCE, draw, greatest_difference, table
from benchmarks.retrieval.settings import Settings
from benchmarks.retrieval.training import WAYS

__all__ = ["add_arguments", "run", "verdict"]

NAMES = {"whole": "whole batch", "gradcache": "GradCache", "gradcache-offload": "GradCache + offload"}
OPTIONS = {
    "dim": "channels of the encoder, a multiple of 64",
    "depth": "transformer blocks",
    "batch": "pairs in a batch",
    "chunk": "rows in a GradCache chunk",
    "steps": "training steps",
    "seed": "of parameters, batches and dropout",
    "slices": "shards of the OffloadModel",
    "vocabulary": "tokens of the BPE",
    "held_out": "held-out pairs to search, from modules that are not trained on",
    "dropout": "probability",
    "learning_rate": "of AdamW, after the warm-up",
    "boundary_bytes": "of activations between shards that stay in memory; the others rest on disk",
    "activation_bytes": "of activations inside a shard: over an OffloadModel chunks run together up to this",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes in :class:`Settings`, which rungs to run, and where homes are."""
    defaults = {field.name: field.default for field in fields(Settings)}
    for name, meaning in OPTIONS.items():
        flag, default = "--" + name.replace("_", "-"), defaults[name]
        parser.add_argument(flag, type=type(default), default=default, metavar="N", help=meaning)
    parser.add_argument("--rungs", nargs="+", choices=list(WAYS), default=list(WAYS), help="which ways to run")
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk for the shards")
    parser.set_defaults(plot=Path("retrieval.png"))


def run(arguments: argparse.Namespace) -> int:
    """Prepares the data, runs the rungs, and prints the table; 0 if all ran and their losses agree."""
    settings = Settings(**{name: getattr(arguments, name) for name in OPTIONS})
    environment = here()
    print("\n".join(environment.lines()))
    arguments.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="retrieval-", dir=arguments.home) as folder:
        print(f"homes    {folder} ({_kind(Path(folder))})", flush=True)
        corpus = build_corpus(pairs=settings.pairs)
        tokens = write_tokens(corpus, settings, Path(folder, "tokens.npz"))
        print(
            f"corpus   {len(corpus.training):,} pairs to train on, {len(corpus.held_out):,} from held-out modules, "
            f"{corpus.modules_read:,} modules",
            flush=True,
        )
        outcomes = run_rungs(_rung(way, settings, tokens, Path(folder)) for way in arguments.rungs)
    print("\n" + table(outcomes, settings) + "\n")
    if arguments.json:
        print(f"rungs in {write_json_lines(arguments.json, environment, outcomes)}")
    if arguments.plot and any(outcome.result for outcome in outcomes):
        print(f"picture in {draw(arguments.plot, outcomes, settings, environment)}")
    return verdict(outcomes)


def _rung(way: str, settings: Settings, tokens: Path, folder: Path) -> Rung:
    home = folder / way
    home.mkdir()
    arguments = {"way": way, "settings": asdict(settings), "tokens": str(tokens), "home": str(home)}
    return Rung(NAMES[way], "benchmarks.retrieval.training:train", arguments)


def _kind(folder: Path) -> str:
    kind = filesystem_of(folder)
    return f"{kind}: that is memory, name a disk with --home" if kind in ("tmpfs", "ramfs") else kind


def verdict(outcomes: Sequence[Outcome]) -> int:
    """Says in one line whether what must hold does."""
    failed = [f"{outcome.rung.name}: {outcome.failure}" for outcome in outcomes if outcome.failure is not None]
    difference = greatest_difference(outcomes)
    if difference is not None:
        steps = min(len(outcome.steps) for outcome in outcomes if outcome.result)
        print(f"greatest difference between the rungs' losses over {steps} steps: {difference:.1e}")
        if not difference <= TOLERANCE:  # also where it is not a number
            failed.append(f"losses must agree to {TOLERANCE:.0e}")
    if failed:
        print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0
