"""Pictures in PNG, drawn without a display, with machine and command below: time and memory of each case."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.environment import Environment
from benchmarks.harness.files import write_whole
from benchmarks.harness.peers import require

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito: readable for everyone
Panel = Callable[[Any], None]
"""Draws on one pair of axes."""


def draw(path: Path, title: str, panels: list[Panel], environment: Environment) -> Path:
    """Writes the panels side by side, whole or not at all."""
    figure_class = require("matplotlib.figure").Figure  # not pyplot, which may open a display
    figure = figure_class(figsize=(max(9, 5.5 * len(panels)), 6), layout="constrained")
    figure.suptitle(title)
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        panel(axis)
    note = f"{environment.cpu}, {environment.cores} cores · torch {environment.torch} · {environment.date}"
    figure.supxlabel(f"{environment.command}\n{note}", fontsize=7, color="#555555")
    return write_whole(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))


def bars(title: str, values: Mapping[str, float], colour: str, level: float | None = None) -> Panel:
    """A labelled bar for each name, from top to bottom, and a line at ``level``."""

    def panel(axis: Any) -> None:
        drawn = axis.barh(range(len(values)), list(values.values()), color=colour)
        axis.bar_label(drawn, labels=[f"{value:,.3g}" for value in values.values()], fontsize=7)
        axis.set_yticks(range(len(values)), list(values), fontsize=7)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        if level is not None:
            axis.axvline(level, color="#333333", linestyle="--", linewidth=1)

    return panel


def ratio_panels(ratios: Mapping[str, float]) -> list[Panel]:
    """One panel for ratios of times, one for ratios of peaks; the reference is the dashed line."""
    peaks = {name.partition(": peak")[0]: value for name, value in ratios.items() if ": peak" in name}
    times = {name.removesuffix(": time"): value for name, value in ratios.items() if ": peak" not in name}
    titled = (("time, to the reference", times), ("peak memory, to the reference", peaks))
    return [bars(title, found, COLOURS[k], 1.0) for k, (title, found) in enumerate(titled) if found]
