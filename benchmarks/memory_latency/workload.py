"""The process of a case: builds one method, takes a step in each turn, and compares gradients or outputs.

The floor of a peak is a process that has used the same method with a model of two layers: it has loaded libraries,
started threads and made their scratch memory.
"""

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.harness.io_counters import IOCounters, counted_between
from benchmarks.harness.memory import return_freed_memory
from benchmarks.harness.worker import Reporter
from benchmarks.memory_latency.methods import FORWARD_METHODS, METHODS, CannotRunError, Method
from benchmarks.models.transformer import Stack

T = TypeVar("T")
FLOOR = "after a step of two layers"


def train(report: Reporter, method: str, home: str, device: str, asked_after: int, **how: Any) -> dict[str, Any]:
    """Steps (forward, loss, backward). The method "plain" leaves its gradients in ``home`` for the others.

    ``asked_after`` so many turns the method is asked for its prediction.
    """
    chosen = Stack(**how["stack"])
    prepared = _build(report, METHODS[method], _step, chosen, home, device, how["settings"])
    if prepared is None:
        return {}
    batch = chosen.batch().to(device)
    report.phase("steps")
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    estimate: dict[str, Any] = {}
    statistics: dict[str, Any] = {}
    for k in report.turns():
        before, counters = prepared.statistics(), IOCounters()
        seconds, _ = _timed(lambda: _step(prepared, batch), device)
        moved, statistics = counters.taken(), prepared.statistics()
        report.step(seconds=seconds, **moved, **counted_between(before, statistics))
        if k + 1 == asked_after:
            estimate = prepared.estimate(chosen.rows)
        if k == 0 and method == "plain" and prepared.microbatches == 1:
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


def in_use(report: Reporter, method: str, home: str, device: str, **how: Any) -> dict[str, Any]:
    """One step, for its peak, after another that allocates what is allocated once, in a heap that returns memory."""
    chosen = Stack(**how["stack"])
    prepared = _build(report, METHODS[method], _step, chosen, home, device, how["settings"])
    if prepared is not None:
        batch = chosen.batch().to(device)
        report.phase("a first step")
        _step(prepared, batch)
        report.phase("steps")
        _step(prepared, batch)
        report.phase("end")
    return {}


def forward(report: Reporter, method: str, home: str, device: str, **how: Any) -> dict[str, Any]:
    """Forward passes. The method "plain" leaves its output in ``home`` for the others."""
    chosen = Stack(**how["stack"])
    prepared = _build(report, FORWARD_METHODS[method], _without_graph, chosen, home, device, how["settings"])
    if prepared is None:
        return {}
    batch, output = chosen.batch().to(device), torch.empty(0)
    report.phase("steps")
    with torch.no_grad():
        for _ in report.turns():
            seconds, output = _timed(lambda: prepared.run(batch), device)
            report.step(seconds=seconds)
    report.phase("end")
    saved = Path(home, "output.pt")
    if not saved.exists():
        torch.save(output.cpu(), saved)
    return {"difference": greatest_difference({"output": output}, {"output": torch.load(saved)})}


def _build(
    report: Reporter,
    make: Callable[..., Method],
    use: Callable[[Method, Tensor], object],
    chosen: Stack,
    home: str,
    device: str,
    settings: dict[str, Any],
) -> Method | None:
    """The method, made after the floor was noted; None, which the report tells, if this machine lacks what it needs."""
    small = replace(chosen, blocks=2)
    # As far as a model of two layers can have them.
    few = {name: value for name, value in settings.items() if name not in ("num_slots", "memory_budget")}
    few |= {"num_slices": 2} if "num_slices" in settings else {}
    try:
        first = make(small.build(), Path(tempfile.mkdtemp(dir=home)), device, **few)
        use(first, small.batch().to(device))
        del first
        gc.collect()
        return_freed_memory()
        report.memory(FLOOR)
        return make(chosen.build(), Path(tempfile.mkdtemp(dir=home)), device, **settings)
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
def _without_graph(method: Method, batch: Tensor) -> None:
    method.run(batch)


def _step(method: Method, batch: Tensor) -> None:
    method.zero()
    for part in batch.chunk(method.microbatches):
        # Of the mean over the whole batch: the gradients of the parts add up to those of the whole.
        method.backward(method.run(part).float().square().sum() / batch.numel())


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
