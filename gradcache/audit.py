"""Checks for nondeterminism: compares each layer's output in the recomputation with that of the first pass.

Comparing representations is not enough: a recomputation starts from the saved input of a shard, so a layer with a
different second output makes the gradients of its own shard and of earlier shards wrong, but does not change the
output of the last shard.

Every layer's output is kept in host memory until the step is done.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipe.nested import tensors_in
from pipe.recompute.module_contents import EngineHook
from pipe.recompute.phase import recomputing_to_the_end

__all__ = ["LayerAudit"]


class LayerAudit:
    """The outputs of layers and of ``output_fn`` in the first pass, and their greatest difference in the second one."""

    def __init__(self, layers: Sequence[nn.Module], output_fn: Callable[[Any], Any]) -> None:
        self._layers = list(layers)
        self._output_fn = output_fn
        self._first: list[list[list[Tensor]]] = [[] for _ in range(len(self._layers) + 1)]
        self._compares = False
        self.greatest_difference = 0.0

    def output_fn(self, output: Any) -> Any:
        """The function, whose results are recorded like those of a layer."""
        representation = self._output_fn(output)
        self._note(-1, representation)
        return representation

    @contextlib.contextmanager
    def listening(self, *, compares: bool) -> Iterator[None]:
        """A context in which outputs are recorded, or compared with the recorded ones."""
        self._compares = compares
        hooks = [EngineHook(lambda module, args, output, j=j: self._note(j, output)) for j in range(len(self._layers))]
        handles = [layer.register_forward_hook(hook) for layer, hook in zip(self._layers, hooks, strict=True)]
        try:
            with recomputing_to_the_end():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, j: int, output: Any) -> None:
        result = [tensor.detach().to("cpu", copy=True) for tensor in tensors_in(output)]
        if self._compares:
            self.greatest_difference = max(self.greatest_difference, _difference(self._first[j], result))
        else:
            self._first[j].append(result)


def _difference(first: Sequence[list[Tensor]], second: list[Tensor]) -> float:
    """The difference of an output from the nearest output of the first pass; infinite if none has its shape.

    The second pass may run chunks in another order, and concatenate neighbours, so several outputs are joined too.
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
    """The greatest difference from some results; infinite if they have too few rows, None if they have too many."""
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
            return math.inf
        if tensor.numel():
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            difference = (whole.to(wide) - tensor.to(wide)).abs()
            # Equal infinities would give inf - inf = NaN.
            difference[(whole == tensor) | (whole.isnan() & tensor.isnan())] = 0.0
            worst = max(worst, float(difference.nan_to_num(nan=math.inf).max()))
    return worst
