"""``python -m benchmarks`` lists the questions; ``python -m benchmarks QUESTION`` answers one."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame.extra import MissingExtraError
from benchmarks.harness import claims
from benchmarks.questions import QUESTIONS

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if what must hold held, 1 if it did not, 2 if nothing could be run as asked."""
    words = list(sys.argv[1:] if argv is None else argv)
    width = max(len(question.name) for question in QUESTIONS)
    listing = "\n".join(f"  {question.name:<{width}}  {question.summary}" for question in QUESTIONS)
    if words[:1] == ["table"]:
        return _table(words[1:])
    if not words:
        print(f"usage: python -m benchmarks QUESTION [--out STEM] [options]\n\n{listing}")
        print("\npython -m benchmarks QUESTION --help shows the options of one.")
        print("python -m benchmarks table prints the README's table of claims from benchmarks/results/*.jsonl.")
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"questions:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    # Only the question asked is imported: each one needs torch, and some need the extra ``bench``.
    asked = [question for question in QUESTIONS if question.name == words[0]]
    try:
        script = asked[0].load() if asked else None
        for question in QUESTIONS:
            sub = subparsers.add_parser(
                question.name,
                help=question.summary,
                description=question.summary,
                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            )
            if question in asked and script is not None:
                from benchmarks.frame.report import add_output_arguments  # imports torch

                add_output_arguments(sub)
                sub.set_defaults(summary=question.summary)
                script.add_arguments(sub)
        arguments = parser.parse_args(words)
        assert script is not None
        return script.run(arguments)
    except (MissingExtraError, ValueError) as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2


def _table(words: Sequence[str]) -> int:
    """Prints the table of claims."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks table", description=claims.__doc__)
    parser.add_argument("--results", type=Path, default=claims.RESULTS, metavar="DIR", help="where the JSON lines are")
    parser.add_argument("--links", default="benchmarks/results/", metavar="PREFIX", help="what each link begins with")
    arguments = parser.parse_args(words)
    print(claims.claims_table(arguments.results, arguments.links))
    return 0


if __name__ == "__main__":
    # Being told to stop is an exception like Ctrl-C: the rung's process ends, and the homes are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
