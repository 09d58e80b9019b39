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
        self._records = any(x.requires_grad for x in tensors_in(list(outputs)))
        self._outputs: Sequence[Any] | None = outputs if self._records else None

    def backward(self, output_gradients: Sequence[Any]) -> None:
        """Runs the backward from the gradients of the outputs.

        Args:
            output_gradients: one entry for each chunk, in order, of the structure of that chunk's output: tensors of
                the output's shapes, or None where there is no gradient; or a list of those of its leaves, in order. A
                whole entry may be None.

        Raises:
            RuntimeError: if the tape was used before, or its forward ran without gradients.
            ValueError: if the number, the structure or a shape differs from the outputs.
        """
        if not self._records:
            raise RuntimeError(
                "this tape has no backward: forward_chunks ran under no_grad or inference_mode, or no "
                "parameter and no input requires a gradient"
            )
        outputs = self._outputs
        if outputs is None:
            raise RuntimeError("this tape was used before; run forward_chunks again")
        if len(output_gradients) != len(outputs):
            got = len(output_gradients)
            raise ValueError(f"expected one gradient for each of the {len(outputs)} chunks, got {got}")
        pairs = [
            (x, gradient)
            for i, (output, given) in enumerate(zip(outputs, output_gradients, strict=True))
            if given is not None
            for x, gradient in _paired(i, output, given)
        ]
        self._outputs = None
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])


def _paired(i: int, output: Any, given: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors in the output of chunk ``i`` that have a graph and are given a gradient, with that."""
    (leaves, spec), (gradients, got) = flatten(output), flatten(given)
    if len(leaves) != len(gradients):
        raise ValueError(f"chunk {i}: expected gradients of the output's structure {spec}, got {got}")
    pairs = []
    for x, gradient in zip(leaves, gradients, strict=True):
        if not isinstance(gradient, Tensor):
            continue
        shape = x.shape if isinstance(x, Tensor) else ()
        if gradient.shape != shape:
            raise ValueError(f"chunk {i}: expected a gradient of the shape {tuple(shape)}, got {tuple(gradient.shape)}")
        if isinstance(x, Tensor) and x.requires_grad:
            pairs.append((x, gradient))
    return pairs


def with_tape(outputs: Sequence[Any]) -> tuple[list[Any], ChunksTape]:
    """The outputs, detached, and their graph."""
    return [map_distinct(Tensor.detach, output) for output in outputs], ChunksTape(outputs)
