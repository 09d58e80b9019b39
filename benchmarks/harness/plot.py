"""Pictures in PNG, drawn without a display, with machine and command below: time and memory of each case."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito: readable for everyone
Panel = Callable[[Any], None]
"""Draws on one pair of axes."""


def draw(path: Path, title: str, panels: list[Panel], note: str) -> None:
    """Writes the panels side by side."""
    from matplotlib.figure import Figure  # not pyplot, which may open a display

    figure = Figure(figsize=(max(9, 5.5 * len(panels)), 6), layout="constrained")
    figure.suptitle(title)
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        panel(axis)
    figure.supxlabel(note, fontsize=7, color="#555555")
    figure.savefig(path, dpi=130, format="png", metadata={"Software": None})


def bars(title: str, values: Mapping[str, float], colour: str) -> Panel:
    """A labelled bar for each name, from top to bottom, and a line at 1."""

    def panel(axis: Any) -> None:
        drawn = axis.barh(range(len(values)), list(values.values()), color=colour)
        axis.bar_label(drawn, labels=[f"{value:,.3g}" for value in values.values()], fontsize=7)
        axis.set_yticks(range(len(values)), list(values), fontsize=7)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.axvline(1.0, color="#333333", linestyle="--", linewidth=1)

    return panel


def ratio_panels(ratios: Mapping[str, float]) -> list[Panel]:
    """One panel for ratios of times, one for ratios of peaks; the reference is the dashed line."""
    peaks = {name.partition(": peak")[0]: value for name, value in ratios.items() if ": peak" in name}
    times = {name.removesuffix(": time"): value for name, value in ratios.items() if ": peak" not in name}
    titled = (("time, to the reference", times), ("peak memory, to the reference", peaks))
    return [bars(title, found, COLOURS[k]) for k, (title, found) in enumerate(titled) if found]
