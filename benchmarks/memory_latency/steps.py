"""What the process of a rung does: builds one way, waits for its turns, takes a step in each, compares gradients."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.frame.child import Report
from benchmarks.frame.heap import return_freed_memory
from benchmarks.frame.traffic import Traffic
from benchmarks.frame.work import counted_between
from benchmarks.memory_latency.forward import FORWARD_WAYS
from benchmarks.memory_latency.shape import Shape
from benchmarks.memory_latency.ways import WAYS, CannotRunError, Way

T = TypeVar("T")

__all__ = ["FLOOR", "forward", "in_use", "train"]

FLOOR = "after a step of two layers"


def train(
    report: Report,
    way: str,
    shape: dict[str, Any],
    home: str,
    device: str,
    settings: dict[str, Any],
    asked_after: int,
) -> dict[str, Any]:
    """Steps (forward, loss, backward) of one way. The way "plain" leaves its gradients in ``home`` for the others.

    ``asked_after`` so many turns the way is asked for its prediction.
    """
    chosen = Shape(**shape)
    where = (_folder(home, "small"), _folder(home, way))
    prepared = _build(report, WAYS[way], _step, chosen, where, device, settings)
    if prepared is None:
        return {}
    batch = chosen.batch().to(device)
    report.phase("steps")
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    estimate: dict[str, Any] = {}
    statistics: dict[str, Any] = {}
    for k in report.turns():
        before, traffic = prepared.statistics(), Traffic()
        seconds, _ = _timed(lambda: _step(prepared, batch), device)
        moved, statistics = traffic.taken(), prepared.statistics()
        report.step(seconds=seconds, **moved, **counted_between(before, statistics))
        if k + 1 == asked_after:
            estimate = prepared.estimate(chosen.rows)
        if k == 0 and way == "plain" and prepared.microbatches == 1:
            torch.save({name: g.cpu() for name, g in prepared.gradients().items()}, Path(home, "gradients.pt"))
    device_peak = torch.cuda.max_memory_allocated(device) if device != "cpu" else 0
    report.phase("end")
    expected = torch.load(Path(home, "gradients.pt"), mmap=True)
    return {
        "difference": greatest_difference(prepared.gradients(), expected),
        "estimate": estimate,
        "statistics": statistics,
        "device_peak": device_peak,
    }


def in_use(
    report: Report, way: str, shape: dict[str, Any], home: str, device: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """A step of one way whose peak counts, after one that makes what is made once.

    For a process whose heap gives freed memory back from its start: what a heap has once, it hands out and keeps.
    """
    chosen = Shape(**shape)
    where = (_folder(home, "small"), _folder(home, way))
    prepared = _build(report, WAYS[way], _step, chosen, where, device, settings)
    if prepared is not None:
        batch = chosen.batch().to(device)
        report.phase("a first step")
        _step(prepared, batch)
        report.phase("steps")
        _step(prepared, batch)
        report.phase("end")
    return {}


def forward(
    report: Report, way: str, shape: dict[str, Any], home: str, device: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Forward passes of one way. The way "plain" leaves its output in ``home`` for the others."""
    chosen = Shape(**shape)
    where = (_folder(home, "small"), _folder(home, way))
    run = _build(report, FORWARD_WAYS[way], _without_graph, chosen, where, device, settings)
    if run is None:
        return {}
    batch, output = chosen.batch().to(device), torch.empty(0)
    report.phase("steps")
    with torch.no_grad():
        for _ in report.turns():
            seconds, output = _timed(lambda: run(batch), device)
            report.step(seconds=seconds)
    report.phase("end")
    saved = Path(home, "output.pt")
    if not saved.exists():
        torch.save(output.cpu(), saved)
    return {"difference": greatest_difference({"output": output}, {"output": torch.load(saved)})}


def _build(
    report: Report,
    make: Callable[..., T],
    use: Callable[[T, Tensor], object],
    chosen: Shape,
    where: tuple[Path, Path],
    device: str,
    settings: dict[str, Any],
) -> T | None:
    """What ``make`` makes of the model, after the floor of the peak was noted.

    None if this machine has not what the way needs, which the report then tells.

    The floor is a process that has used the same way with a model of two layers and given back what it could: it has
    libraries, threads, their scratch memory, and whatever else is made once.
    """
    small = replace(chosen, layers=2)
    try:
        first = make(small.build(), where[0], device, **_for_small(settings))
        use(first, small.batch().to(device))
        del first
        _note_floor(report)
        return make(chosen.build(), where[1], device, **settings)
    except CannotRunError as reason:
        report.skip(str(reason))
        return None


def greatest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The greatest difference of any element, relative to the greatest element of its tensor; inf if one is missing."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(
        float((found[name].detach().cpu() - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30))
        for name, tensor in expected.items()
    )


@torch.no_grad()
def _without_graph(run: Callable[[Tensor], Tensor], batch: Tensor) -> None:
    run(batch)


def _folder(home: str, name: str) -> Path:
    """A folder of its own for the files of one model."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=home))


def _for_small(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings, as far as a model of two layers can have them."""
    small = {name: value for name, value in settings.items() if name not in ("num_slots", "memory_budget")}
    return small | ({"num_slices": 2} if "num_slices" in settings else {})


def _note_floor(report: Report) -> None:
    gc.collect()
    return_freed_memory()
    report.memory(FLOOR)


def _step(way: Way, batch: Tensor) -> None:
    way.zero()
    for piece in batch.chunk(way.microbatches):
        # The mean over the batch, whatever the pieces: their gradients add up to those of the whole.
        way.backward(way.run(piece).float().square().sum() / batch.numel())


def _timed(work: Callable[[], T], device: str) -> tuple[float, T]:
    """Seconds until ``work`` is done, on the device as well; and what it returned."""
    _wait_for(device)
    started = time.perf_counter()
    value = work()
    _wait_for(device)
    return time.perf_counter() - started, value


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
