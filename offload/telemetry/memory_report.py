"""Reports how the memory of a model is used, and why: each choice with its bytes, predicted and measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.planning.explain import FewerBytes, Part
from offload.planning.peak_memory import OutsideBytes
from offload.planning.step_model import Choice, Prediction

__all__ = ["MemoryReport", "describe"]

_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryReport:
    """How a step uses the memory that a model may take; ``print()`` shows it as text."""

    #: Where, and how many bytes.
    device: str
    limit_bytes: int
    shards: int
    cells: int
    #: The prediction of the present plan, when it was chosen; None before the first step.
    predicted: Prediction | None
    #: The last step, and the peak of its memory; None where the system does not measure it.
    measured_seconds: float | None
    measured_bytes: int | None
    margin_bytes: int
    #: What more memory would buy.
    more: Prediction | None = None
    more_limit_bytes: int = 0
    #: What each choice of the present plan takes and saves.
    parts: Sequence[Part] = ()
    #: What storing fewer bytes would change, where a step waits for copies.
    fewer_bytes: Sequence[FewerBytes] = ()
    #: What stays on the compute device and belongs to no shard.
    outside: OutsideBytes = field(default_factory=OutsideBytes)
    #: Beside a device, where homes are files: shards that rest in host memory; else None.
    resting: int | None = None

    def __str__(self) -> str:
        first = f"memory: {_mib(self.limit_bytes)} on {self.device}"
        if self.predicted is None:
            return f"{first}; the plan is chosen when one training step has been measured"
        return "\n".join([first, *self._totals(self.predicted), "", *self._kinds(self.predicted), *self._others()])

    def _totals(self, p: Prediction) -> list[str]:
        seconds, nbytes = self.measured_seconds, self.measured_bytes
        measured = f"; measured {seconds:.3g} s" if seconds is not None else ""
        peak = f"; measured {_mib(nbytes)}" if nbytes is not None else ""
        return [
            f"step:   {p.seconds:.3g} s predicted ({p.compute_seconds:.3g} s compute, {p.wait_seconds:.3g} s waiting)"
            f"{measured}",
            f"peak:   {_mib(p.memory_bytes)} predicted, of which {_mib(self.margin_bytes)} by earlier steps{peak}",
        ]

    def _kinds(self, p: Prediction) -> list[str]:
        top, choice = max(p.course, key=lambda moment: moment.nbytes), p.choice
        there = len(choice.in_memory) if self.resting is None else self.resting
        where = "memory" if self.resting is None else "host memory"
        boundaries = "all stay" if choice.boundary_bytes == float("inf") else f"at most {_mib(choice.boundary_bytes)}"
        rows = [
            (
                "weights",
                top.weights,
                f"{choice.slots} slots; {there} of {self.shards} shards in {where}",
            ),
            ("gradients", top.gradients, f"those of {len(choice.waiting)} shards wait in {where} for their update"),
            ("boundaries", top.boundaries, boundaries),
            ("graphs", top.graphs, f"{len(choice.kept)} of {self.cells} cells keep theirs"),
            ("running cell", top.cell, "activations, and gradients of its weights"),
            ("outside", top.outside, self._outside_in_words()),
            ("others", top.others, "output, buffers of updates and transfers, homes in memory"),
        ]
        return [f"{name:13s} {_mib(nbytes):>12s}  {what}" for name, nbytes, what in rows]

    def _outside_in_words(self) -> str:
        each = self.outside
        return (
            f"in no shard: {_mib(each.values)} of parameters and buffers, {_mib(each.gradients)} of gradients, "
            f"{_mib(each.states)} of optimizer states; and activations around blocks"
        )

    def _others(self) -> list[str]:
        """What the choices take and save, and what more memory would buy."""
        assert self.predicted is not None
        lines = [""] if self.parts else []
        lines += [f"{part.what}: {_mib(part.nbytes)}, {_saves(part.seconds)}" for part in self.parts]
        if self.more is not None:
            gain = self.predicted.seconds - self.more.seconds
            lines.append(
                f"with {_mib(self.more_limit_bytes)}: {self.more.seconds:.3g} s, {max(0.0, gain):.3g} s less "
                f"({describe(self.more.choice)})"
            )
        if self.fewer_bytes:
            lines += ["", "this step waits for copies; stored in fewer bytes, with values that are rounded:"]
        lines += [
            f"{each.what}: {each.then:.1f} bytes of a parameter a step in place of {each.now:.1f} (without what memory "
            f"keeps), {_saves(each.seconds)} at most"
            for each in self.fewer_bytes
        ]
        return lines

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the memory over one step, stacked by kind. Needs matplotlib."""
        from matplotlib.figure import Figure

        if self.predicted is None:
            raise RuntimeError("run one training step first: the plan is chosen from what it measures")
        course = self.predicted.course
        kinds = ("others", "outside", "weights", "gradients", "boundaries", "graphs", "cell")
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.add_subplot()
        cells = range(len(course))
        stacked = [[getattr(moment, kind) / _MIB for moment in course] for kind in kinds]
        axes.stackplot(
            cells, stacked, labels=["running cell" if kind == "cell" else kind for kind in kinds], step="mid"
        )
        axes.axhline(self.limit_bytes / _MIB, color="black", linewidth=1, linestyle="--", label="limit")
        axes.set_xlabel("cells of a step, forward and then backward")
        axes.set_ylabel("MiB")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(os.fspath(path), dpi=150)


def describe(choice: Choice) -> str:
    """A choice in words."""
    return (
        f"{choice.slots} slots, {len(choice.in_memory)} shards in memory, {len(choice.kept)} graphs kept, gradients of "
        f"{len(choice.waiting)} shards waiting"
    )


def _saves(seconds: float) -> str:
    if abs(seconds) < 5e-4:
        return "saves no time"
    return f"saves {seconds:.3g} s" if seconds > 0 else f"costs {-seconds:.3g} s"


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:,.0f} MiB" if nbytes >= 10 * _MIB else f"{nbytes / _MIB:,.2f} MiB"
