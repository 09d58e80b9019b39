"""The output of a run: tables on the screen, and with ``--out STEM`` a page, a results file and a picture.

Page and results file are written whatever the outcome; the picture only where the report has one. A results file that
is replaced is read first: the page shows how far each ratio moved (:mod:`benchmarks.harness.compare`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Facts, Report, Run, report_of, write_lines
from benchmarks.harness.files import cache_directory, write_whole
from benchmarks.harness.plot import draw
from benchmarks.harness.settings import add_options, settings_of


def add_arguments(parser: argparse.ArgumentParser, benchmark: Benchmark[Any]) -> None:
    """The options of the benchmark, and those of every benchmark."""
    add_options(parser, benchmark.settings)
    parser.add_argument("--out", type=Path, metavar="STEM", help="writes STEM.md, STEM.jsonl and STEM.png")
    parser.add_argument(
        "--against", type=Path, metavar="FILE.jsonl", help="an earlier run; ratios must be within 10 %% of its"
    )
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk for all files")


def run_benchmark(name: str, summary: str, benchmark: Benchmark[Any], arguments: argparse.Namespace) -> int:
    """Runs a benchmark as its arguments say; the exit status: 0 if all bounds hold, else 1.

    Raises:
        ValueError: if the settings make no run possible.
    """
    settings = settings_of(benchmark.settings, vars(arguments))
    run = benchmark.measure(settings, arguments.home)
    return publish(name, summary, benchmark, run, out=arguments.out, against=arguments.against)


def publish(
    name: str,
    summary: str,
    benchmark: Benchmark[Any],
    run: Run[Any],
    *,
    out: Path | None = None,
    against: Path | None = None,
    again: bool = False,
) -> int:
    """Prints the report of a run and writes its files beside ``out``; the exit status.

    ``against`` is the results file of an earlier run, whose ratios must not have moved. ``again``: the report is made
    from a results file, and none is written.
    """
    report = report_of(benchmark, run)
    results = out and out.with_name(f"{out.name}.jsonl")
    compared = against or (None if again else results)
    earlier = benchmark.earlier(compared) if compared else None
    assert report.ratios is not None
    if earlier is not None:
        unlike = earlier.why_not(run.environment, run.settings, report.ratios)
        report.sections.append(unlike or earlier.table(report.ratios))
        if against:  # a file that is replaced is only shown
            report.broken += [unlike] if unlike else earlier.broken(report.ratios)
    elif against:
        report.broken.append(f"{against.name}: holds no ratios of an earlier run")
    print("\n" + "\n\n".join(filter(None, report.sections)) + "\n")
    if out is not None and results is not None:
        if not again:
            print(f"results in {write_lines(results, name, run, report.ratios)}")
        _write_page(out, name, summary, run, report)
    print("\n".join(report.broken) or "all bounds hold", file=sys.stderr if report.broken else sys.stdout)
    return 1 if report.broken else 0


def _write_page(out: Path, name: str, summary: str, run: Run[Any], report: Report) -> None:
    picture = None
    if report.panels:
        picture = draw(out.with_name(f"{out.name}.png"), summary, report.panels, run.environment)
        print(f"picture in {picture}")
    verdict = "".join(f"* does not hold: {line}\n" for line in report.broken) or "All bounds hold."
    facts = [*run.environment.facts(), *run.facts, ("limits", run.limits.line())]
    page = markdown_page(name, summary, facts, [*report.sections, verdict.rstrip()], picture.name if picture else None)
    path = write_whole(out.with_name(f"{out.name}.md"), lambda temporary: temporary.write_text(page, encoding="utf-8"))
    print(f"page in {path}")


def markdown_page(name: str, summary: str, facts: Facts, sections: Sequence[str], picture: str | None = None) -> str:
    """A page that can be read on its own: the question, the machine, the tables, the picture."""
    rows = [f"| {fact} | {'`' + words + '`' if fact == 'command' else words} |" for fact, words in facts]
    blocks = [f"# {name}", summary[:1].upper() + summary[1:], "\n".join(["| | |", "|---|---|", *rows]), *sections]
    if picture is not None:
        blocks.append(f"![{name}]({picture})")
    return "\n\n".join(filter(None, blocks)) + "\n"
