"""The process of a case: builds one method, takes a step in each turn, and compares gradients or outputs.

The floor of a peak is a process that has used the same method with a model of two layers: it has loaded libraries,
started threads and made their scratch memory.
"""

import gc
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.memory import return_freed_memory
from benchmarks.harness.worker import Reporter
from benchmarks.memory_latency.methods import FORWARD_METHODS, METHODS, Method
from benchmarks.models.transformer import Stack

FLOOR = "after a step of two layers"


def train(report: Reporter, asked_after: int, **how: Any) -> dict[str, Any]:
    """Steps (forward, loss, backward). The method "plain" leaves its gradients in ``home`` for the others.

    ``asked_after`` so many turns the method is asked for its prediction.
    """
    prepared, batch = _build(report, METHODS, _step, **how)
    device, saved = how["device"], Path(how["home"], "gradients.pt")
    report.phase("steps")
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    estimate: dict[str, Any] = {}
    for k in report.turns():
        report.step(**measure(lambda: _step(prepared, batch), prepared.model, device)[1])
        if k + 1 == asked_after and prepared.model is not None:
            estimate = asdict(prepared.model.estimate(len(batch)))
            # The tier on disk is named with its path, which only this machine has.
            peaks = estimate["peak_bytes"].items()
            estimate["peak_bytes"] = {tier.split(" (")[0]: nbytes for tier, nbytes in peaks}
        if k == 0 and how["method"] == "plain" and prepared.microbatches == 1:
            torch.save({name: g.cpu() for name, g in prepared.gradients().items()}, saved)
    device_peak = torch.cuda.max_memory_allocated(device) if device != "cpu" else 0
    report.phase("end")
    return {
        "estimate": estimate,
        "statistics": counts_of(prepared.model),
        "device_peak": device_peak,
        "difference": greatest_difference(prepared.gradients(), torch.load(saved, mmap=True)),
    }


def in_use(report: Reporter, **how: Any) -> dict[str, Any]:
    """One step, for its peak, after another that allocates what is allocated once, in a heap that returns memory."""
    prepared, batch = _build(report, METHODS, _step, **how)
    for phase in ("a first step", "steps"):
        report.phase(phase)
        _step(prepared, batch)
    report.phase("end")
    return {}


@torch.no_grad()
def forward(report: Reporter, **how: Any) -> dict[str, Any]:
    """Forward passes. The method "plain" leaves its output in ``home`` for the others."""
    prepared, batch = _build(report, FORWARD_METHODS, lambda method, rows: method.run(rows), **how)
    output, saved = torch.empty(0), Path(how["home"], "output.pt")
    report.phase("steps")
    for _ in report.turns():
        output, values = measure(lambda: prepared.run(batch), prepared.model, how["device"])
        report.step(**values)
    report.phase("end")
    if not saved.exists():
        torch.save(output.cpu(), saved)
    return {"difference": greatest_difference({"output": output}, {"output": torch.load(saved)})}


def _build(
    report: Reporter,
    methods: Mapping[str, Callable[..., Method]],
    use: Callable[[Method, Tensor], object],
    method: str,
    home: str,
    device: str,
    stack: dict[str, Any],
    settings: dict[str, Any],
) -> tuple[Method, Tensor]:
    """The method, made after the floor was noted, and its batch."""
    make, chosen = methods[method], Stack(**stack)
    small = replace(chosen, blocks=2)
    # As far as a model of two layers can have them.
    few = {name: value for name, value in settings.items() if name not in ("num_slots", "memory_budget")}
    few |= {"num_slices": 2} if "num_slices" in settings else {}
    first = make(small.build(), Path(tempfile.mkdtemp(dir=home)), device, **few)
    use(first, small.batch().to(device))
    del first
    gc.collect()
    return_freed_memory()
    report.memory(FLOOR)
    return make(chosen.build(), Path(tempfile.mkdtemp(dir=home)), device, **settings), chosen.batch().to(device)


def greatest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The greatest difference of any element, relative to the greatest element of its tensor; inf if one is missing."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(
        float((found[name].detach().cpu() - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30))
        for name, tensor in expected.items()
    )


def _step(method: Method, batch: Tensor) -> None:
    method.zero()
    for part in batch.chunk(method.microbatches):
        # Of the mean over the whole batch: the gradients of the parts add up to those of the whole.
        method.backward(method.run(part).float().square().sum() / batch.numel())
