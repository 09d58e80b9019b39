"""A case, which is one method in one process, and its outcome: what it reported, what it held, why it ended."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FLOOR = "interpreter and torch"  #: the moment at which a case has imported what it needs, and made nothing
LACKS_MEMORY = re.compile(
    r"allocate memory|MemoryError|out of memory|bad_alloc|ENOMEM|start new thread", re.IGNORECASE
)  # a thread needs a stack, and its error says nothing of memory


#: What a want of memory raises.
LOST = (MemoryError, RuntimeError, OSError)


def told_by(error: BaseException) -> str:
    """The line of an error of :data:`LOST` that tells of a want of memory; any other error is raised."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    if not isinstance(error, MemoryError) and not LACKS_MEMORY.search(line):
        raise error
    return line.split("DefaultCPUAllocator: ")[-1][:200]


class CannotRunError(RuntimeError):
    """Raised by a case where this machine lacks what it needs; the message says what."""


@dataclass(frozen=True)
class Case:
    """One method: a name for the tables, ``package.module:function``, and the function's arguments (JSON).

    Its process works in the folder of the run, which is on disk. ``environment`` is set where the user has not set it.
    A case of a ``peer`` (:mod:`benchmarks.harness.peers`) runs in the environment where that library is installed.
    That a case with ``may_lack_memory`` finds none is an answer, not a failure. Each of its ``ranks`` is a process;
    several have the environment that torchrun would give them. After ``seconds`` its processes are killed.
    """

    name: str
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    peer: str = ""
    may_lack_memory: bool = False
    ranks: int = 1
    seconds: float | None = None


@dataclass
class Outcome:
    """What a case's process reported, and what was measured from outside. A line of a results file.

    Exactly one of three is not None: ``result``, what the function returned; ``skipped``, why it cannot run on this
    machine; ``failure``, why it ended without a result. ``steps`` holds what each timed step reported; ``reference``,
    where cases took turns, the times of the reference's step next to each of them. ``moments`` holds the bytes that the
    process held at named moments, ``peaks`` the most that it held in each phase.
    """

    case: Case
    result: dict[str, Any] | None = None
    failure: str | None = None
    skipped: str | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    reference: list[dict[str, float]] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    data_peak_bytes: int = 0  #: private memory that was mapped, used or not: what a memory cap counts
    seconds: float = 0.0
    version: str | None = None  #: of the peer

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.case.name

    @property
    def title(self) -> str:
        """The name, with the version of a peer."""
        return f"{self.name} ({self.version})" if self.version else self.name

    @property
    def reason(self) -> str:
        """Why there is no result, after ``skipped:`` or ``failed:``; empty where there is one."""
        if self.result is not None:
            return ""
        if self.lacked_memory and self.case.may_lack_memory:
            return "died for lack of memory, which is an answer here, not a fault"
        return f"failed: {self.failure}" if self.skipped is None else f"skipped: {self.skipped}"

    @property
    def lacked_memory(self) -> bool:
        """Whether the case ended for want of memory."""
        return bool(LACKS_MEMORY.search(self.failure or ""))

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process held at any time."""
        return max(self.peaks.values(), default=0)

    def above(self, moment: str = FLOOR, phase: str = "steps") -> int:
        """Bytes of a phase's peak above what the process held at a moment."""
        return self.peaks[phase] - self.moments[moment]

    def values(self, key: str) -> list[Any]:
        """What each step reported under ``key``."""
        return [step[key] for step in self.steps]

    def median(self, key: str = "seconds") -> float:
        """The median over the steps; NaN where there are none."""
        return float(statistics.median(self.values(key))) if self.steps else float("nan")

    def ratios(self, key: str = "seconds") -> list[float]:
        """``key`` of each step to that of the reference's step; or what the steps themselves report as ``ratio``."""
        if not self.reference:
            return [step["ratio"] for step in self.steps if "ratio" in step]
        return [mine[key] / theirs[key] for mine, theirs in zip(self.steps, self.reference, strict=False)]

    def ratios_to(self, other: Outcome, key: str = "seconds") -> list[float]:
        """What this one reported to what another did in the same step."""
        return [mine / theirs for mine, theirs in zip(self.values(key), other.values(key), strict=False)]

    def differ(self, other: Outcome, key: str = "loss") -> float:
        """The greatest relative difference of what both reported in the same step; NaN where there is none."""
        return max((abs(ratio - 1) for ratio in self.ratios_to(other, key)), default=float("nan"))

    def ratio(self, key: str = "seconds") -> float:
        """The median of :meth:`ratios`; NaN where there are none."""
        found = self.ratios(key)
        return statistics.median(found) if found else float("nan")
