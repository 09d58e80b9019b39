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
from benchmarks.harness.claims import pair_steps, read_lines
from benchmarks.harness.environment import Environment, filesystem_of, here
from benchmarks.harness.files import write_whole
from benchmarks.harness.limits import Limits, measure_limits
from benchmarks.harness.plot import Panel
from benchmarks.harness.schedule import Group, refer_to_first, run_group
from benchmarks.harness.settings import parse_command, settings_of

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
        environment = here()
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
        return Run(settings, environment.ended(), limits, facts + prepared, groups)

    def read(self, path: Path) -> Run[S]:
        """The run that a results file holds.

        Raises:
            ValueError: if the file holds other cases than the plan of its settings.
        """
        header, lines = read_lines(path)

        def take(group: Group) -> list[Outcome]:
            """The next lines: of this group by their names, which the first format has alone, and never one twice."""
            block: dict[str, Mapping[str, Any]] = {}
            names = {case.name for case in group.cases}
            while lines and lines[0]["case"] in names - block.keys() and lines[0].get("part", group.name) == group.name:
                line = lines.pop(0)
                block[line["case"]] = line
            return _outcomes(group, block)

        settings = self.settings_in(header)
        groups = drive(self.plan(settings, ""), take)
        if lines:
            raise ValueError(
                f"{path.name}: expected the cases of {settings}, got {lines[0]['case']!r} after {groups.keys()}"
            )
        facts = [(name, words) for name, words in header.get("facts", [])]
        environment = Environment.from_json(header["environment"])
        return Run(settings, environment, Limits(**header["limits"]), facts, groups)

    def settings_in(self, header: Mapping[str, Any]) -> S:
        """The settings of a results file's header; the first format has them in its command only."""
        if "settings" in header:
            return settings_of(self.settings, header["settings"])
        return parse_command(self.settings, header["environment"]["command"])


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


def _outcomes(group: Group, lines: Mapping[str, Mapping[str, Any]]) -> list[Outcome]:
    """The outcomes of a group from their lines, in the order of its cases; a case that is newer than the file is left
    out."""
    outcomes = []
    for case in group.cases:
        if case.name not in lines:
            continue
        line = lines[case.name]
        outcome = Outcome.from_json(case, line)
        # The first format knew no references, and its pairs begin with steps that do not count.
        if group.order == "pairs" and "reference" not in line:
            if case is group.cases[0]:
                outcome.steps = outcome.reference = outcome.steps[1:]
            else:
                pairs = list(pair_steps(list(lines.values()), case.name))
                outcome.steps, outcome.reference = [dict(mine) for mine, _ in pairs], [dict(own) for _, own in pairs]
        outcomes.append(outcome)
    if group.order == "rounds":
        refer_to_first(outcomes)
    return outcomes


def write_lines(path: Path, name: str, run: Run[Any], ratios: Mapping[str, float]) -> Path:
    """Writes the results file of a run: a header, and a line for each case."""
    header = {
        "format": 2,
        "benchmark": name,
        "settings": asdict(run.settings),
        "environment": run.environment.as_json(),
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
