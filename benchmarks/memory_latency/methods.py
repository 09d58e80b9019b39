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
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.worker import Reporter
from benchmarks.models.transformer import Checkpointed, Stack

FLOOR = "after a step of two layers"


@dataclass
class Method:
    """A model that is ready to train.

    A step calls ``run`` with each of ``microbatches`` parts of the batch and passes each loss to ``backward``;
    ``gradients`` then tells the gradients by name. ``model`` is the OffloadModel, where there is one.
    """

    run: Callable[[Tensor], Tensor]
    gradients: Callable[[], dict[str, Tensor]]
    zero: Callable[[], None]
    microbatches: int = 1
    backward: Callable[[Tensor], None] = torch.Tensor.backward
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


def _join_group(device: str, home: Path) -> None:
    """A process group of this process alone, once."""
    import torch.distributed as dist

    backend = "gloo" if torch.device(device).type == "cpu" else "nccl"
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise CannotRunError(f"this torch was built without the backend {backend}")
    if not dist.is_initialized():
        dist.init_process_group(backend, init_method=f"file://{home / 'store'}", rank=0, world_size=1)


def fsdp2(model: nn.Sequential, home: Path, device: str) -> Method:
    """``fully_shard`` on each layer with ``CPUOffloadPolicy``, in one process: PyTorch's own offload of parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    kind = torch.device(device).type
    _join_group(device, home)
    mesh = init_device_mesh(kind, (1,))
    policy = CPUOffloadPolicy(pin_memory=kind != "cpu")
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, offload_policy=policy)

    def gradients() -> dict[str, Tensor]:
        return {name: getattr(gradient, "_local_tensor", gradient) for name, gradient in _gradients(model).items()}

    return Method(model, gradients, model.zero_grad)


def deepspeed_zero3(model: nn.Sequential, home: Path, device: str) -> Method:
    """DeepSpeed's ZeRO-3 with parameters offloaded to host memory, in one process."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    on_host = {"device": "cpu", "pin_memory": device != "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": on_host, "offload_optimizer": on_host},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    # DeepSpeed asks for these as a launcher would set them, and uses a process group that exists.
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    _join_group(device, home)
    names, parameters = zip(*model.named_parameters(), strict=True)
    # Never stepped. Without an optimizer the engine is for inference, and has no gradients.
    optimizer = torch.optim.SGD(parameters, 0.0)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    except Exception as error:  # of any kind: it is shown in the peer's row
        raise CannotRunError(f"deepspeed.initialize raised {type(error).__name__}: {error}") from error

    def zero() -> None:
        engine.zero_grad()
        engine.optimizer.zero_grad()

    def gradients() -> dict[str, Tensor]:
        found = {name: safe_get_full_grad(parameter) for name, parameter in zip(names, parameters, strict=True)}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    return Method(engine, gradients, zero, backward=engine.backward)


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
    from offload import MemoryPolicy, OffloadModel

    if "num_slots" in settings:
        settings["memory"] = MemoryPolicy.fixed(slots=settings.pop("num_slots"))
    offloaded = OffloadModel(model, device, home if disk else "cpu", **settings)
    return Method(offloaded, lambda: _gradients(offloaded), offloaded.zero_grad, model=offloaded)


_TRAINING = (plain, checkpointed, saved_on_cpu, fsdp2, deepspeed_zero3, fairscale_offload, ours)
METHODS: dict[str, Callable[..., Method]] = {method.__name__: method for method in _TRAINING}


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
        "statistics": counts_of(prepared.model),
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
    # As far as a model of two layers can have them.
    few = {name: value for name, value in settings.items() if name not in ("num_slots", "memory")}
    few |= {"num_slices": 2} if "num_slices" in settings else {}
    first = make(small.build(), Path(tempfile.mkdtemp(dir=".")).absolute(), device, **few)
    _step(first, small.batch().to(device))
    del first
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)  # glibc returns its free heap pages to the kernel
    report.phase(FLOOR)
    return make(chosen.build(), Path(tempfile.mkdtemp(dir=".")).absolute(), device, **settings), chosen.batch().to(
        device
    )


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
