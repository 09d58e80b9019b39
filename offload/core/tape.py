"""The outputs of many chunks apart from their graph, for callers that compute the gradients of the outputs first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipe.nested import flatten, map_distinct, tensors_in

__all__ = ["ChunksTape", "with_tape"]


class ChunksTape:
    """The graph of a forward over many chunks; usable once."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._outputs: Sequence[Any] | None = outputs

    def backward(self, output_gradients: Sequence[Any]) -> None:
        """Runs the backward from one gradient for each chunk, nested as its output; None: no gradient."""
        outputs, self._outputs = self._outputs, None
        if outputs is None:
            raise RuntimeError("expected one backward of a forward over chunks; run the forward again")
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for output, given in zip(outputs, output_gradients, strict=True):
            if given is None:
                continue
            for x, gradient in zip(flatten(output)[0], flatten(given)[0], strict=True):
                if isinstance(x, Tensor) and x.requires_grad and gradient is not None:
                    roots.append(x)
                    gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)


def with_tape(outputs: Sequence[Any]) -> tuple[list[Any], ChunksTape]:
    """The outputs, detached, and their graph."""
    graph = outputs if any(x.requires_grad for x in tensors_in(list(outputs))) else [None] * len(outputs)
    return [map_distinct(Tensor.detach, output) for output in outputs], ChunksTape(graph)
