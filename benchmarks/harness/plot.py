"""Memory against time, and curves of training beside those of a reference, in PNG, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Point = tuple[float, float]
OURS, OTHERS = "#009e73", "#0072b2"
REFERENCE = "#777777"


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


def draw_curves(
    path: Path, title: str, reference: str, rows: Mapping[str, Mapping[str, Sequence[Sequence[Point]]]], note: str
) -> None:
    """A row of panels for each quantity, a panel for each method, with the curves of the ``reference`` behind.

    ``rows`` have the curves of each method, one for each of its runs, at the same steps. A line is their mean, and a
    band reaches from the least to the greatest of them. A method without a run has no panel.
    """
    from matplotlib.figure import Figure

    methods = [
        name for name in next(iter(rows.values())) if name != reference and all(each[name] for each in rows.values())
    ]
    count = max(1, len(methods))
    figure = Figure(figsize=(1 + 2.2 * count, 1 + 2.2 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), count, squeeze=False, sharex=True, sharey="row")
    for (quantity, found), panels in zip(rows.items(), axes, strict=True):
        panels[0].set_ylabel(quantity)
        for method, axis in zip(methods, panels, strict=False):
            for name, colour in ((reference, REFERENCE), (method, OURS)):
                if not found[name]:
                    continue
                steps = [step for step, _ in found[name][0]]
                values = list(zip(*([value for _, value in curve] for curve in found[name]), strict=True))
                axis.fill_between(
                    steps, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.25, lw=0
                )
                axis.plot(steps, [sum(v) / len(v) for v in values], color=colour, linewidth=1)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=7)
    for method, axis in zip(methods, axes[0], strict=False):
        axis.set_title(method, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=8)
    figure.suptitle(
        f"{title}\ngreen: each option; grey: {reference}; bands: least to greatest of the seeds", fontsize=10
    )
    figure.supxlabel(note, fontsize=7, color="#555555")
    figure.savefig(path, dpi=130, format="png")
