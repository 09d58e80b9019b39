"""Draws the pictures of the README and the documentation: ``python docs/tools/pictures.py``.

``memory-time.png`` shows recorded ratios only: they are read from the results file of ``memory-latency``, and stored in
the picture's metadata, so that a test can compare both. ``timeline.png`` (with ``--timeline``) traces one training step
of a small model on this machine, with the letters of the plan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS.parent / "benchmarks" / "results" / "memory-latency.jsonl"
PICTURE = DOCS / "memory-time.png"
#: Name of the picture's metadata entry that holds the points, as JSON.
POINTS = "points"

#: Case in the results file -> (label, colour, offset of the label in points, alignment of the label).
PEERS = {
    "torch, all in memory": ("plain PyTorch", "#0072b2", (8, -4), "left"),
    "torch.utils.checkpoint": ("torch.utils.checkpoint", "#56b4e9", (8, 2), "left"),
    "FSDP2, CPUOffloadPolicy": ("FSDP2, CPU offload", "#e69f00", (8, -4), "left"),
    "DeepSpeed ZeRO-3, offload_param": ("DeepSpeed ZeRO-3, CPU offload", "#d55e00", (-8, 8), "right"),
}
OURS = {
    "ours: disk, 12 slices, checkpoint": ("gradstream on disk,\nactivations recomputed", "#009e73", (6, 8), "left"),
    "ours: disk, 12 slices, keep": ("gradstream on disk,\nactivations kept", "#009e73", (-34, -42), "center"),
}


def recorded_points(results: Path = RESULTS) -> dict[str, tuple[float, float]]:
    """For each case of the picture: peak memory and time of a step, plain PyTorch = 1."""
    peaks: dict[str, int] = {}
    times: dict[str, float] = {}
    for line in map(json.loads, results.read_text(encoding="utf-8").splitlines()[1:]):
        name = line["case"]["name"]
        if line["group"] == "in use" and line["result"] is not None:
            peaks[name] = line["peaks"]["steps"] - line["moments"]["after a step of two layers"]
        elif line["group"] == "training" and line["result"] is not None:
            pairs = zip(line["steps"], line["reference"], strict=False)
            times[name] = statistics.median(mine["seconds"] / theirs["seconds"] for mine, theirs in pairs)
    reference = next(iter(PEERS))
    return {name: (peaks[name] / peaks[reference], times[name]) for name in (*PEERS, *OURS)}


def draw_memory_time(points: dict[str, tuple[float, float]], path: Path = PICTURE) -> None:
    """Peak memory against time, one labelled point for each case."""
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    for case, (label, colour, offset, alignment) in (PEERS | OURS).items():
        axis.scatter(*points[case], s=70, color=colour, marker="o" if case in PEERS else "D", zorder=3)
        axis.annotate(
            label,
            points[case],
            xytext=offset,
            textcoords="offset points",
            ha=alignment,
            fontsize=10,
            weight="normal" if case in PEERS else "bold",
        )
    axis.plot(*zip(*(points[case] for case in OURS), strict=True), color="#009e73", linewidth=1)
    axis.set_xlabel("peak memory of a training step above the libraries (plain PyTorch = 1)")
    axis.set_ylabel("time of a step (plain PyTorch = 1)")
    axis.set_xlim(0, 1.08 * max(memory for memory, _ in points.values()))
    axis.set_ylim(0, 1.15 * max(time for _, time in points.values()))
    axis.grid(color="#dddddd", linewidth=0.5)
    figure.savefig(path, dpi=130, metadata={POINTS: json.dumps(points)})


#: Letters of the plan -> (what they mean, colour). A small letter is the same for the gradient of a boundary.
LETTERS = {
    "L": ("load", "#56b4e9"),
    "F": ("forward", "#009e73"),
    "K": ("forward that keeps its graph", "#7bd3b4"),
    "B": ("recompute and backward", "#0072b2"),
    "G": ("backward of a kept graph", "#6aaed6"),
    "S": ("write a boundary (s: its gradient)", "#c49c94"),
    "P": ("read it back (p: its gradient)", "#e6d2cc"),
    "D": ("drain gradients", "#e69f00"),
    "U": ("update", "#cc79a7"),
}
TRACKS = ("compute", "load lane", "update lane", "boundary lane", "drain lane")


def traced_step() -> list[tuple[str, str, float, float]]:
    """Track, token, begin and milliseconds of a step on disk, which begins with the updates of the one before.

    Of the boundaries, and of the graphs of cells, only some fit in the memory that they may have. The shortest of many
    steps is shown: the one that least else on this machine disturbed.
    """
    import torch
    from torch import nn

    from offload import MemoryPolicy, OffloadModel, OffloadOptimizer

    rows, width, shards = 1024, 512, 4
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(shards)))
    boundary = 4 * rows * width // 2
    memory = MemoryPolicy(slots=2, graph_bytes=3 * boundary, boundary_bytes=5 * boundary)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as home:
        model = OffloadModel(layers, "cpu", home, num_slices=shards, num_microbatches=2, memory=memory)
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=1.0)
        batch, trace = torch.randn(rows, width), Path(home) / "step.json"
        steps = []
        for _ in range(100):
            with model.trace(trace):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            entries = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
            tracks = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
            spans = [entry for entry in entries if entry["ph"] == "X"]
            steps.append([(tracks[span["tid"]], span["name"], span["ts"] / 1e3, span["dur"] / 1e3) for span in spans])
        print(model.plan())
        model.close()
    return min(steps[5:], key=end_of)


def end_of(spans: list[tuple[str, str, float, float]]) -> float:
    """When the last span ends."""
    return max(begin + duration for _, _, begin, duration in spans)


def draw_timeline(spans: list[tuple[str, str, float, float]], path: Path) -> None:
    """A row for compute and for each lane; forward and backward are told apart by a line."""
    end = end_of(spans)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    labelled: dict[str, float] = {}  # by track, where its last label is
    for track, token, begin, duration in spans:
        if token[0].upper() not in LETTERS or not token[1:2].isdigit():
            continue  # compute waits
        row, shown = TRACKS.index(track), max(duration, 0.002 * end)
        middle, wide = begin + shown / 2, duration > 0.03 * end
        colour = LETTERS[token[0].upper()][1]
        axis.barh(row, shown, left=begin, height=0.84, color=colour, edgecolor="white", linewidth=0.8 if wide else 0)
        if wide or middle - labelled.get(track, -end) > 0.011 * end:
            axis.text(middle, row, token, ha="center", va="center", fontsize=9, rotation=0 if wide else 90)
            labelled[track] = middle
    turn = min(begin for _, token, begin, _ in spans if token[0] in "BG")
    axis.axvline(turn, color="#555555", linestyle="--", linewidth=1)
    for where, words in ((turn / 2, "forward"), ((turn + end) / 2, "backward")):
        axis.text(where, -0.62, words, ha="center", fontsize=10)
    axis.set_yticks(range(len(TRACKS)), TRACKS, fontsize=10)
    axis.set_ylim(len(TRACKS) - 0.5, -0.9)
    axis.set_xlim(0, end)
    axis.set_xlabel("milliseconds. F2.0: shard 2, micro-batch 0; L2: shard 2")
    patches = [Patch(color=colour, label=f"{letter}  {words}") for letter, (words, colour) in LETTERS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeline", action="store_true", help="trace and draw timeline.png, too")
    draw_memory_time(recorded_points())
    if parser.parse_args().timeline:
        draw_timeline(traced_step(), DOCS / "timeline.png")
