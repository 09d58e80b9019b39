"""The tables and the picture of ``memory-latency``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frame.environment import Environment
from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells
from benchmarks.frame.outcome import Outcome
from benchmarks.frame.pairs import Paired, spread
from benchmarks.frame.plot import COLOURS, new_figure, save
from benchmarks.frame.table import markdown_table, mebibytes
from benchmarks.frame.traffic import medium_bytes
from benchmarks.frame.work import engine_bytes, gradient_bytes
from benchmarks.memory_latency.shape import Shape
from benchmarks.memory_latency.steps import FLOOR

__all__ = ["Measured", "draw", "forward_table", "prediction_table", "training_table"]


@dataclass
class Measured:
    """One way: its steps in turn with plain torch, and on the CPU a step whose heap gave freed memory back."""

    paired: Paired
    in_use: Outcome | None = None

    @property
    def name(self) -> str:
        """Of the way."""
        return self.paired.outcome.rung.name

    @property
    def complete(self) -> bool:
        """Whether there is something to show."""
        has_peak = self.in_use is None or self.in_use.result is not None
        return self.paired.outcome.result is not None and bool(self.paired.steps) and has_peak

    @property
    def status(self) -> str:
        """Why there is not, in a word."""
        return self.paired.outcome.status or ("" if self.in_use is None else self.in_use.status)

    @property
    def seconds(self) -> float:
        """Median of a step."""
        return statistics.median(step["seconds"] for step in self.paired.steps)

    @property
    def peak_bytes(self) -> int:
        """What was in use: of an accelerator's allocator, or of the process above a step of two layers."""
        if self.in_use is not None:
            return above_floor(self.in_use)
        return int((self.paired.outcome.result or {})["device_peak"])

    @property
    def predicted_bytes(self) -> int | None:
        """What ``estimate()`` says for the same."""
        estimate = (self.paired.outcome.result or {}).get("estimate")
        return int(estimate["memory_bytes"]) if estimate else None

    @property
    def predicted_seconds(self) -> float | None:
        """What ``estimate()`` says after half of the turns."""
        estimate = (self.paired.outcome.result or {}).get("estimate")
        return float(estimate["seconds"]) if estimate else None


def above_floor(outcome: Outcome) -> int:
    """Peak bytes of the steps, above what the process held that had only taken a step of two layers."""
    return outcome.peaks["steps"] - outcome.moments[FLOOR]


def limit_seconds(way: Measured, shape: Shape, limits: Limits) -> float:
    """The least seconds for the arithmetic that every way must do, and for the bytes that this one moves."""
    arguments, steps = way.paired.outcome.rung.arguments, way.paired.steps
    work = {"flops": shape.training_flops, "on_device_bytes": gradient_bytes(shape.parameters)}
    loaded, drained = engine_bytes(steps[-1]) if arguments["way"] == "ours" else (0.0, 0.0)
    copied = 0.0
    if limits.host_to_device_bytes is not None:
        work |= {"loaded_bytes": loaded, "drained_bytes": drained}
    elif not arguments["settings"].get("disk", True):
        copied = loaded + drained
    return limits.step_seconds(**work, **medium_bytes(steps, copied_bytes=copied))


def training_table(measured: Sequence[Measured], shape: Shape, limits: Limits) -> str:
    """A row for each way, also for those that could not run."""
    peaks = ("peak in use", "heap as it comes") if limits.device == "cpu" else ("peak on the device", "on the host")
    header = ["training", *peaks, "s/step", "to torch", *LIMIT_HEADER, "gradients differ by"]
    rows = []
    for way in measured:
        if not way.complete:
            rows.append([way.name, way.status, *[""] * (len(header) - 2)])
            continue
        assert way.paired.outcome.result is not None
        rows.append(
            [
                way.paired.outcome.title,
                mebibytes(way.peak_bytes),
                mebibytes(above_floor(way.paired.outcome)),
                f"{way.seconds:.2f}",
                spread(way.paired.ratios(), 2),
                *limit_cells(way.seconds, limit_seconds(way, shape, limits)),
                f"{way.paired.outcome.result['difference']:.0e}",
            ]
        )
    return markdown_table(header, rows)


