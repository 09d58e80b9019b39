"""What a benchmark declares, how it runs, and how its report is made, at once or later from its results file.

A benchmark is settings, a plan and a report. The plan is a generator: it yields groups of cases and receives their
outcomes, so that a later group can depend on them. To run, each group is measured; to make a report again, the same
plan receives the outcomes that a results file holds. The report sees no difference.
"""

import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.harness.case import Outcome
from benchmarks.harness.claims import read_lines
from benchmarks.harness.environment import Environment, filesystem_of, here, processor_seconds
from benchmarks.harness.files import write_whole
from benchmarks.harness.limits import Limits, measure_limits
from benchmarks.harness.plot import Panel
from benchmarks.harness.schedule import Group, refer_to_first, run_group
from benchmarks.harness.settings import settings_of

S = TypeVar("S")
Plan = Generator[Group, list[Outcome], None]
Facts = list[tuple[str, str]]


@dataclass
class Run(Generic[S]):
    """A finished run: settings, header, and the outcomes of each group."""

    settings: S
    environment: Environment
    limits: Limits
    facts: Facts
    groups: dict[str, list[Outcome]]

    @property
    def outcomes(self) -> list[Outcome]:
        """Those of all groups."""
        return [outcome for outcomes in self.groups.values() for outcome in outcomes]


@dataclass
class Report:
    """What is said of a run."""

    sections: list[str]  #: tables and paragraphs in Markdown, in their order
    broken: list[str] = field(default_factory=list)  #: bounds that do not hold, a line each: they make the run fail
    panels: list[Panel] | None = None  #: of the picture; by default the ratios
    ratios: dict[str, float] | None = None  #: what another run must repeat; by default of all outcomes


@dataclass(frozen=True)
class Benchmark(Generic[S]):
    """One benchmark."""

    settings: type[S]  #: a frozen dataclass of options, see :mod:`benchmarks.harness.settings`
    plan: Callable[[S, str], Plan]  #: yields the groups of a run in a folder on disk; touches no file itself
    report: Callable[[Run[S]], Report]
    #: Writes the files that cases share, and returns what the header says of them.
    prepare: Callable[[S, Path], Facts] = field(default=lambda settings, folder: [])
    rates: Callable[[S], Mapping[str, Any]] = field(default=lambda settings: {})  #: arguments of ``measure_limits``
    run_group: Callable[[Group], list[Outcome]] = run_group

    def measure(self, settings: S, home: Path) -> Run[S]:
        """Runs all groups, in a folder below ``home`` that is removed at the end."""
        environment, before = here(), processor_seconds()
        _print_facts(environment.facts())
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=home) as folder:
            kind = filesystem_of(Path(folder))
            warning = " (that is memory: name a disk with --home)" if kind in ("tmpfs", "ramfs") else ""
            facts = [("homes", f"a directory on {kind}{warning}")]
            _print_facts(facts)
            prepared = self.prepare(settings, Path(folder))
            limits = measure_limits(Path(folder), **self.rates(settings))
            _print_facts([("limits", limits.line()), *prepared])
            groups = drive(self.plan(settings, folder), self.run_group)
        return Run(settings, environment.ended(before), limits, facts + prepared, groups)

    def read(self, path: Path) -> Run[S]:
        """The run that a results file holds.

        Raises:
            ValueError: if the file holds other cases than the plan of its settings.
        """
        header, lines = read_lines(path)

        def take(group: Group) -> list[Outcome]:
            """The next lines, if they are of this group; a case that is newer than the file is left out."""
            found: dict[str, Mapping[str, Any]] = {}
            while lines and lines[0]["part"] == group.name and lines[0]["case"] in {case.name for case in group.cases}:
                line = lines.pop(0)
                found[line["case"]] = line
            outcomes = [Outcome.from_json(case, found[case.name]) for case in group.cases if case.name in found]
            if group.order == "rounds":
                refer_to_first(outcomes)
            elif group.order == "pairs" and outcomes:
                outcomes[0].reference = outcomes[0].steps
            return outcomes

        settings = settings_of(self.settings, header["settings"])
        groups = drive(self.plan(settings, ""), take)
        if lines:
            raise ValueError(
                f"{path.name}: expected the cases of {settings}, got {lines[0]['case']!r} after {groups.keys()}"
            )
        facts = [(name, words) for name, words in header["facts"]]
        environment = Environment(**header["environment"])
        return Run(settings, environment, Limits(**header["limits"]), facts, groups)


def drive(plan: Plan, take: Callable[[Group], list[Outcome]]) -> dict[str, list[Outcome]]:
    """The outcomes of a plan's groups by name; ``take`` measures a group, or reads it."""
    groups: dict[str, list[Outcome]] = {}
    try:
        group = next(plan)
        while True:
            groups[group.name] = take(group)
            group = plan.send(groups[group.name])
    except StopIteration:
        return groups


def write_lines(path: Path, name: str, run: Run[Any], ratios: Mapping[str, float]) -> Path:
    """Writes the results file of a run: a header, and a line for each case."""
    header = {
        "benchmark": name,
        "settings": asdict(run.settings),
        "environment": asdict(run.environment),
        "facts": run.facts,
        "limits": asdict(run.limits),
        "ratios": dict(ratios),
    }
    lines: Iterable[Mapping[str, Any]] = (
        {"part": part, **outcome.as_json()} for part, outcomes in run.groups.items() for outcome in outcomes
    )
    text = "".join(json.dumps(line) + "\n" for line in (header, *lines))
    return write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _print_facts(facts: Facts) -> None:
    print("\n".join(f"{name:<8} {words}" for name, words in facts), flush=True)
