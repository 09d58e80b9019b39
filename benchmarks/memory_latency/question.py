"""What does each way to save memory save, and what does it cost in time? The picture that a user decides by.

Every way trains the same ``nn.Sequential`` on the same batch: the whole in memory, torch's own ways to use less, peers,
and ``OffloadModel`` with each of its settings changed in turn. Each has a process of its own and takes its steps in
turn with plain torch. In another process glibc's heap is told to give freed blocks back at once: there the peak of a
step is what the way needs. The peak of the timed steps, with the heap as it comes, stands beside it.

What ``estimate()`` predicts after half of the turns stands beside what was measured.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.frame.arguments import at_least
from benchmarks.frame.cache import cache_directory
from benchmarks.frame.environment import filesystem_of, here
from benchmarks.frame.limits import measure_limits
from benchmarks.frame.outcome import Outcome, Rung, failures_of_ours
from benchmarks.frame.pairs import Paired, run_pairs
from benchmarks.frame.report import publish
from benchmarks.frame.rungs import run_rungs
from benchmarks.frame.table import reasons
from benchmarks.memory_latency.results import Measured, draw, forward_table, prediction_table, training_table
from benchmarks.memory_latency.shape import Shape, add_shape_arguments, shape_of

__all__ = ["add_arguments", "broken_bounds", "run"]

REFERENCE = "torch, all in memory"
MAXIMUM_DIFFERENCE = 1e-4  # of gradients and outputs, relative to the greatest element of the tensor
MEASURE = "benchmarks.memory_latency.steps"
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}  # so that a peak is what is in use and not what once was

#: Ways beside ours: name, function of ``ways.py``, settings, peer.
OTHERS: list[tuple[str, str, dict[str, Any], str]] = [
    ("torch, 4 micro-batches", "plain", {"microbatches": 4}, ""),
    ("torch.utils.checkpoint", "checkpointed", {}, ""),
    ("torch.utils.checkpoint, 4 micro-batches", "checkpointed", {"microbatches": 4}, ""),
    ("save_on_cpu", "saved_on_cpu", {}, ""),
    ("FSDP2, CPUOffloadPolicy", "fsdp2", {}, ""),
    ("DeepSpeed ZeRO-3, offload_param", "deepspeed_zero3", {}, "deepspeed"),
    ("fairscale OffloadModel", "fairscale_offload", {}, "fairscale-offload"),
]
KEEP: dict[str, Any] = {"checkpoint_activation": False}
CHECKPOINT: dict[str, Any] = {"checkpoint_activation": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes, the number of pairs, where homes are, and which rungs."""
    parser.add_argument("--device", default="cpu", help="where layers compute")
    add_shape_arguments(parser, layers=12, dim=512, rows=16, positions=32)
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="steps in turn with plain torch")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="only rungs with one of these in their names"
    )
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk for the shards")


