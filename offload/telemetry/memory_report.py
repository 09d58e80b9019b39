"""Reports how the memory of a model is used, and why: one table that adds up to the peak of a step, and its picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.planning.budget import shown_bytes
from offload.planning.explain import FewerBytes, Moved, Part, bytes_at_peak
from offload.planning.peak_memory import OutsideBytes
from offload.planning.shown import shown_seconds, table
from offload.planning.step_model import Choice, Prediction

__all__ = ["MemoryReport", "describe"]

#: Below this a time is none: those of two plans differ by as much.
NO_SECONDS = 5e-5


@dataclass(frozen=True)
class MemoryReport:
    """How a step uses the memory that a model may take; ``print()`` shows it as a table."""

    #: Where, and how many bytes.
    device: str
    limit_bytes: int
    shards: int
    cells: int
    #: The prediction of the present plan, when it was chosen; None before the first step.
    predicted: Prediction | None
    #: The last step, and the peak of its memory; None where the system does not measure it.
    measured_seconds: float | None = None
    measured_bytes: int | None = None
    #: Of the prediction, what earlier steps took more than theirs.
    margin_bytes: int = 0
    #: What more memory would buy.
    more: Prediction | None = None
    more_limit_bytes: int = 0
    #: What each choice of the present plan takes and saves.
    parts: Sequence[Part] = ()
    #: What lanes do beside the layers.
    moves: Sequence[Moved] = ()
    #: What storing fewer bytes would change, where a step waits for copies.
    fewer_bytes: Sequence[FewerBytes] = ()
    #: What stays on the compute device and belongs to no shard.
    outside: OutsideBytes = field(default_factory=OutsideBytes)
    #: Beside a device, where homes are files: shards that rest in host memory; else None.
    resting: int | None = None

    def __str__(self) -> str:
        p = self.predicted
        if p is None:
            limit = shown_bytes(self.limit_bytes)
            return f"memory: {limit} on {self.device}; the plan is chosen when one training step has been measured"
        rows = [("at the peak", self._unit[0], "saves", ""), *self._uses(p)]
        rows.append(("predicted", self._shown(p.memory_bytes), "", ""))
        if (peak := self.measured_bytes) is not None:
            more = f"{self._shown(max(0, peak - p.memory_bytes))} of it by the allocator and libraries"
            rows.append(("measured", self._shown(peak), "", more))
        rows.append(("limit", self._shown(self.limit_bytes), "", f"on {self.device}"))
        return table([*rows, ("", "", "", ""), *self._step(p), *self._next(p)])

    @property
    def _unit(self) -> tuple[str, int]:
        """That of all sizes, so that they add up."""
        return ("GiB", 1 << 30) if self.limit_bytes >= 10 << 30 else ("MiB", 1 << 20)

    def _shown(self, nbytes: float) -> str:
        return f"{nbytes / self._unit[1]:,.2f}"

    def _uses(self, p: Prediction) -> list[tuple[str, str, str, str]]:
        """The rows of memory, the largest first."""
        parts, words = {part.use: part for part in self.parts}, self._in_words(p.choice)
        return [
            (use, self._shown(nbytes), _saved(parts[use].seconds) if use in parts else "", words[use])
            for use, nbytes in _by_size(p)
        ]

    def _in_words(self, choice: Choice) -> dict[str, str]:
        shards, outside = self.shards, self.outside
        there = len(choice.in_memory)
        beside = "" if self.resting is None else f"; {self.resting} of {shards} shards in host memory"
        where = "memory" if self.resting is None else "host memory"
        stay = f", at most {self._shown(choice.boundary_bytes)} of each" if math.isfinite(choice.boundary_bytes) else ""
        return {
            "homes": f"{there} of {shards} shards in memory: weights and optimizer states{beside}",
            "slots": f"{choice.slots} slots, through which {shards - len(choice.in_memory)} of {shards} shards stream",
            "gradients": "being stored"
            + (
                f", or those of {len(choice.waiting)} shards wait in {where} for their update" if choice.waiting else ""
            ),
            "boundaries": f"inputs of cells, and their gradients{stay}",
            "graphs": f"{len(choice.kept)} of {self.cells} cells keep theirs, the others are recomputed",
            "running cell": "activations, and gradients of its weights",
            "outside": f"in no shard: {self._shown(outside.values)} of parameters and buffers, "
            f"{self._shown(outside.gradients)} of gradients, {self._shown(outside.states)} of optimizer states; "
            f"and activations around blocks",
            "output": "of the model, and its gradient",
            "update buffers": "through which optimizer states in files are updated",
            "transfer buffers": "through which files are read and written",
            "earlier steps": "by which earlier steps exceeded their prediction",
        }

    def _step(self, p: Prediction) -> list[tuple[str, str, str, str]]:
        """The rows of time: what layers and lanes do side by side."""
        rows = [("in a step", self._unit[0], "takes", "")]
        rows.append(("compute", "", shown_seconds(p.compute_seconds), "inside layers"))
        for each in self.moves:
            words = {
                "loads": f"{each.shards} of {self.shards} shards stream from their homes",
                "gradients": f"of {each.shards} shards to their homes",
                "updates": f"of {each.shards} shards, by so much of gradients",
                "boundaries": "out of memory and back",
            }
            rows.append((each.what, self._shown(each.nbytes), shown_seconds(each.seconds), words[each.what]))
        waits = f"{shown_seconds(p.wait_seconds)} of it waiting for copies"
        rows.append(("predicted", "", shown_seconds(p.seconds), waits))
        if (seconds := self.measured_seconds) is not None:
            rows.append(("measured", "", shown_seconds(seconds), "with what runs between forward and backward"))
        return rows

    def _next(self, p: Prediction) -> list[tuple[str, str, str, str]]:
        """The rows of what would change: more memory, and fewer bytes."""
        rows = [("", "", "", ""), ("another plan", self._unit[0], "saves", "")]
        if self.more is not None:
            saved = _saved(max(0.0, p.seconds - self.more.seconds))
            rows.append(("more memory", self._shown(self.more_limit_bytes), saved, describe(self.more.choice)))
        for each in self.fewer_bytes:
            words = f"{each.what}: {each.then:.1f} bytes of a parameter in place of {each.now:.1f}, with rounding"
            rows.append(("fewer bytes", "", _saved(each.seconds), words))
        return rows if len(rows) > 2 else []

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the table as stacked bars of bytes against the limit, into a file of the type that its name ends with.

        Raises ImportError without matplotlib, which the extra ``bench`` has; RuntimeError before the first step.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "plot() needs matplotlib: pip install 'gradstream[bench]', or matplotlib alone"
            ) from error
        if self.predicted is None:
            raise RuntimeError("run one training step first: the plan is chosen from what it measures")
        unit, factor = self._unit
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes, below = figure.add_subplot(), 0.0
        for use, nbytes in _by_size(self.predicted):
            axes.bar("predicted", nbytes / factor, bottom=below, label=f"{use}: {shown_bytes(nbytes)}")
            below += nbytes / factor
        if (peak := self.measured_bytes) is not None:
            axes.bar("measured", peak / factor, color="lightgrey", label=f"measured: {shown_bytes(peak)}")
        limit = shown_bytes(self.limit_bytes)
        axes.axhline(self.limit_bytes / factor, color="black", linestyle="--", label=f"limit: {limit}")
        axes.set_title(f"memory of a step on {self.device}: {shown_bytes(self.predicted.memory_bytes)} of {limit}")
        axes.set_ylabel(f"{unit} at the peak")
        figure.legend(loc="outside right upper", reverse=True)
        figure.savefig(os.fspath(path), dpi=150)


def describe(choice: Choice) -> str:
    """A choice in words."""
    return (
        f"{choice.slots} slots, {len(choice.in_memory)} shards in memory, {len(choice.kept)} graphs kept, gradients of "
        f"{len(choice.waiting)} shards waiting"
    )


def _by_size(predicted: Prediction) -> list[tuple[str, int]]:
    """The uses of memory at the peak that take any, the largest first."""
    uses = ((use, nbytes) for use, nbytes in bytes_at_peak(predicted).items() if nbytes)
    return sorted(uses, key=lambda item: -item[1])


def _saved(seconds: float) -> str:
    """Seconds that a step takes less; a time that it takes more has a sign."""
    if abs(seconds) < NO_SECONDS:
        return "no time"
    return shown_seconds(seconds) if seconds > 0 else f"-{shown_seconds(-seconds)}"
