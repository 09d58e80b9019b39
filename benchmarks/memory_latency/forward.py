"""The ways to run the same model forward only: what inference libraries offer for models that memory does not hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory_latency.ways import CannotRunError

__all__ = ["FORWARD_WAYS"]

Run = Callable[[Tensor], Tensor]


def plain(model: nn.Sequential, home: Path, device: str) -> Run:
    """The whole model in memory."""
    return model.to(device)


def ours(model: nn.Sequential, home: Path, device: str, **settings: Any) -> Run:
    """``OffloadModel``, at home in files."""
    from offload import OffloadModel

    return OffloadModel(model, device, home, **settings)


def accelerate_disk(model: nn.Sequential, home: Path, device: str) -> Run:
    """accelerate's ``disk_offload``: hooks read the weights of each leaf module from files before it runs."""
    from accelerate import disk_offload

    where = home / "accelerate"
    where.mkdir(exist_ok=True)
    offloaded: Run = disk_offload(model, str(where), execution_device=torch.device(device))
    return offloaded


def diffusers_groups(model: nn.Sequential, home: Path, device: str) -> Run:
    """diffusers' group offloading, one layer a group, at home in files."""
    from diffusers.hooks import apply_group_offloading

    where = home / "diffusers"
    where.mkdir(exist_ok=True)
    outer = nn.Module()
    outer.layers = model  # it makes groups of the layers of children that are an nn.Sequential
    try:
        apply_group_offloading(
            outer,
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=device != "cpu",
            offload_to_disk_path=str(where),
        )
    except (ValueError, RuntimeError) as error:
        raise CannotRunError(f"apply_group_offloading raised {type(error).__name__}: {error}") from error
    return model


FORWARD_WAYS: dict[str, Callable[..., Run]] = {
    way.__name__: way for way in (plain, ours, accelerate_disk, diffusers_groups)
}
