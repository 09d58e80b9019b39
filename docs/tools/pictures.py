"""Draws the pictures of the README and the documentation: ``python docs/tools/pictures.py``.

``memory-time.png`` shows recorded ratios only: they are read from the results file of ``memory-latency``, and stored in
the picture's metadata, so that a test can compare both. ``timeline.png`` (with ``--timeline``) traces one training step
of a small model on this machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

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
    header = json.loads(results.read_text(encoding="utf-8").splitlines()[0])
    ratios = header["ratios"]
    reference, *others = (*PEERS, *OURS)
    return {reference: (1.0, 1.0)} | {case: (ratios[f"{case}: peak"], ratios[f"{case}: time"]) for case in others}


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


def draw_timeline(path: Path) -> None:
    """A later training step of a small model on disk, so that it begins with the updates of the one before."""
    import torch
    from torch import nn

    from offload import OffloadModel, OffloadOptimizer
    from offload.telemetry.timeline import draw_timeline as draw

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.LayerNorm(2048)) for _ in range(6)))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as home:
        model = OffloadModel(
            layers, "cpu", home, num_slices=6, checkpoint_activation=True, num_microbatches=2, num_slots=2
        )
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=1.0)
        rows = torch.randn(512, 2048)
        for step in range(4):
            with model.trace(Path(home) / f"{step}.json"):
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        draw(Path(home) / "3.json", path)
        model.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeline", action="store_true", help="trace and draw timeline.png, too")
    draw_memory_time(recorded_points())
    if parser.parse_args().timeline:
        draw_timeline(DOCS / "timeline.png")
