"""What a rung is, and what comes of it: plain data, which the process of a rung fills and a table reads."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Outcome", "Rung", "failures_of_ours"]


@dataclass(frozen=True)
class Rung:
    """One way: a name for the table, ``package.module:function``, and the function's arguments (JSON).

    ``environment`` is set in the rung's process, where the user has not set it. ``peer`` names what
    :mod:`benchmarks.frame.peers` must find for the rung to run; it then runs in the environment in which that one is.
    """

    name: str
    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    peer: str = ""


@dataclass
class Outcome:
    """What came of a rung.

    Exactly one of three is not None: ``result``, what the function returned; ``skipped``, why it cannot run on this
    machine; ``failure``, why it ended without a result. ``steps`` holds what each step reported, ``moments`` what the
    process held (bytes) at the moments that it named, ``peaks`` the most it held in each phase.
    """

    rung: Rung
    result: dict[str, Any] | None = None
    failure: str | None = None
    skipped: str | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    data_peak_bytes: int = 0  # private memory that was mapped, used or not: what a cap on it must leave
    seconds: float = 0.0
    version: str | None = None  # of the peer
    ratio: float | None = None  # its time to the reference's of the same moment, where rungs took turns

    @property
    def peak_bytes(self) -> int:
        """The most memory that the rung's process held at any time."""
        return max(self.peaks.values(), default=0)

    def median(self, name: str, default: float | None = None) -> float:
        """The median over the steps of what they report as ``name``.

        Raises:
            KeyError: if a step does not, and there is no default.
        """
        values = (step[name] if default is None else step.get(name, default) for step in self.steps)
        return float(statistics.median(values))

    @property
    def title(self) -> str:
        """The rung's name, and the version of the peer where it is one."""
        return f"{self.rung.name} ({self.version})" if self.version else self.rung.name

    @property
    def status(self) -> str:
        """``skipped`` or ``failed``, for a cell of a table; empty where there is a result."""
        return "" if self.result is not None else "skipped" if self.skipped is not None else "failed"

    @property
    def reason(self) -> str:
        """Why there is no result, for the lines below a table; empty where there is one."""
        return f"{self.status}: {self.skipped or self.failure}" if self.status else ""

    def as_json(self) -> dict[str, Any]:
        """A JSON object: one line of the file that ``--json`` names."""
        fields = asdict(self)
        return {"rung": fields.pop("rung")["name"], "peak_bytes": self.peak_bytes, **fields}


def failures_of_ours(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each rung that failed, but for peers: one that another version of torch breaks is a row that says so,
    and no fault of the question."""
    return [f"{o.rung.name}: {o.failure}" for o in outcomes if o.failure and not o.rung.peer]
