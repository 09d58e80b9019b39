"""``python -m benchmarks`` lists the benchmarks and commands; ``python -m benchmarks NAME [--out STEM]`` runs one."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from benchmarks.harness import claims
from benchmarks.harness.peers import MissingExtraError, require

if TYPE_CHECKING:
    from benchmarks.harness.benchmark import Benchmark


class Entry(NamedTuple):
    """A name for the command line, the question in one line, and further packages that the benchmark needs."""

    name: str
    summary: str
    packages: tuple[str, ...] = ()

    def load(self) -> Benchmark[Any]:
        """Imports the benchmark.

        Raises:
            MissingExtraError: if a package that it needs is not installed; before anything is measured.
        """
        for package in ("tqdm", "matplotlib", *self.packages):
            require(package)
        module = importlib.import_module(f"benchmarks.{self.name.replace('-', '_')}.benchmark")
        return cast("Benchmark[Any]", module.BENCHMARK)


_SUMMARIES = {
    "memory-latency": "what each setting, and what others offer, saves in memory and costs in time",
    "retrieval": "train a text encoder on a contrastive batch three ways: what memory, what time, and the same losses?",
    "offload-step": "what does streaming a model from disk cost in time, and does its peak grow with the shards?",
    "optimizer": "clipping and AdamW with parameters, gradients and moments on disk: at what cost in time and memory?",
    "build-huge": "under a memory cap, can a process build, load and train a model whose parameters exceed the cap?",
    "train-overlap": "with a slow loader, slow embedding rows and compute: how near is a step to its slowest part?",
    "pipe-ladder": "beside torchgpipe and fairscale, what do time, memory and bubble of our pipe come to?",
    "gradcache-batch": "how large may an exact contrastive batch be in fixed memory, and what do its chunks cost?",
    "gpu-train": "up to 7B parameters with full Adam on one GPU: what memory does each method need?",
    "gpu": "all that needs a GPU, in under ten minutes: the CUDA tests, memory-latency, gpu-train small to 7B",
}
_PACKAGES = {"retrieval": ("numpy", "tokenizers"), "build-huge": ("numpy",), "gpu": ("pytest",)}
BENCHMARKS = tuple(Entry(name, summary, _PACKAGES.get(name, ())) for name, summary in _SUMMARIES.items())


def find(name: str) -> Entry:
    """The benchmark of that name.

    Raises:
        ValueError: if there is none.
    """
    for entry in BENCHMARKS:
        if entry.name == name:
            return entry
    raise ValueError(f"expected one of {', '.join(_SUMMARIES)}, got {name!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if all bounds hold, 1 if one does not, 2 if nothing could be run as asked."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        _list()
        return 0
    try:
        if words[0] == "table":
            return _table(words[1:])
        if words[0] == "report":
            return _report(words[1:])
        return _run(*words)
    except (MissingExtraError, ValueError) as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2


def _list() -> None:
    width = max(len(entry.name) for entry in BENCHMARKS)
    print("usage: python -m benchmarks NAME [--out STEM] [options]\n")
    print("\n".join(f"  {entry.name:<{width}}  {entry.summary}" for entry in BENCHMARKS))
    print("\npython -m benchmarks NAME --help shows the options of one.")
    print("python -m benchmarks table prints the README's table of claims from benchmarks/results/*.jsonl.")
    print("python -m benchmarks report FILE.jsonl makes the report of an earlier run again.")


def _run(name: str, *words: str) -> int:
    """Runs one benchmark. Only that one is imported: each needs torch, and some need the extra ``bench``."""
    entry = find(name)
    benchmark = entry.load()
    from benchmarks.harness.report import add_arguments, run_benchmark

    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=entry.summary,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser, benchmark)
    return run_benchmark(name, entry.summary, benchmark, parser.parse_args(words))


def _table(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks table", description=claims.__doc__)
    parser.add_argument("--results", type=Path, default=claims.RESULTS, metavar="DIR", help="where the JSON lines are")
    parser.add_argument("--links", default="benchmarks/results/", metavar="PREFIX", help="what each link begins with")
    arguments = parser.parse_args(words)
    print(claims.claims_table(arguments.results, arguments.links))
    return 0


def _report(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description="Makes a report again.")
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="what --out wrote")
    parser.add_argument("--out", type=Path, metavar="STEM", help="writes STEM.md and STEM.png")
    arguments = parser.parse_args(words)
    entry = find(claims.read_lines(arguments.file)[0]["benchmark"])
    benchmark = entry.load()
    from benchmarks.harness.report import publish

    return publish(entry.name, entry.summary, benchmark, benchmark.read(arguments.file), out=arguments.out, again=True)


if __name__ == "__main__":
    # A termination is an exception like Ctrl-C: the processes of cases end, and their files are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
