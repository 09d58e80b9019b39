"""The output of a run: tables on the screen, and with ``--out STEM`` a page, a results file and a picture.

Page and results file are written whatever the outcome; the picture only where the report has one. A results file that
is replaced is read first: the page shows how far each ratio moved between two runs of the same settings and machine.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.benchmark import Benchmark, Facts, Report, Run, write_lines
from benchmarks.harness.case import Outcome
from benchmarks.harness.claims import read_lines
from benchmarks.harness.environment import Environment
from benchmarks.harness.files import cache_directory, write_whole
from benchmarks.harness.plot import Panel, draw, ratio_panels
from benchmarks.harness.settings import add_options, settings_of
from benchmarks.harness.table import markdown_table

MAXIMUM_CHANGE = 0.10
MACHINE = ("cpu", "cores", "threads", "accelerator")  # the size of its memory differs by a few MiB


class Earlier(NamedTuple):
    """An earlier run, as the header of its results file records it."""

    environment: Environment
    settings: Any
    ratios: Mapping[str, float]

    def why_not(self, environment: Environment, settings: Any, ratios: Mapping[str, float]) -> str:
        """Why the two runs cannot be compared, in a sentence; empty where they can."""
        if any(getattr(self.environment, name) != getattr(environment, name) for name in MACHINE):
            return f"The run of {self.environment.date} was on another machine: its ratios are not compared."
        if self.settings != settings:
            return f"The run of {self.environment.date} had other settings: its ratios are not compared."
        common = self.ratios.keys() & ratios.keys()
        return "" if common else f"The run of {self.environment.date} has no ratio in common with this one."

    def changes(self, ratios: Mapping[str, float]) -> dict[str, float]:
        """The change of each common ratio, as a share of the earlier one."""
        return {name: ratios[name] / self.ratios[name] - 1 for name in ratios if name in self.ratios}

    def broken(self, ratios: Mapping[str, float]) -> list[str]:
        """A line for each ratio that moved by more than :data:`MAXIMUM_CHANGE` or is not a number."""
        moved = {name: change for name, change in self.changes(ratios).items() if not abs(change) <= MAXIMUM_CHANGE}
        words = f"must be within {MAXIMUM_CHANGE:.0%} of before, moved by"
        return [f"{name}: {words} {change:+.1%}" for name, change in moved.items()]

    def table(self, ratios: Mapping[str, float]) -> str:
        """Each ratio before and now."""
        changes = self.changes(ratios)
        greatest = max(changes, key=lambda name: abs(changes[name]))
        words = (
            f"Again: the same settings on the same machine, {self.environment.date} and now. "
            f"{len(changes) - len(self.broken(ratios))} of {len(changes)} ratios are within {MAXIMUM_CHANGE:.0%}; the "
            f"largest change is that of {greatest}, by {changes[greatest]:+.1%}."
        )
        rows = [[n, f"{self.ratios[n]:.3f}", f"{ratios[n]:.3f}", f"{change:+.1%}"] for n, change in changes.items()]
        return f"{words}\n\n{markdown_table(['ratio', 'before', 'now', 'change'], rows)}"


def read_earlier(benchmark: Benchmark[Any], path: Path) -> Earlier | None:
    """What a new run is compared with; None if the file holds no ratios."""
    try:
        header, _ = read_lines(path)
        settings = settings_of(benchmark.settings, header["settings"])
        return Earlier(Environment(**header["environment"]), settings, header["ratios"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def ratios_of(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of each case its time to the reference's and its peak to the first case's, where a benchmark names no ratios."""
    found: dict[str, float] = {}
    done = [outcome for outcome in outcomes if outcome.result is not None]
    for outcome in done:
        ratio = outcome.ratio()
        if ratio == ratio and outcome.reference is not outcome.steps:
            found.setdefault(f"{outcome.name}: time", ratio)
    for outcome in done[1:]:
        if done[0].peak_bytes and outcome.name != done[0].name:
            found.setdefault(f"{outcome.name}: peak", outcome.peak_bytes / done[0].peak_bytes)
    return found


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
    report = benchmark.report(run)
    ratios = ratios_of(run.outcomes) if report.ratios is None else report.ratios
    results = out and out.with_name(f"{out.name}.jsonl")
    compared = against or (None if again else results)
    earlier = read_earlier(benchmark, compared) if compared else None
    if earlier is not None:
        unlike = earlier.why_not(run.environment, run.settings, ratios)
        report.sections.append(unlike or earlier.table(ratios))
        if against:  # a file that is replaced is only shown
            report.broken += [unlike] if unlike else earlier.broken(ratios)
    elif against:
        report.broken.append(f"{against.name}: holds no ratios of an earlier run")
    print("\n" + "\n\n".join(filter(None, report.sections)) + "\n")
    if out is not None and results is not None:
        if not again:
            print(f"results in {write_lines(results, name, run, ratios)}")
        _write_page(out, name, summary, run, report, ratio_panels(ratios) if report.panels is None else report.panels)
    print("\n".join(report.broken) or "all bounds hold", file=sys.stderr if report.broken else sys.stdout)
    return 1 if report.broken else 0


def _write_page(out: Path, name: str, summary: str, run: Run[Any], report: Report, panels: list[Panel]) -> None:
    picture = None
    if panels:
        picture = draw(out.with_name(f"{out.name}.png"), summary, panels, run.environment)
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
