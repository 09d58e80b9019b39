"""Chunk sizes from memory: as many rows as keep their activations within a budget.

A few rows run forward once, and what their graph keeps is counted; the rest is proportion. The trial leaves no trace:
generators and buffers are afterwards what they were before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import nn

from gradcache.context_managers import devices_in_use
from gradcache.grouping import SavedBytes
from pipe.guard import Guard, Watched
from pipe.microbatch import rows_of
from pipe.nested import map_tensors, tensors_in
from pipe.replay import Replay

__all__ = ["ChunkBudget"]

Split = Callable[[int], Sequence[Any]]


class ChunkBudget:
    """Chooses chunk sizes, and remembers the choice for inputs of the same trailing shapes.

    Args:
        budget_bytes: what the graph of one chunk may keep; None: half of what is free on the model's device when a size
            is chosen. Besides, layers need their temporaries, and gradients their place.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        if budget_bytes is not None and budget_bytes < 1:
            raise ValueError(f"expected a positive number of bytes, got memory_budget={budget_bytes}")
        self._budget_bytes = budget_bytes
        self._chosen: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()

    def rows_for(self, model: nn.Module, split: Split, encoder: Callable[[Any], Any]) -> int:
        """Rows of a chunk; ``split(n)`` cuts the input into chunks of n rows.

        Raises:
            ValueError: if not even one row fits.
        """
        # At least two rows: a model with BatchNorm can not train on one.
        probes = [split(2)[0], split(4)[0]]
        known = self._chosen.setdefault(model, {})
        key = repr([(t.dtype, t.shape[1:]) for t in tensors_in(probes[0])])
        if key not in known:
            known[key] = self._choose(model, probes, encoder)
        return known[key]

    def _choose(self, model: nn.Module, probes: list[Any], encoder: Callable[[Any], Any]) -> int:
        budget = self._budget_bytes if self._budget_bytes is not None else _free_bytes(model) // 2
        rows = [rows_of(probe) for probe in probes]
        sizes = [kept_bytes(model, probe, encoder) for probe in probes]
        per_row = sizes[1] / rows[1] if rows[0] == rows[1] else (sizes[1] - sizes[0]) / (rows[1] - rows[0])
        fixed = max(sizes[1] - per_row * rows[1], 0.0)
        fitting = int((budget - fixed) // max(per_row, 1.0))
        if fitting < 1:
            raise ValueError(
                f"expected a budget for at least one row, got {budget} bytes where one row keeps "
                f"{int(fixed + per_row)}; raise memory_budget, or checkpoint inside the model"
            )
        return fitting


def kept_bytes(model: nn.Module, chunk: Any, encoder: Callable[[Any], Any]) -> int:
    """What the graph of a chunk keeps besides parameters. A frozen model is measured as if it were trained."""
    parameters = list(model.parameters())
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    counter = SavedBytes(parameters)
    replay = Replay.capture(devices_in_use(chunk, parameters))
    try:
        for parameter in frozen:
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        with Guard(Watched(model)).again(strict=False), replay.again(), counter, torch.enable_grad():
            encoder(map_tensors(lambda tensor: tensor.detach().clone(), chunk))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    return counter.total


def _free_bytes(model: nn.Module) -> int:
    first = next(iter(model.parameters()), None)
    if first is None or first.device.type == "cpu":
        return int(psutil.virtual_memory().available)
    free, _ = torch.get_device_module(first.device).mem_get_info(first.device)
    return int(free)
