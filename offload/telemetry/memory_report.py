"""Reports how the memory of a model is used, and why: one table that adds up to the peak of a step, and its picture."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

from offload.planning.choose import NothingFitsError, Prediction, choose, moves, predict
from offload.units import shown_bytes, shown_seconds, table

__all__ = ["MemoryReport"]

#: Below this a time is none: those of two plans differ by as much.
NO_SECONDS = 5e-5
#: How much more memory is worth a look: a GiB, or a quarter of a small limit, which is a MiB at least.
MORE_BYTES, LEAST_MORE_BYTES, MORE_SHARE = 1 << 30, 1 << 20, 4


@dataclass(frozen=True)
class MemoryReport:
    """How a step uses the memory that a model may take; ``print()`` shows it as a table."""

    #: Where, and how many bytes.
    device: str
    limit_bytes: int
    #: The prediction of the present plan; None before the first step.
    predicted: Prediction | None
    #: Of the limit, what plans leave to the allocator, or to what steps took beside what is counted.
    left_bytes: int = 0
    #: The last step, and the peak of its memory; None where the system does not measure it.
    measured_seconds: float | None = None
    measured_bytes: int | None = None
    #: Beside a device, where homes are files: shards that rest in host memory; else None.
    resting: int | None = None

    @property
    def more_limit_bytes(self) -> int:
        """The larger limit of :attr:`more`."""
        return self.limit_bytes + min(MORE_BYTES, max(LEAST_MORE_BYTES, self.limit_bytes // MORE_SHARE))

    @property
    def more(self) -> Prediction | None:
        """The fastest plan with more memory; None before the first step, or if even there no plan fits."""
        if self.predicted is None:
            return None
        model = replace(self.predicted.model, begins=None)
        try:
            return predict(model, choose(model, self.more_limit_bytes - self.left_bytes))
        except NothingFitsError:  # a size of batch that ran goes on although it takes more than memory
            return None

    def __str__(self) -> str:
        p, limit = self.predicted, shown_bytes(self.limit_bytes)
        if p is None:
            return f"memory: {limit} on {self.device}; the plan is chosen when one training step has been measured"
        words, (unit, _) = self._in_words(p), self._unit
        rows = [("at the peak", unit, "", "")]
        rows += [(use, self._shown(nbytes), "", words[use]) for use, nbytes in p.uses]
        rows.append(("predicted", self._shown(p.memory_bytes), "", ""))
        if (peak := self.measured_bytes) is not None:
            rows.append(("measured", self._shown(peak), "", ""))
        rows += [("limit", self._shown(self.limit_bytes), "", f"on {self.device}"), ("", "", "", "")]
        # What layers and lanes do side by side.
        rows += [("in a step", unit, "takes", "")]
        rows.append(("compute", "", shown_seconds(p.forecast.compute_seconds), "inside layers"))
        for each in moves(p):
            told = words[each.what + " in a step"].format(each.shards)
            rows.append((each.what, self._shown(each.nbytes), shown_seconds(each.seconds), told))
        waits = f"{shown_seconds(p.forecast.wait_seconds)} of it waiting for copies"
        rows.append(("predicted", "", shown_seconds(p.forecast.seconds), waits))
        if (seconds := self.measured_seconds) is not None:
            rows.append(("measured", "", shown_seconds(seconds), "with what runs between forward and backward"))
        if (larger := self.more) is not None:
            saved = p.forecast.seconds - larger.forecast.seconds
            gain = "no time" if saved < NO_SECONDS else shown_seconds(saved)
            rows += [("", "", "", ""), ("another plan", unit, "saves", "")]
            rows.append(("more memory", self._shown(self.more_limit_bytes), gain, str(larger.choice)))
        return table(rows)

    @property
    def _unit(self) -> tuple[str, int]:
        """That of all sizes, so that they add up."""
        return ("GiB", 1 << 30) if self.limit_bytes >= 10 << 30 else ("MiB", 1 << 20)

    def _shown(self, nbytes: float) -> str:
        return f"{nbytes / self._unit[1]:,.2f}"

    def _in_words(self, p: Prediction) -> dict[str, str]:
        choice, model, outside = p.choice, p.model, p.model.outside
        shards, there, waiting = model.shards, len(choice.in_memory), len(choice.waiting)
        beside = "" if self.resting is None else f"; {self.resting} of {shards} shards in host memory"
        where = "memory" if self.resting is None else "host memory"
        stay = f", at most {self._shown(choice.boundary_bytes)} of each" if math.isfinite(choice.boundary_bytes) else ""
        return {
            "homes": f"{there} of {shards} shards in memory: weights and optimizer states{beside}",
            "casts": "of weights to the type of autocast, which keeps them",
            "slots": f"{choice.slots} slots, through which {shards - there} of {shards} shards stream",
            "gradients": "being stored"
            + (f", or those of {waiting} shards wait in {where} for their update" if waiting else ""),
            "boundaries": f"inputs of cells, and their gradients{stay}",
            "graphs": f"{len(choice.kept)} of {shards * len(model.rows)} cells keep theirs, the others are recomputed",
            "running cell": "activations, and gradients of its weights",
            "outside": f"in no shard: {self._shown(outside.values)} of parameters and buffers, "
            f"{self._shown(outside.gradients)} of gradients, {self._shown(outside.states)} of optimizer states; "
            f"and activations around blocks",
            "output": "of the model, and its gradient",
            "update buffers": "through which optimizer states in files are updated",
            "transfer buffers": "through which files are read and written",
            "beside these": "allocator and buffers of operations, measured",
            "loads in a step": f"{{}} of {shards} shards stream from their homes",
            "gradients in a step": "of {} shards to their homes",
            "updates in a step": "of {} shards, by so much of gradients",
            "boundaries in a step": "out of memory and back",
        }

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
        for use, nbytes in self.predicted.uses:
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
