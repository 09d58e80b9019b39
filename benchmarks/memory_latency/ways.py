"""The ways to train the same model: ours, torch's own, and those of peers; each in a function of a few lines.

A way takes the bare model, a directory for files and its settings, and gives back a :class:`Way`: what to call with a
batch, and where the gradients are afterwards. Peers are imported inside, in the process of their rung.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["WAYS", "CannotRunError", "Way"]


class CannotRunError(RuntimeError):
    """This machine has not what the way needs; the message says what."""


@dataclass
class Way:
    """A model that is ready to train.

    ``run`` is called with a micro-batch inside ``around()`` and its result's gradient is pushed back; ``microbatches``
    is how often that happens in a step. ``gradients`` tells them by name, after a step.
    """

    run: Callable[[Tensor], Tensor]
    gradients: Callable[[], dict[str, Tensor]]
    zero: Callable[[], None]
    microbatches: int = 1
    backward: Callable[[Tensor], None] = torch.Tensor.backward
    #: Of an OffloadModel: its own counts and its own prediction.
    statistics: Callable[[], dict[str, Any]] = dict
    estimate: Callable[[int], dict[str, Any]] = field(default=lambda rows: {})


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _join_group(device: str) -> None:
    """A process group of this process alone, once."""
    import torch.distributed as dist

    backend = "gloo" if torch.device(device).type == "cpu" else "nccl"
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise CannotRunError(f"this torch was built without the backend {backend}")
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def plain(model: nn.Sequential, home: Path, device: str, microbatches: int = 1) -> Way:
    """The whole model in memory, its activations kept."""
    model.to(device)
    return Way(model, lambda: _gradients(model), model.zero_grad, microbatches)


def checkpointed(model: nn.Sequential, home: Path, device: str, microbatches: int = 1) -> Way:
    """``torch.utils.checkpoint`` around each layer: what enters it is kept, the rest is computed again."""
    model.to(device)

    def run(batch: Tensor) -> Tensor:
        for layer in model:
            batch = checkpoint(layer, batch, use_reentrant=False)
        return batch

    return Way(run, lambda: _gradients(model), model.zero_grad, microbatches)


def saved_on_cpu(model: nn.Sequential, home: Path, device: str) -> Way:
    """``torch.autograd.graph.save_on_cpu``: activations rest in host memory, weights stay on the device."""
    model.to(device)

    def run(batch: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=device != "cpu"):
            output: Tensor = model(batch)
        return output

    return Way(run, lambda: _gradients(model), model.zero_grad)


def fsdp2(model: nn.Sequential, home: Path, device: str) -> Way:
    """``fully_shard`` on each layer with ``CPUOffloadPolicy``, in one process: torch's own offload of parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    kind = torch.device(device).type
    _join_group(device)
    mesh = init_device_mesh(kind, (1,))
    policy = CPUOffloadPolicy(pin_memory=kind != "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)

    def gradients() -> dict[str, Tensor]:
        return {name: getattr(gradient, "_local_tensor", gradient) for name, gradient in _gradients(model).items()}

    return Way(model, gradients, model.zero_grad)


def deepspeed_zero3(model: nn.Sequential, home: Path, device: str) -> Way:
    """DeepSpeed's ZeRO-3 with parameters offloaded to host memory, in one process."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": device != "cpu"},
            "offload_optimizer": {"device": "cpu", "pin_memory": device != "cpu"},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    # One process; DeepSpeed asks for these as a launcher would set them, and takes a process group that is there.
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    _join_group(device)
    names, parameters = zip(*model.named_parameters(), strict=True)
    # Never stepped. Without an optimizer the engine is for inference, and has no gradients.
    optimizer = torch.optim.SGD(parameters, 0.0)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    except Exception as error:  # whatever it is, it is theirs, and the rung's row tells it
        raise CannotRunError(f"deepspeed.initialize raised {type(error).__name__}: {error}") from error

    def zero() -> None:
        engine.zero_grad()
        engine.optimizer.zero_grad()

    def gradients() -> dict[str, Tensor]:
        found = {name: safe_get_full_grad(parameter) for name, parameter in zip(names, parameters, strict=True)}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    return Way(engine, gradients, zero, backward=engine.backward)


def fairscale_offload(model: nn.Sequential, home: Path, device: str, slices: int = 4) -> Way:
    """fairscale's OffloadModel, whose streams need a GPU."""
    if device == "cpu":
        raise CannotRunError("fairscale's OffloadModel needs a GPU: it copies in CUDA streams")
    from fairscale.experimental.nn.offload import OffloadModel as Theirs

    offloaded = Theirs(
        model,
        device=torch.device(device),
        offload_device=torch.device("cpu"),
        num_slices=slices,
        checkpoint_activation=True,
    )
    names = [name for name, _ in model.named_parameters()]

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad for name, p in zip(names, offloaded.parameters(), strict=True) if p.grad is not None}

    return Way(offloaded, gradients, offloaded.zero_grad)


def ours(model: nn.Sequential, home: Path, device: str, disk: bool = True, **settings: Any) -> Way:
    """``OffloadModel`` with these settings; its home is in files, or in host memory."""
    from dataclasses import asdict

    from offload import OffloadModel

    offloaded = OffloadModel(model, device, home if disk else "cpu", **settings)

    def estimate(rows: int) -> dict[str, Any]:
        found = asdict(offloaded.estimate(rows))
        # A home on disk is called by its path, which is nothing for a result.
        found["peak_bytes"] = {tier.split(" (")[0]: nbytes for tier, nbytes in found["peak_bytes"].items()}
        return found

    return Way(
        offloaded,
        lambda: _gradients(offloaded),
        offloaded.zero_grad,
        statistics=lambda: asdict(offloaded.statistics()),
        estimate=estimate,
    )


WAYS: dict[str, Callable[..., Way]] = {
    way.__name__: way for way in (plain, checkpointed, saved_on_cpu, fsdp2, deepspeed_zero3, fairscale_offload, ours)
}
