"""Draws a trace: a row over time for compute and each lane, with the plan's tokens; below it bytes by tier.

``python -m offload.telemetry.timeline step.json step.png`` draws what :meth:`OffloadModel.trace
<offload.OffloadModel.trace>` wrote. Needs matplotlib, which the extra ``bench`` installs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["draw_timeline"]

#: By the first letter of a token: loads, forward, backward, drains, updates, waits.
_COLOURS = {"L": "#56b4e9", "F": "#009e73", "B": "#0072b2", "D": "#e69f00", "U": "#cc79a7", "w": "#d55e00"}
_COLOURS |= {"K": _COLOURS["F"], "G": _COLOURS["B"], "V": _COLOURS["U"]}
_OTHERS = "#bbbbbb"
_NAMED_FROM = 0.012  # share of the width from which a span has room for its token


def draw_timeline(trace: str | os.PathLike[str], picture: str | os.PathLike[str]) -> None:
    """Draws a trace file as a PNG (or what else the suffix of ``picture`` names).

    Raises:
        ImportError: without matplotlib.
        ValueError: if the file has no spans.
    """
    from matplotlib.figure import Figure

    entries = json.loads(Path(trace).read_text(encoding="utf-8"))["traceEvents"]
    names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    spans = [entry for entry in entries if entry["ph"] == "X"]
    if not spans:
        raise ValueError(f"expected a trace with spans, got none (trace={os.fspath(trace)!r})")
    rows = sorted(names, key=lambda tid: (names[tid] != "compute", names[tid]))
    end = max(span["ts"] + span["dur"] for span in spans)
    counters: dict[str, list[tuple[float, int]]] = {}
    for entry in entries:
        if entry["ph"] == "C":
            counters.setdefault(entry["name"], []).append((entry["ts"], entry["args"]["bytes"]))
    figure = Figure(figsize=(12, 1.2 + 0.5 * len(rows) + 1.1 * len(counters)), layout="constrained")
    axes = figure.subplots(
        1 + len(counters), 1, sharex=True, squeeze=False, height_ratios=[0.5 * len(rows), *[1.1] * len(counters)]
    )[:, 0]
    for span in spans:
        _draw_span(axes[0], rows.index(span["tid"]), span, end)
    axes[0].set_yticks(range(len(rows)), [names[tid] for tid in rows])
    axes[0].invert_yaxis()
    axes[0].set_xlim(0, end / 1e3)
    for axis, (name, samples) in zip(axes[1:], counters.items(), strict=True):
        times, sizes = zip(*samples, strict=True)
        mebibytes = [nbytes / 2**20 for nbytes in (*sizes, sizes[-1])]
        axis.fill_between(
            [*(time / 1e3 for time in times), end / 1e3], mebibytes, step="post", color="#56b4e9", alpha=0.6
        )
        axis.set_ylim(bottom=0)
        axis.set_ylabel("MiB", fontsize=8)
        axis.set_title(name, fontsize=9, loc="left")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[-1].set_xlabel("milliseconds", fontsize=8)
    figure.savefig(picture, dpi=110)


def _draw_span(axis: Any, row: int, span: dict[str, Any], end: float) -> None:
    token = span["name"]
    colour = _COLOURS.get(token[0], _OTHERS) if token[1:2].isdigit() or token.startswith("wait") else _OTHERS
    begin, width = span["ts"] / 1e3, span["dur"] / 1e3
    axis.barh(row, width, left=begin, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
    if width * 1e3 >= _NAMED_FROM * end:
        axis.text(begin + width / 2, row, token, ha="center", va="center", fontsize=6, clip_on=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m offload.telemetry.timeline", description="draws a trace of an OffloadModel"
    )
    parser.add_argument("trace", type=Path, help="what model.trace() wrote")
    parser.add_argument("picture", type=Path, help="a PNG, or what else matplotlib writes")
    arguments = parser.parse_args()
    draw_timeline(arguments.trace, arguments.picture)


if __name__ == "__main__":
    main()