def run(arguments: argparse.Namespace) -> int:
    """Runs the rungs, prints the tables; 0 if the gradients agree and every budget was kept."""
    at_least(arguments, "pairs")
    shape = shape_of(arguments, layers=4, rows=4)
    environment = here()
    print("\n".join(environment.lines()))
    arguments.home.mkdir(parents=True, exist_ok=True)
    limits = measure_limits(arguments.home, device=arguments.device)
    print(f"limits   {limits.line()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="memory-latency-", dir=arguments.home) as home:
        common = {"shape": asdict(shape), "home": home, "device": arguments.device}
        asked_after = 1 + arguments.pairs // 2
        reference, *training = _training(shape, {**common, "asked_after": asked_after}, arguments.only)
        first, paired = run_pairs(reference, training, arguments.pairs)
        in_use = run_rungs(_in_use(shape, common, arguments.only)) if arguments.device == "cpu" else []
        forward: list[Paired] = []
        if rungs := _forward(shape, common, arguments.only):
            forward_first, forward = run_pairs(rungs[0], rungs[1:], arguments.pairs)
            forward.insert(0, _with_itself(forward_first))
    pairs = [_with_itself(first), *paired]
    measured = [Measured(pair, outcome) for pair, outcome in zip_longest(pairs, in_use)]
    sections = [
        training_table(measured, shape, limits),
        prediction_table(measured),
        forward_table(forward, shape, limits),
        reasons([*(pair.outcome for pair in paired), *_missing(measured), *(pair.outcome for pair in forward)]),
        f"{shape.layers} blocks, {shape.parameters / 1e6:.0f} M parameters in fp32, {shape.rows} rows of "
        f"{shape.positions} tokens. A step is forward, loss and backward, gradients at home. Peaks are above a process "
        "that took a step of two such blocks in the same way: libraries, threads and their scratch memory. Predictions "
        f"are made after {asked_after} of the turns. Limits "
        "count a forward and a backward with nothing recomputed, parameters read and gradients written, the bytes of "
        "files, and of ours those between its places in memory; of peers these are not counted. Ratios: to the step of "
        "plain torch in the same pair, median (least to greatest).",
    ]
    return publish(
        arguments,
        environment,
        sections=[section for section in sections if section],
        outcomes=[*(way.paired.outcome for way in measured), *in_use, *(pair.outcome for pair in forward)],
        broken=broken_bounds(measured, [pair.outcome for pair in forward]),
        draw=lambda path: draw(path, measured, environment),
        limits=limits,
        may_fail=[o for o in (*(pair.outcome for pair in (*paired, *forward)), *in_use) if o.rung.peer],
        ratios=_ratios(measured, forward),
        facts=[("homes", f"a directory on {filesystem_of(arguments.home)}")],
    )


def _ratios(measured: Sequence[Measured], forward: Sequence[Paired]) -> dict[str, float]:
    """Time and peak in use of each way, to those of plain torch."""
    found: dict[str, float] = {}
    reference, *others = measured
    for way in others:
        if way.complete:
            found[f"{way.name}: time"] = way.paired.ratio()
            if reference.complete and reference.peak_bytes > 0:
                found[f"{way.name}: peak"] = way.peak_bytes / reference.peak_bytes
    found |= {f"{pair.outcome.rung.name}: time": pair.ratio() for pair in forward[1:] if pair.steps}
    return found


def _training(shape: Shape, common: dict[str, Any], only: Sequence[str]) -> list[Rung]:
    """The reference first; then the other ways, then ours."""
    ways = [*OTHERS, *((f"ours: {name}", "ours", settings, "") for name, settings in _ours(shape).items())]
    return [
        Rung(name, f"{MEASURE}:train", {"way": way, "settings": settings, **common}, peer=peer)
        for name, way, settings, peer in [
            (REFERENCE, "plain", {}, ""),
            *(way for way in ways if any(word in way[0] for word in only)),
        ]
    ]


def _in_use(shape: Shape, common: dict[str, Any], only: Sequence[str]) -> list[Rung]:
    """The same ways again, for their peaks."""
    return [
        replace(rung, name=f"{rung.name}, in use", target=f"{MEASURE}:in_use", environment=GIVE_BACK)
        for rung in _training(shape, common, only)
    ]


def _missing(measured: Sequence[Measured]) -> list[Outcome]:
    """The peaks that there are none of, although the way was timed."""
    return [way.in_use for way in measured if way.in_use is not None and way.paired.outcome.result is not None]


def _ours(shape: Shape) -> dict[str, dict[str, Any]]:
    """Each setting of OffloadModel changed in turn: home, slices, keep or checkpoint, micro-batches, slots, budget."""
    most, half, few = shape.layers, shape.layers // 2, shape.layers // 4
    chosen = {
        f"host, {few} slices, keep": {"disk": False, "num_slices": few, **KEEP},
        f"host, {few} slices, checkpoint": {"disk": False, "num_slices": few, **CHECKPOINT},
        f"host, {most} slices, checkpoint": {"disk": False, "num_slices": most, **CHECKPOINT},
        f"disk, {few} slices, keep": {"num_slices": few, **KEEP},
        f"disk, {most} slices, keep": {"num_slices": most, **KEEP},
        f"disk, {few} slices, checkpoint": {"num_slices": few, **CHECKPOINT},
        f"disk, {half} slices, checkpoint": {"num_slices": half, **CHECKPOINT},
        f"disk, {most} slices, checkpoint": {"num_slices": most, **CHECKPOINT},
        f"disk, {most} slices, checkpoint, {half} slots": {"num_slices": most, "num_slots": half, **CHECKPOINT},
        f"disk, {most} slices, checkpoint, 2 micro-batches": {
            "num_slices": most,
            "num_microbatches": 2,
            **CHECKPOINT,
        },
        f"disk, {most} slices, checkpoint, 4 micro-batches": {
            "num_slices": most,
            "num_microbatches": 4,
            **CHECKPOINT,
        },
    }
    layer_bytes = 4 * shape.parameters // shape.layers
    for layers in (5, 8, 16):  # two slots and two sets of gradients of one layer are 4; the rest is for boundaries
        budget = layers * layer_bytes
        chosen[f"disk, budget {budget >> 20} MiB"] = {"num_slices": None, "memory_budget": budget, **CHECKPOINT}
    return chosen


def _forward(shape: Shape, common: dict[str, Any], only: Sequence[str]) -> list[Rung]:
    ways: list[tuple[str, str, dict[str, Any], str]] = [
        (f"ours: disk, {shape.layers} slices", "ours", {"num_slices": shape.layers}, ""),
        ("accelerate disk_offload", "accelerate_disk", {}, "accelerate"),
        ("diffusers group offloading, disk", "diffusers_groups", {}, "diffusers"),
    ]
    ways = [way for way in ways if any(word in way[0] for word in only)]
    return ways and [
        Rung(f"forward, {name}", f"{MEASURE}:forward", {"way": way, "settings": settings, **common}, peer=peer)
        for name, way, settings, peer in [
            (REFERENCE, "plain", {}, ""),
            *ways,
        ]
    ]


def _with_itself(reference: Outcome) -> Paired:
    """The reference as a row among the others; its first turn was the warm-up."""
    steps = reference.steps[1:]
    return Paired(reference, steps, steps)


def broken_bounds(measured: Sequence[Measured], forward: Sequence[Outcome]) -> list[str]:
    """What must hold and does not, one line each: rungs run, gradients are those of plain torch, budgets are kept."""
    outcomes = [*(way.paired.outcome for way in measured), *forward]
    broken = failures_of_ours([*outcomes, *(way.in_use for way in measured if way.in_use is not None)])
    for outcome in outcomes:
        if outcome.result is None:
            continue
        if not outcome.result["difference"] <= MAXIMUM_DIFFERENCE:
            broken.append(
                f"{outcome.rung.name}: differs from plain torch by {outcome.result['difference']:.1e}, "
                f"at most {MAXIMUM_DIFFERENCE:.0e} is allowed"
            )
        budget = outcome.rung.arguments["settings"].get("memory_budget")
        held = outcome.result.get("statistics", {}).get("peak_device_bytes", 0)
        if budget is not None and held > budget:
            broken.append(f"{outcome.rung.name}: the engine held {held:,} bytes, over its budget of {budget:,}")
    return broken
