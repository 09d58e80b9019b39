"""Memory against time in PNG, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Point = tuple[float, float]
OURS, OTHERS = "#009e73", "#0072b2"


def draw(path: Path, title: str, points: Mapping[str, Point], memory: str, time: str, note: str) -> None:
    """A labelled point for each method; a line joins those that no other one beats in memory and in time.

    ``memory`` and ``time`` name the axes, a ``note`` below tells machine and date. Ours are those named ``ours: ...``.
    """
    from matplotlib.figure import Figure  # not pyplot, which may open a display

    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    for name, point in points.items():
        axis.scatter(*point, color=OURS if name.startswith("ours") else OTHERS, zorder=3)
        label = name.removeprefix("ours: ")
        axis.annotate(label, point, xytext=(4, 3), textcoords="offset points", fontsize=6.5)
    axis.plot(*zip(*pareto_front([*points.values()]), strict=True), color="#999999", linestyle="--", linewidth=1)
    axis.set(title=title, xlabel=f"{memory} (green: ours; dashed: no other is better in both)", ylabel=time)
    axis.set(xlim=(0, None), ylim=(0, None))
    figure.supxlabel(note, fontsize=7, color="#555555")
    figure.savefig(path, dpi=130, format="png")


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both coordinates, from left to right."""
    front: list[Point] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front