def prediction_table(measured: Sequence[Measured]) -> str:
    """Predicted beside measured, for the ways that predict; empty where there are none."""
    header = ["prediction", "s/step", "predicted", "error", "peak", "predicted", "error"]
    rows = []
    for way in measured:
        seconds, held = way.predicted_seconds, way.predicted_bytes
        if way.complete and seconds is not None and held is not None:
            rows.append(
                [
                    way.name,
                    f"{way.seconds:.2f}",
                    f"{seconds:.2f}",
                    _error(seconds, way.seconds),
                    mebibytes(way.peak_bytes),
                    mebibytes(held),
                    _error(held, way.peak_bytes),
                ]
            )
    return markdown_table(header, rows) if rows else ""


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}" if measured > 0 else "-"


def forward_table(paired: Sequence[Paired], shape: Shape, limits: Limits) -> str:
    """Forward only; empty where nothing was asked for."""
    header = ["forward only", "peak", "s/pass", "to torch", *LIMIT_HEADER, "outputs differ by"]
    rows = []
    for pair in paired:
        outcome = pair.outcome
        name = outcome.title.removeprefix("forward, ")
        if outcome.result is None or not pair.steps:
            rows.append([name, outcome.status, *[""] * (len(header) - 2)])
            continue
        seconds = statistics.median(step["seconds"] for step in pair.steps)
        rows.append(
            [
                name,
                mebibytes(above_floor(outcome)),
                f"{seconds:.2f}",
                spread(pair.ratios(), 2),
                *limit_cells(seconds, limits.step_seconds(flops=shape.forward_flops)),
                f"{outcome.result['difference']:.0e}",
            ]
        )
    return markdown_table(header, rows) if rows else ""


FAMILIES = {  # of the picture: how the name of a way begins
    "torch": ("torch", "save_on_cpu"),
    "peers": ("FSDP2", "DeepSpeed", "fairscale"),
    "ours, home in host memory": ("ours: host",),
    "ours, home on disk": tuple(f"ours: disk, {digit}" for digit in range(1, 10)),
    "ours, memory budget": ("ours: disk, budget",),
}


def draw(path: Path, measured: Sequence[Measured], environment: Environment) -> Path:
    """Peak against time; the ways that nothing beats in both are joined by a line; predictions are hollow."""
    figure, (axis,) = new_figure(1, "Memory against time of a training step")
    figure.set_size_inches(10, 6)
    done = [way for way in measured if way.complete]
    for (family, beginnings), colour in zip(FAMILIES.items(), COLOURS, strict=False):
        ways = [way for way in done if way.name.startswith(beginnings)]
        if not ways:
            continue
        points = [_point(way) for way in ways]
        axis.scatter(*zip(*points, strict=True), color=colour, label=family, zorder=3)
        for way, (x, y) in zip(ways, points, strict=True):
            if way.predicted_bytes is not None and way.predicted_seconds is not None:
                predicted = (way.predicted_bytes / 2**20, y * way.predicted_seconds / way.seconds)
                axis.plot(*zip((x, y), predicted, strict=True), color=colour, linewidth=0.6)
                axis.scatter(*predicted, facecolors="none", edgecolors=colour, zorder=3)
            label = way.name.removeprefix("ours: ")
            axis.annotate(label, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=6.5)
    front = pareto_front([_point(way) for way in done])
    axis.plot(
        *zip(*front, strict=True), color="#999999", linestyle="--", linewidth=1, label="nothing is better in both"
    )
    axis.set_xlabel("peak memory in use above the libraries, MiB (hollow: predicted)")
    axis.set_ylabel("time of a step, plain torch = 1")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False)
    return save(figure, path, environment)


def _point(way: Measured) -> tuple[float, float]:
    return way.peak_bytes / 2**20, way.paired.ratio()


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both coordinates, from left to right."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front
