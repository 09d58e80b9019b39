"""Checks for nondeterminism: compares each layer's output in the recomputation with that of the first pass.

Comparing representations is not enough: a recomputation starts from the saved input of a shard, so a layer with a
different second output makes the gradients of its own shard and of earlier shards wrong, but does not change the
output of the last shard.

Every layer's output is kept in host memory until the step is done.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipe.nested import tensors_in
from pipe.recompute.module_hooks import EngineHook

__all__ = ["LayerAudit"]


class LayerAudit:
    """The outputs of layers in the first pass, and their greatest difference from the second pass."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        self._first: list[list[list[Tensor]]] = [[] for _ in self._layers]
        self.greatest_difference = 0.0

    @contextlib.contextmanager
    def first_pass(self) -> Iterator[None]:
        """A context in which the layers' outputs are recorded."""
        with self._listening(lambda j, result: self._first[j].append(result)):
            yield

    @contextlib.contextmanager
    def second_pass(self) -> Iterator[None]:
        """A context in which the layers' outputs are compared."""

        def compare(j: int, result: list[Tensor]) -> None:
            self.greatest_difference = max(self.greatest_difference, _difference(self._first[j], result))

        with self._listening(compare):
            yield

    @contextlib.contextmanager
    def _listening(self, note: Any) -> Iterator[None]:
        def hook_of(j: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                note(j, [tensor.detach().to("cpu", copy=True) for tensor in tensors_in(output)])

            return EngineHook(hook)

        handles = [layer.register_forward_hook(hook_of(j)) for j, layer in enumerate(self._layers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _difference(first: Sequence[list[Tensor]], second: list[Tensor]) -> float:
    """The difference of an output from the first pass's output for the same chunks; infinite if none has its shape.

    The second pass may run chunks in another order, and concatenate neighbours, so the nearest of all outputs of one
    chunk, or of several consecutive chunks, is taken.
    """
    if not second:
        return 0.0
    nearest = math.inf
    for start in range(len(first)):
        for stop in range(start + 1, len(first) + 1):
            difference = _compared(first[start:stop], second)
            if difference is None:
                break
            nearest = min(nearest, difference)
    return nearest


def _compared(run: Sequence[list[Tensor]], second: list[Tensor]) -> float | None:
    """The greatest difference from a run of results; infinite if the run is too short, None if it is too long."""
    if any(len(result) != len(second) for result in run):
        return None
    worst = 0.0
    for k, tensor in enumerate(second):
        parts = [result[k] for result in run]
        if len(parts) > 1 and any(part.dim() == 0 or part.shape[1:] != tensor.shape[1:] for part in parts):
            return None
        rows = sum(part.size(0) for part in parts) if tensor.dim() and parts[0].dim() else 0
        if tensor.dim() and rows > tensor.size(0):
            return None
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if whole.shape != tensor.shape:
            worst = math.inf
        elif tensor.numel():
            worst = max(worst, _greatest(whole, tensor))
    return worst


def _greatest(a: Tensor, b: Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    difference = (a.to(wide) - b.to(wide)).abs()
    difference[(a == b) | (a.isnan() & b.isnan())] = 0.0  # equal infinities would give inf - inf = NaN
    return float(difference.nan_to_num(nan=math.inf).max())
