"""``python -m benchmarks`` lists the benchmarks and commands; ``python -m benchmarks NAME [--out STEM]`` runs one."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import claims
from benchmarks.harness.peers import MissingExtraError
from benchmarks.registry import BENCHMARKS, find


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
    """Prints the table of claims."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks table", description=claims.__doc__)
    parser.add_argument("--results", type=Path, default=claims.RESULTS, metavar="DIR", help="where the JSON lines are")
    parser.add_argument("--links", default="benchmarks/results/", metavar="PREFIX", help="what each link begins with")
    arguments = parser.parse_args(words)
    print(claims.claims_table(arguments.results, arguments.links))
    return 0


def _report(words: Sequence[str]) -> int:
    """Makes a report again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description="Makes a report again.")
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="what --out wrote")
    parser.add_argument("--out", type=Path, metavar="STEM", help="writes STEM.md and STEM.png")
    arguments = parser.parse_args(words)
    entry = find(claims.benchmark_of(claims.read_lines(arguments.file)[0]))
    benchmark = entry.load()
    from benchmarks.harness.report import publish

    return publish(entry.name, entry.summary, benchmark, benchmark.read(arguments.file), out=arguments.out, again=True)


if __name__ == "__main__":
    # A termination is an exception like Ctrl-C: the processes of cases end, and their files are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
