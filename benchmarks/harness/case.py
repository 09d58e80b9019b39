"""A case and its outcome: one method in one process, and what that process reported. Plain data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FLOOR = "interpreter and torch"  #: the moment at which a case has imported what it needs, and made nothing


class CannotRunError(RuntimeError):
    """Raised by a case where this machine lacks what it needs; the message says what."""


@dataclass(frozen=True)
class Case:
    """One method: a name for the tables, ``package.module:function``, and the function's arguments (JSON).

    ``environment`` is set where the user has not set it. A case of a ``peer`` (:mod:`benchmarks.harness.peers`) runs in
    the environment where that library is installed.
    """

    name: str
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    peer: str = ""


@dataclass
class Outcome:
    """What a case's process reported, and what was measured from outside.

    Exactly one of three is not None: ``result``, what the function returned; ``skipped``, why it cannot run on this
    machine; ``failure``, why it ended without a result. ``steps`` holds what each timed step reported; ``reference``,
    where cases were timed in turn, the reference's step next to each of them. ``moments`` holds the bytes that the
    process held at named moments, ``peaks`` the most that it held in each phase.
    """

    case: Case
    result: dict[str, Any] | None = None
    failure: str | None = None
    skipped: str | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    reference: list[dict[str, Any]] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    data_peak_bytes: int = 0  #: private memory that was mapped, used or not: what a memory cap counts
    seconds: float = 0.0
    version: str | None = None  #: of the peer

    @property
    def name(self) -> str:
        """The case's."""
        return self.case.name

    @property
    def done(self) -> dict[str, Any]:
        """The result; ValueError where there is none."""
        if self.result is None:
            raise ValueError(f"{self.name}: expected a result, but it {self.reason}")
        return self.result

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process held at any time."""
        return max(self.peaks.values(), default=0)

    def above(self, moment: str = FLOOR, phase: str = "steps") -> int:
        """Bytes of a phase's peak above what the process held at a moment."""
        return self.peaks[phase] - self.moments[moment]

    def median(self, key: str = "seconds", default: float | None = None) -> float:
        """The median over the steps; NaN where there are none; KeyError if a step lacks ``key`` without default."""
        values = [step[key] if default is None else step.get(key, default) for step in self.steps]
        return float(statistics.median(values)) if values else float("nan")

    def ratios(self, key: str = "seconds") -> list[float]:
        """``key`` of each step to that of the reference's step; or what the steps themselves report as ``ratio``."""
        if not self.reference:
            return [step["ratio"] for step in self.steps if "ratio" in step]
        return [mine[key] / theirs[key] for mine, theirs in zip(self.steps, self.reference, strict=False)]

    def ratio(self, key: str = "seconds") -> float:
        """The median of :meth:`ratios`; NaN where there are none."""
        found = self.ratios(key)
        return statistics.median(found) if found else float("nan")

    @property
    def title(self) -> str:
        """The name, with the version of a peer."""
        return f"{self.name} ({self.version})" if self.version else self.name

    @property
    def status(self) -> str:
        """``skipped`` or ``failed``; empty where there is a result."""
        return "" if self.result is not None else "skipped" if self.skipped is not None else "failed"

    @property
    def reason(self) -> str:
        """Why there is no result; empty where there is one."""
        return f"{self.status}: {self.skipped or self.failure}" if self.status else ""

    def as_json(self) -> dict[str, Any]:
        """One line of a results file."""
        fields = asdict(self)
        kept = ("seconds", "processor")
        fields["reference"] = [{key: step[key] for key in kept if key in step} for step in self.reference]
        ratio = self.ratio() if self.ratios() else None
        return {"case": fields.pop("case")["name"], "peak_bytes": self.peak_bytes, "ratio": ratio, **fields}

    @classmethod
    def from_json(cls, case: Case, line: Mapping[str, Any]) -> Outcome:
        """What :meth:`as_json` wrote."""
        derived = ("case", "part", "peak_bytes", "ratio")
        return cls(case, **{name: value for name, value in line.items() if name not in derived})


def find_done(outcomes: Iterable[Outcome], name: str) -> Outcome | None:
    """The outcome of that name, if it has a result."""
    return next((outcome for outcome in outcomes if outcome.name == name and outcome.result is not None), None)


def failures(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each case that failed, except peers: that one breaks on this machine is no fault of ours."""
    return [f"{outcome.name}: {outcome.failure}" for outcome in outcomes if outcome.failure and not outcome.case.peer]
