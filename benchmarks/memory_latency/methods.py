"""The methods that train one model (ours, PyTorch's own, those of peers), and the process of a case.

A method takes the bare model, a directory for files, a device and its settings. Peers are imported inside. A case
builds one method, takes a step in each turn, and compares gradients. The floor of its peak is a process that
has used the same method with a model of two layers: it has loaded libraries, started threads and made their scratch
memory.
"""

import ctypes
import gc
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.case import CannotRunError
from benchmarks.harness.io_counters import measure
from benchmarks.harness.worker import Reporter
from benchmarks.models.transformer import Checkpointed, Stack

FLOOR = "after a step of two layers"


@dataclass
class Method:
    """A model that is ready to train.

    A step calls ``run`` with each of ``microbatches`` parts of the batch; after the backward of each loss ``gradients``
    tells the gradients by name. ``model`` is the OffloadModel, where there is one.
    """

    run: Callable[[Tensor], Tensor]
    gradients: Callable[[], dict[str, Tensor]]
    zero: Callable[[], None]
    microbatches: int = 1
    model: Any = None


def _method(model: nn.Module, run: Callable[[Tensor], Tensor] | None = None, **more: Any) -> Method:
    return Method(run or model, lambda: _gradients(model), model.zero_grad, **more)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def plain(model: nn.Sequential, home: Path, device: str, microbatches: int = 1) -> Method:
    """The whole model in memory, its activations kept."""
    return _method(model.to(device), microbatches=microbatches)


def checkpointed(model: nn.Sequential, home: Path, device: str, microbatches: int = 1) -> Method:
    """``torch.utils.checkpoint`` around each layer: its input is kept, the rest is computed again."""
    return _method(model.to(device), Checkpointed(model), microbatches=microbatches)


def saved_on_cpu(model: nn.Sequential, home: Path, device: str) -> Method:
    """``torch.autograd.graph.save_on_cpu``: activations in host memory, weights on the device."""
    model.to(device)

    def run(batch: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=device != "cpu"):
            output: Tensor = model(batch)
        return output

    return _method(model, run)


def fairscale_offload(model: nn.Sequential, home: Path, device: str, slices: int = 4) -> Method:
    """fairscale's OffloadModel, whose streams need a GPU."""
    if device == "cpu":
        raise CannotRunError("fairscale's OffloadModel needs a GPU: it copies in CUDA streams")
    from fairscale.experimental.nn.offload import OffloadModel as Theirs

    places = {"device": torch.device(device), "offload_device": torch.device("cpu")}
    offloaded = Theirs(model, **places, num_slices=slices, checkpoint_activation=True)
    names = [name for name, _ in model.named_parameters()]

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad for name, p in zip(names, offloaded.parameters(), strict=True) if p.grad is not None}

    return Method(offloaded, gradients, offloaded.zero_grad)


def ours(model: nn.Sequential, home: Path, device: str, disk: bool = True, **settings: Any) -> Method:
    """``OffloadModel`` with these settings, stored in files or in host memory."""
    from offload import OffloadModel

    offloaded = OffloadModel(model, device, home if disk else "cpu", **settings)
    return Method(offloaded, lambda: _gradients(offloaded), offloaded.zero_grad, model=offloaded)


METHODS: dict[str, Callable[..., Method]] = {
    method.__name__: method for method in (plain, checkpointed, saved_on_cpu, fairscale_offload, ours)
}


def train(report: Reporter, **how: Any) -> dict[str, Any]:
    """Steps (forward, loss, backward). The method "plain" leaves its gradients in a file for the others."""
    prepared, batch = _build(report, **how)
    device, saved = how["device"], Path("gradients.pt")
    report.phase("steps")
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    for k in report.turns():
        report.step(**measure(lambda: _step(prepared, batch), prepared.model, device)[1])
        if k == 0 and how["method"] == "plain" and prepared.microbatches == 1:
            torch.save({name: g.cpu() for name, g in prepared.gradients().items()}, saved)
    device_peak = torch.cuda.max_memory_allocated(device) if device != "cpu" else 0
    report.phase("end")
    return {
        "device_peak": device_peak,
        "difference": greatest_difference(prepared.gradients(), torch.load(saved, mmap=True)),
    }


def in_use(report: Reporter, **how: Any) -> dict[str, Any]:
    """Measures the peak of one step, after a step that allocates everything that later ones reuse."""
    prepared, batch = _build(report, **how)
    for phase in ("a first step", "steps"):
        report.phase(phase)
        _step(prepared, batch)
    report.phase("end")
    return {}


def _build(
    report: Reporter, method: str, device: str, stack: dict[str, Any], settings: dict[str, Any]
) -> tuple[Method, Tensor]:
    """The method, made after the floor was noted, and its batch."""
    make, chosen = METHODS[method], Stack(**stack)
    small = replace(chosen, blocks=2)
    few = settings | ({"num_slices": 2} if "num_slices" in settings else {})
    first = make(small.build(), folder(), device, **few)
    _step(first, small.batch().to(device))
    del first
    tidy()
    report.phase(FLOOR)
    return make(chosen.build(), folder(), device, **settings), chosen.batch().to(device)


def folder() -> Path:
    """A new one, on the disk that the case works on."""
    return Path(tempfile.mkdtemp(dir=".")).absolute()


def tidy() -> None:
    """Drops what is unreachable, and lets glibc return its free heap pages to the kernel."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


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
        (method.run(part).float().square().sum() / batch.numel()).backward()
