"""Computes how many layers each stage of a pipeline gets, from measured times or sizes of the layers::

    balance = balance_by_time(torch.cuda.device_count(), model, sample)
    model = Pipe(model, balance, chunks=8)

Both work without a GPU as well. Source: the interface is that of torchgpipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipe.balance.blockpartition import solve
from pipe.balance.profile import profile_sizes, profile_times

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]

Device = torch.device | int | str


def _device(device: Device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """Number of layers of each partition, such that the largest cost of a partition is as small as possible.

    Args:
        cost: cost of each layer.
        partitions: number of partitions.

    Raises:
        ValueError: if the number of partitions is invalid.
    """
    return [len(block) for block in solve(cost, partitions)]


def balance_by_time(
    partitions: int, module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: Device | None = None
) -> list[int]:
    """A balance by time of forward and backward.

    Args:
        partitions: number of partitions.
        module: the layers; they are not changed.
        sample: input of any batch size.
        timeout: seconds to spend on measuring.
        device: the device to measure on; by default the current CUDA device, without one the CPU.

    Returns:
        Number of layers of each partition, for the ``balance`` of :class:`~pipe.Pipe`.

    Raises:
        TypeError: if ``module`` is not ``nn.Sequential``.
        ValueError: if the number of partitions is invalid.
    """
    return balance_cost(profile_times(module, sample, timeout, _device(device)), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """A balance by memory: activations of a micro-batch, and parameters times ``param_scale``.

    ``param_scale`` is 2 for parameters and gradients; each buffer that the optimizer keeps for a parameter adds 1: SGD
    2-3 (momentum), Adam 4-5 (amsgrad), Adagrad 3, RMSprop 3-5.

    Args:
        partitions: number of partitions.
        module: the layers; they are not changed.
        input: a mini-batch of the size to train with.
        chunks: number of micro-batches.
        param_scale: bytes for each byte of parameters.
        device: the device to run the layers on; by default the current CUDA device, without one the CPU.

    Returns:
        Number of layers of each partition, for the ``balance`` of :class:`~pipe.Pipe`.

    Raises:
        TypeError: if ``module`` is not ``nn.Sequential``.
        ValueError: if the number of partitions is invalid.
    """
    return balance_cost(profile_sizes(module, input, chunks, param_scale, _device(device)), partitions)
