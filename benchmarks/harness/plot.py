"""Pictures in PNG: panels side by side, drawn without a display, with machine and command below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.environment import Environment
from benchmarks.harness.extra import require
from benchmarks.harness.files import write_whole

__all__ = ["COLOURS", "Panel", "Picture", "bars", "draw", "lines"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito: readable for everyone

Panel = Callable[[Any], None]
"""Draws on one pair of axes."""


@dataclass(frozen=True)
class Picture:
    """A title and its panels; ``size`` in inches, by default 3.4 x 4.2 for each panel."""

    title: str
    panels: Sequence[Panel]
    size: tuple[float, float] | None = None


def draw(path: Path, picture: Picture, environment: Environment) -> Path:
    """Writes the PNG, whole or not at all."""
    require("matplotlib")
    figure_class = require("matplotlib.figure").Figure  # not pyplot, which may open a display
    figure = figure_class(figsize=picture.size or (3.4 * len(picture.panels), 4.2), layout="constrained")
    figure.suptitle(picture.title)
    for axis, panel in zip(figure.subplots(1, len(picture.panels), squeeze=False)[0], picture.panels, strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        panel(axis)
    note = f"{environment.cpu}, {environment.cores} cores · torch {environment.torch} · {environment.date}"
    figure.supxlabel(f"{environment.command}\n{note}", fontsize=7, color="#555555")
    return write_whole(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))


def bars(
    title: str, values: Mapping[str, float], form: str = "{:,.0f}", levels: Mapping[str, float] | None = None
) -> Panel:
    """One labelled bar for each name; ``levels`` are lines across."""

    def panel(axis: Any) -> None:
        colours = [COLOURS[k % len(COLOURS)] for k in range(len(values))]
        drawn = axis.bar(range(len(values)), list(values.values()), color=colours)
        axis.bar_label(drawn, labels=[form.format(value) for value in values.values()], fontsize=8)
        axis.set_xticks(range(len(values)), [name.replace(" ", "\n") for name in values], fontsize=7)
        axis.set_title(title, fontsize=10)
        _levels(axis, levels or {})

    return panel


def lines(
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    levels: Mapping[str, float] | None = None,
    logarithmic: bool = False,
    widths: Sequence[float] = (),
) -> Panel:
    """One line for each name, from x to y values."""

    def panel(axis: Any) -> None:
        for k, (name, (x, y)) in enumerate(series.items()):
            width = widths[k] if widths else 1.5
            axis.plot(x, y, marker="o", markersize=3, color=COLOURS[k % len(COLOURS)], label=name, linewidth=width)
        if logarithmic:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        _levels(axis, levels or {})
        axis.legend(fontsize=7, frameon=False)

    return panel


def _levels(axis: Any, levels: Mapping[str, float]) -> None:
    """A dashed line for each level, and room for the legend above."""
    for (name, level), style in zip(levels.items(), ("--", ":", "-."), strict=False):
        axis.axhline(level, color="#333333", linestyle=style, linewidth=1, label=name)
        axis.set_ylim(top=max(axis.dataLim.y1, level) * 1.3)
        axis.legend(loc="upper right", fontsize=7, frameon=False)
