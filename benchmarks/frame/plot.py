"""Pictures in PNG: drawn without a display, in colours that differ for everyone, with the environment below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame.cache import write_whole
from benchmarks.frame.environment import Environment
from benchmarks.frame.extra import require

__all__ = ["COLOURS", "bars", "level_line", "new_figure", "save"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito, told apart by all


def new_figure(columns: int, title: str) -> tuple[Any, list[Any]]:
    """A figure and its ``columns`` axes side by side. Keeps off matplotlib's global state: no display is opened."""
    require("matplotlib")
    figure_class = require("matplotlib.figure").Figure
    figure = figure_class(figsize=(3.4 * columns, 4.2), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def bars(axis: Any, names: Sequence[str], values: Sequence[float], title: str, form: str = "{:,.0f}") -> None:
    """One labelled bar for each name, in the colours that the names have in every panel."""
    drawn = axis.bar(range(len(names)), values, color=[COLOURS[k % len(COLOURS)] for k in range(len(names))])
    axis.bar_label(drawn, labels=[form.format(value) for value in values], fontsize=8)
    axis.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=8)
    axis.set_title(title, fontsize=10)


def level_line(axis: Any, level: float, name: str, style: str = "--") -> None:
    """A line across all bars, and its name in the legend; room for the legend is made above the bars."""
    axis.axhline(level, color="#333333", linestyle=style, linewidth=1, label=name)
    axis.set_ylim(top=max(axis.dataLim.y1, level) * 1.3)
    axis.legend(loc="upper right", fontsize=7, frameon=False)


def save(figure: Any, path: Path, environment: Environment) -> Path:
    """Writes the PNG, whole or not at all."""
    note = f"{environment.cpu}, {environment.cores} cores · torch {environment.torch} · {environment.date}"
    figure.supxlabel(f"{environment.command}\n{note}", fontsize=7, color="#555555")
    return write_whole(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))
