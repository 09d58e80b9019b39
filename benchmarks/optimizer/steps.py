"""The rungs: one way trains, a step at each turn, and tells its times, its bytes and its parameters.

Bytes are counted by the kernel, so that a peer is counted as we are.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.frame.child import Report
from benchmarks.frame.traffic import Traffic
from benchmarks.optimizer.shape import Shape
from benchmarks.optimizer.ways import WAYS, Way

__all__ = ["FLOOR", "STEPS", "greatest_difference", "run_way", "train"]

FLOOR = "interpreter and torch"
STEPS = "steps"


def train(
    report: Report, way: str, shape: dict[str, Any], home: str, save_after: int, save_to: str | None = None
) -> dict[str, Any]:
    """One rung: builds the way, takes a first step that is not timed, and then one at each turn.

    Args:
        way: a key of ``WAYS``.
        shape: the fields of :class:`Shape`.
        home: an existing directory on disk for whatever the way keeps there.
        save_after: the parameters are saved after so many steps in all, the first one counted.
        save_to: the file they go to.
    """
    importlib.import_module("torch._dynamo")  # every torch optimizer imports it: it is part of what torch alone costs
    report.memory(FLOOR)
    chosen = Shape(**shape)
    return run_way(report, WAYS[way](chosen, Path(home)), save_after, save_to)


def run_way(report: Report, way: Way, save_after: int, save_to: str | None) -> dict[str, Any]:
    """Steps of a way that was built."""
    report.memory("before the first step")
    report.phase("first step")
    first = _step(way, 0)
    report.event("first", **first)
    report.phase(STEPS)
    taken = 1
    if taken == save_after:
        _save(way, save_to)
    for _ in report.turns():
        # A way that leaves work behind must not do it in the others' turns, nor be spared it: of two steps the second
        # is timed, which hides what the first one left.
        for timed in (False, True) if way.leaves_work else (True,):
            values = _step(way, taken)
            taken += 1
            if taken == save_after:
                _save(way, save_to)
            if timed:
                way.settle()
                report.step(**values, kernel=_write_out())
    counts = way.counts()
    report.phase("end")
    return {
        "parameters": way.shape.parameters,
        "tokens": way.shape.tokens,
        "steps": taken,
        "first": first,
        "counts": counts,
    }


def _step(way: Way, index: int) -> dict[str, float]:
    """Seconds, loss and bytes of one step."""
    state, target = way.shape.batch(index)
    traffic, waited = Traffic(), way.waited_seconds()
    processor, started = time.process_time(), time.perf_counter()
    loss = way.step(state, target)
    seconds = time.perf_counter() - started
    processor = time.process_time() - processor
    moved = traffic.taken()
    waited = way.waited_seconds() - waited
    return {"seconds": seconds, "processor": processor, "waited": waited, "loss": loss, **moved}


def _write_out() -> float:
    """Seconds for everything that the page cache holds to reach the disk, so that nobody else's turn pays for it."""
    started = time.perf_counter()
    os.sync()
    return time.perf_counter() - started


def _save(way: Way, path: str | None) -> None:
    if path is not None:
        torch.save({name: value.clone() for name, value in way.parameters()}, path)


def greatest_difference(path: Path, other: Path) -> float:
    """Of any tensor of two saved models: length of the difference relative to the length of the first.

    Raises:
        ValueError: if they are not the same tensors by name.
    """
    first, second = (torch.load(name, mmap=True, weights_only=True) for name in (path, other))
    if set(first) != set(second):
        raise ValueError(
            f"expected the same parameters in both, got {sorted(set(first) ^ set(second))[:4]} in one only"
        )
    return max(_relative(first[name], second[name]) for name in first)


def _relative(first: Tensor, second: Tensor) -> float:
    distance = torch.linalg.vector_norm((first - second).double())
    length = torch.linalg.vector_norm(first.double())
    return float(distance / length) if length else float(distance)
