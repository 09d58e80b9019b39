"""Full Adam in bf16 over fp32 masters: what does each way need on the device and on the host, and how fast is it?

Made for a GPU; on the CPU the same rungs run with a small model, which shows that they work and nothing else.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.frame.arguments import at_least
from benchmarks.frame.cache import cache_directory
from benchmarks.frame.environment import Environment, here
from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells, measure_limits
from benchmarks.frame.outcome import Outcome, Rung, failures_of_ours
from benchmarks.frame.plot import bars, new_figure, save
from benchmarks.frame.report import publish
from benchmarks.frame.rungs import run_rungs
from benchmarks.frame.table import markdown_table, mebibytes, reasons
from benchmarks.frame.work import adamw_bytes
from benchmarks.gpu_train.steps import FLOOR
from benchmarks.memory_latency.shape import Shape, add_shape_arguments, shape_of

__all__ = ["add_arguments", "broken_bounds", "limit_seconds", "run"]

#: Of the first loss to the others': weights are drawn alike, and bf16 has eight bits.
MAXIMUM_DIFFERENCE = 0.05
WAYS: list[tuple[str, str, str]] = [  # name, function of ``steps.py``, peer
    ("ours: OffloadModel, OffloadOptimizer", "ours", ""),
    ("torch, all on the device, checkpoint", "resident", ""),
    ("torch, save_on_cpu", "saved_on_cpu", ""),
    ("torchao CPUOffloadOptimizer, checkpoint", "torchao_optimizer", "torchao"),
    ("fairscale OffloadModel", "fairscale_offload", "fairscale-offload"),
]
HOST_UPDATES = ("ours", "torchao_optimizer", "fairscale_offload")  # ways whose optimizer works in host memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes, the device and the number of steps."""
    parser.add_argument("--device", default="cuda", help="where layers compute")
    add_shape_arguments(parser, layers=12, dim=1024, rows=8, positions=512)
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="of which the first is not timed; at least 2")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="only rungs with one of these in their names"
    )
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on the disk to be measured")


def run(arguments: argparse.Namespace) -> int:
    """Runs the rungs; 0 if all that can run here did, and began with the same loss."""
    at_least(arguments, steps=2)
    shape = shape_of(arguments)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"expected a device of this machine, got device={arguments.device!r}; --device cpu runs anywhere"
        )
    environment = here()
    print("\n".join(environment.lines()))
    size = {"file_bytes": 32 << 20, "side": 256} if device.type == "cpu" else {"side": 8192}
    limits = measure_limits(arguments.home, device=str(device), dtype=torch.bfloat16, **size)
    print(f"limits   {limits.line()}", flush=True)
    common: dict[str, Any] = {"shape": asdict(shape), "device": str(device)}
    outcomes = run_rungs(
        [
            Rung(name, "benchmarks.gpu_train.steps:train", {"way": way, **common}, peer=peer)
            for name, way, peer in WAYS
            if any(word in name for word in arguments.only)
        ],
        turns=arguments.steps,
    )
    words = (
        f"{shape.layers} blocks, {shape.parameters / 1e6:,.0f} M parameters, {shape.rows} rows of {shape.positions} "
        "tokens. bf16 arithmetic, fp32 masters, AdamW. Limits count a forward and a backward with nothing recomputed, "
        "AdamW's reads and writes where the way has its states, and what must pass between host and device then."
    )
    return publish(
        arguments,
        environment,
        sections=list(filter(None, [_table(outcomes, shape, limits), reasons(outcomes), words])),
        outcomes=outcomes,
        broken=broken_bounds(outcomes),
        draw=lambda path: _draw(path, outcomes, shape, environment),
        limits=limits,
        may_fail=[outcome for outcome in outcomes if outcome.rung.peer],
    )


def broken_bounds(outcomes: Sequence[Outcome]) -> list[str]:
    """What must hold and does not: rungs run, losses are numbers, and all begin with the same."""
    broken = failures_of_ours(outcomes)
    done = [outcome for outcome in outcomes if outcome.result is not None and outcome.steps]
    for outcome in done:
        losses = [step["loss"] for step in outcome.steps]
        if not all(math.isfinite(loss) for loss in losses):
            broken.append(f"{outcome.rung.name}: losses are {losses}")
        elif abs(losses[0] / done[0].steps[0]["loss"] - 1) > MAXIMUM_DIFFERENCE:
            first = done[0].steps[0]["loss"]
            broken.append(
                f"{outcome.rung.name}: begins with loss {losses[0]:.4f}, {done[0].rung.name} with {first:.4f}"
            )
    return broken


def _seconds(outcome: Outcome) -> float:
    return float(statistics.median(step["seconds"] for step in outcome.steps[1:]))


def limit_seconds(outcome: Outcome, shape: Shape, limits: Limits) -> float:
    """The least seconds for the arithmetic of every way, for AdamW where this one has it, and for what must travel.

    With the optimizer in host memory gradients go there and parameters come back: ours counts these bytes, of peers
    they are those of the fp32 parameters.
    """
    work = {"flops": shape.training_flops}
    if outcome.rung.arguments["way"] not in HOST_UPDATES:
        return limits.step_seconds(**work, on_device_bytes=adamw_bytes(shape.parameters))
    masters = 4.0 * shape.parameters
    step = outcome.steps[-1]
    loaded, drained = step.get("bytes_loaded", masters), step.get("bytes_stored", masters)
    work["copied_bytes"] = adamw_bytes(shape.parameters)
    if limits.host_to_device_bytes is None:
        work["copied_bytes"] += loaded + drained
    else:
        work |= {"loaded_bytes": loaded, "drained_bytes": drained}
    return limits.step_seconds(**work)


def _table(outcomes: Sequence[Outcome], shape: Shape, limits: Limits) -> str:
    header = ["way", "device peak", "host peak", "s/step", "tokens/s", *LIMIT_HEADER, "first loss", "last loss"]
    rows = []
    for outcome in outcomes:
        if outcome.result is None:
            rows.append([outcome.rung.name, outcome.status, *[""] * (len(header) - 2)])
            continue
        seconds = _seconds(outcome)
        rows.append(
            [
                outcome.title,
                mebibytes(outcome.result["device_peak"]),
                mebibytes(outcome.peaks["steps"] - outcome.moments[FLOOR]),
                f"{seconds:.3g}",
                f"{shape.rows * shape.positions / seconds:,.0f}",
                *limit_cells(seconds, limit_seconds(outcome, shape, limits)),
                *(f"{outcome.steps[k]['loss']:.4f}" for k in (0, -1)),
            ]
        )
    return markdown_table(header, rows)


def _draw(path: Path, outcomes: Sequence[Outcome], shape: Shape, environment: Environment) -> Path:
    done = [outcome for outcome in outcomes if outcome.result is not None]
    names = [outcome.rung.name.split(",")[0].removeprefix("ours: ") for outcome in done]
    figure, axes = new_figure(2, f"Full Adam, {shape.parameters / 1e6:,.0f} M parameters")
    figure.set_size_inches(10, 4.5)
    bars(axes[0], names, [(o.result or {})["device_peak"] / 2**20 for o in done], "peak on the device, MiB")
    bars(axes[1], names, [_seconds(outcome) for outcome in done], "seconds a step", "{:.3g}")
    return save(figure, path, environment)
