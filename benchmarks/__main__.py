"""``python -m benchmarks`` lists the benchmarks and commands; ``python -m benchmarks NAME [--out STEM]`` runs one."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness.benchmark import Benchmark

RESULTS = Path(__file__).resolve().parent / "results"
BENCHMARKS = {  # name -> the question
    "memory-latency": "what each setting, and what others offer, saves in memory and costs in time",
    "retrieval": "train a text encoder on a contrastive batch three ways: what memory, what time, and the same losses?",
    "optimizer": "clipping and AdamW with parameters, gradients and moments on disk: at what cost in time and memory?",
    "build-huge": "under a memory cap, can a process build, load and train a model whose parameters exceed the cap?",
    "train-overlap": "with a slow loader, slow embedding rows and compute: how near is a step to its slowest part?",
    "pipe-ladder": "beside torchgpipe and fairscale, what do time and memory of our pipe come to?",
    "gradcache-batch": "how large may an exact contrastive batch be in fixed memory, and what do its chunks cost?",
    "qwen-embedding": "train the architecture of Qwen3-Embedding-0.6B under a memory cap: who can, and in what time?",
    "mesh": "several ranks train one model, beside FSDP2 and DeepSpeed: memory of a rank, time, bytes from others?",
    "host-time": "what does the host do beside layers: Python calls a block, and processor time?",
    "gpu": "on a GPU: CUDA tests; training beside plain torch and peers: memory, time, and what does a step wait for?",
}
#: Pages with claims, in the order of their table in benchmarks/results/README.md.
CLAIMED = ["optimizer-billion", "optimizer", "build-huge", "qwen-embedding", "memory-latency", "retrieval"]
CLAIMED += ["gradcache-batch", "pipe-ladder", "train-overlap", "gpu-qwen3", "gpu-blocks"]


def load(name: str) -> Benchmark:
    """Imports one benchmark: each needs torch, and some need the extra ``bench``.

    Raises:
        ValueError: if there is none of that name, or a package that it needs is not installed.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"expected one of {', '.join(BENCHMARKS)}, got {name!r}")
    try:
        if name == "memory-latency":  # whose page has a picture
            importlib.import_module("matplotlib")
    except ImportError as error:
        install = "python -m pip install 'gradstream[bench]'  (in a clone: python -m pip install -e '.[bench]')"
        raise ValueError(f"{error}; run: {install}") from error
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{name.replace('-', '_')}").BENCHMARK
    return benchmark


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if all bounds hold, 1 if one does not, 2 if nothing could be run as asked."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if name in ("-h", "--help"):
            print("usage: python -m benchmarks NAME [--out STEM] [options]\n")
            print("\n".join(f"  {name:<15}  {question}" for name, question in BENCHMARKS.items()))
            print("\npython -m benchmarks NAME --help shows the options of one.")
            print("python -m benchmarks table prints the table of claims from benchmarks/results/*.jsonl.")
            print("python -m benchmarks report FILE.jsonl [STEM] makes the page of a run again.")
        elif name == "table":
            print(claims_table())
        else:
            return _report(*words) if name == "report" and words else _run(name, words)
    except ValueError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


def parser_of(name: str) -> argparse.ArgumentParser:
    """The options of a benchmark, and those of every benchmark."""
    from benchmarks.harness.environment import cache_directory
    from benchmarks.harness.settings import add_options

    parser = argparse.ArgumentParser(f"python -m benchmarks {name}", description=BENCHMARKS.get(name))
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add_options(parser, load(name).settings)
    parser.add_argument("--out", type=Path, metavar="STEM", help="writes STEM.md, STEM.jsonl and STEM.png")
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk for all files")
    return parser


def _run(name: str, words: Sequence[str]) -> int:
    """Runs one benchmark. The results file is written after each case: the page can be made again from it."""
    benchmark = load(name)
    arguments = parser_of(name).parse_args(words)
    from benchmarks.harness.benchmark import Run, publish, run_benchmark, write_lines

    def save(run: Run) -> None:
        if arguments.out:
            write_lines(arguments.out.with_name(f"{arguments.out.name}.jsonl"), name, run)

    run = run_benchmark(benchmark, vars(arguments), arguments.home, save)
    save(run)
    return publish(name, BENCHMARKS[name], benchmark, run, arguments.out)


def _report(file: str, stem: str = "") -> int:
    """Makes the page of a run again from its results file, beside it or as ``STEM.md``."""
    from benchmarks.harness.benchmark import publish, read_header, read_run

    name = read_header(Path(file))["benchmark"]
    run = read_run(Path(file), load(name))
    return publish(name, BENCHMARKS[name], load(name), run, Path(stem or file.removesuffix(".jsonl")))


def claims_table() -> str:
    """The table of claims in Markdown: set-up, peer, time ratio with range, memory ratio, link to the page."""
    from benchmarks.harness.benchmark import read_header, read_run

    rows = [["set-up", "beside", "time, ours to theirs", "memory, ours to theirs", "results"]]
    rows.append(["---", "---", "---:", "---:", "---"])
    for page in CLAIMED:
        path = RESULTS / f"{page}.jsonl"
        benchmark = load(read_header(path)["benchmark"])
        for claim in benchmark.claims(read_run(path, benchmark)):
            rows.append([*claim.cells(), f"[{page}]({page}.md)"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    # A termination is an exception like Ctrl-C: the processes of cases end, and their files are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
