"""What a benchmark declares, a run of it, and the files of a run: JSON lines, and made from them a page and a picture.

The report of a run is a function of what its JSON lines hold: it is made in the same way at once and later.
"""

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.environment import environment_facts, filesystem_of
from benchmarks.harness.plot import Point, draw
from benchmarks.harness.schedule import run_group
from benchmarks.harness.settings import settings_of


@dataclass
class Run:
    """A run: its settings, the rows of its header, and the outcomes of each group."""

    settings: Any
    facts: dict[str, str] = field(default_factory=dict)
    groups: dict[str, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    folder: Path = Path()  #: where cases work: on disk, removed at the end
    save: Callable[["Run"], None] = lambda run: None  #: called after each group

    def group(self, name: str, cases: Sequence[Case], order: str = "alone", **how: int) -> list[Outcome]:
        """Measures cases in one of the orders of :func:`benchmarks.harness.schedule.run_group`."""

        def done(outcomes: list[Outcome]) -> None:
            self.groups[name] = outcomes
            self.save(self)

        self.groups[name] = run_group(cases, self.folder, order, done=done, **how)
        self.save(self)
        return self.groups[name]

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all groups."""
        return [outcome for outcomes in self.groups.values() for outcome in outcomes]

    def find(self, name: str, group: str | None = None) -> Outcome | None:
        """The first outcome of that name, if it has a result."""
        outcomes = self.outcomes if group is None else self.groups[group]
        return next((outcome for outcome in outcomes if outcome.name == name and outcome.result is not None), None)


class Claim(NamedTuple):
    """A row of the table of claims: what was measured beside what, the ratios of times, and that of peaks."""

    set_up: str
    beside: str
    times: Sequence[float]  #: ours to theirs, of each pair of steps (or of each set-up): below 1 ours is faster
    memory: float | None = None  #: ours to theirs
    counted: str = ""  #: what a peak is counted above
    middle: Callable[[Sequence[float]], float] = statistics.median

    def cells(self) -> list[str]:
        """The cells of the row, without the link to its page."""
        time = f"{self.middle(self.times):.2f} ({min(self.times):.2f} to {max(self.times):.2f})"
        return [self.set_up, self.beside, time, "-" if self.memory is None else f"{self.memory:.2f}{self.counted}"]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: functions of a run and of its settings."""

    settings: type[Any]  #: a frozen dataclass of options; ``wrong()``, if it has that, tells why a run is impossible
    measure: Callable[[Run], None]  #: measures the groups
    report: Callable[[Run], list[str]]  #: tables and paragraphs in Markdown
    bounds: Callable[[Run], list[str]]  #: those that do not hold, a line each; every case of ours has a result
    claims: Callable[[Run], list[Claim]] = lambda run: []
    points: Callable[[Run], dict[str, Point]] | None = None  #: of the picture: memory (MiB) and time (ratio) by method


def broken_bounds(benchmark: Benchmark, run: Run) -> list[str]:
    """A line for each case of ours that failed (that a peer breaks here is no fault of ours), else broken bounds."""
    failed = [
        o for o in run.outcomes if o.failure and not o.case.peer and not (o.case.may_lack_memory and o.lacked_memory)
    ]
    return [f"{outcome.name}: {outcome.failure}" for outcome in failed] or benchmark.bounds(run)


def run_benchmark(
    benchmark: Benchmark, options: dict[str, Any], home: Path, save: Callable[[Run], None] = lambda run: None
) -> Run:
    """Measures all groups, in a folder below ``home`` that is removed at the end.

    ``save`` gets the run after each case: an interruption of a long run does not lose what was measured.

    Raises:
        ValueError: if the settings make no run possible.
    """
    settings = settings_of(benchmark.settings, options)
    if wrong := settings.wrong() if hasattr(settings, "wrong") else "":
        raise ValueError(wrong)
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=home) as folder:
        run = Run(settings, environment_facts(), folder=Path(folder), save=save)
        kind = filesystem_of(run.folder)
        warning = " (that is memory: name a disk with --home)" if kind in ("tmpfs", "ramfs") else ""
        run.facts["homes"] = f"a directory on {kind}{warning}"
        print("\n".join(f"{name:<8} {words}" for name, words in run.facts.items()), flush=True)
        benchmark.measure(run)
    return run


def write_lines(path: Path, name: str, run: Run) -> None:
    """Writes the results file of a run: a header, and a line for each case."""
    header = {"benchmark": name, "settings": asdict(run.settings), "facts": run.facts}
    lines = [{"group": group, **asdict(outcome)} for group, outcomes in run.groups.items() for outcome in outcomes]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)), encoding="utf-8")


def read_header(path: Path) -> dict[str, Any]:
    """The first line of a results file: ``benchmark``, ``settings`` and ``facts``."""
    header: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").partition("\n")[0])
    return header


def read_run(path: Path, benchmark: Benchmark) -> Run:
    """The run that a results file holds."""
    header = read_header(path)
    run = Run(settings_of(benchmark.settings, header["settings"]), header["facts"])
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()[1:]):
        run.groups[line.pop("group")].append(Outcome(Case(**line.pop("case")), **line))
    return run


def publish(name: str, question: str, benchmark: Benchmark, run: Run, out: Path | None) -> int:
    """Prints the report of a run and writes its page and picture; 0 if all bounds hold, else 1."""
    reasons = dict.fromkeys(f"* {outcome.name}: {outcome.reason}" for outcome in run.outcomes if outcome.reason)
    sections = [*benchmark.report(run), "\n".join(reasons)]
    broken = broken_bounds(benchmark, run)
    print("\n" + "\n\n".join(filter(None, sections)) + "\n")
    if out is not None:
        sections.append("".join(f"* does not hold: {line}\n" for line in broken).strip() or "All bounds hold.")
        if benchmark.points:
            note = "\n".join(run.facts[fact] for fact in ("command", "machine", "date"))
            axes = ("peak memory above the libraries, MiB", "time of a step, to the reference")
            draw(out.with_name(f"{out.name}.png"), question, benchmark.points(run), *axes, note)
            sections.append(f"![{name}]({out.name}.png)")
        rows = [f"| {fact} | {f'`{words}`' if fact == 'command' else words} |" for fact, words in run.facts.items()]
        header = [f"# {name}", question[:1].upper() + question[1:], "\n".join(["| | |", "|---|---|", *rows])]
        page = out.with_name(f"{out.name}.md")
        page.write_text("\n\n".join(filter(None, [*header, *sections])) + "\n", encoding="utf-8")
        print(f"page in {page}")
    print("\n".join(broken) or "all bounds hold", file=sys.stderr if broken else sys.stdout)
    return 1 if broken else 0
