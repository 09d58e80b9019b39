"""Estimates the work of layers from the shapes of their parameters alone, as if each were a block of matrix products.

For each token a matrix of shape (out, in) takes ``2 * out * in`` operations in forward and twice as many in backward;
its input and its result are saved for backward. A norm without a bias saves its normalised input, too. Attention is
taken to be fused: it takes ``4 * positions * width`` operations for each token, and saves no matrix of positions by
positions. What is saved is written and read once in forward, and twice in backward.
"""

from __future__ import annotations

import torch

from offload.advise.outline import Layer
from offload.advise.work import Work
from offload.planning.memory_profile import SavedTensor

__all__ = ["FORMULA", "work_by_formula"]

FORMULA = (
    "activations and arithmetic by a formula for transformer blocks: each matrix saves its input and its result, "
    "attention is fused, nothing is dropped out; a function that builds the layers gives exact bytes (module:function)"
)
#: A block with fewer matrices has no attention.
_LEAST_FOR_ATTENTION = 3


def work_by_formula(
    layer: Layer, *, rows: int, positions: int, width: int, dtype: torch.dtype | None, last: bool
) -> Work:
    """The work of one layer on ``rows`` x ``positions`` tokens.

    ``width``: of the tensors between layers. ``last``: whether its result is the output of the model.

    Raises ValueError for a layer with a parameter that is no matrix, such as a convolution.
    """
    wrong = [p for p in layer.parameters if len(p.shape) > 2 and not layer.looks_up]
    if wrong:
        raise ValueError(
            f"WHAT: expected matrices in blocks, got {wrong[0].name} of shape {wrong[0].shape}, whose work no formula "
            f"knows; pass module:function and --input"
        )
    tokens = rows * positions
    types = [p.dtype for p in layer.parameters if p.dtype.is_floating_point]
    each = (dtype or (types[0] if types else torch.float32)).itemsize
    if layer.looks_up:
        # The gradient of a table is made dense; numbers belong to the user.
        nbytes = tokens * width * each
        return Work(
            output_bytes=nbytes,
            forward_flops=0.0,
            backward_flops=0.0,
            forward_bytes=2.0 * nbytes,
            backward_bytes=2.0 * nbytes + sum(p.slot_bytes(dtype) for p in layer.parameters),
            saved=[],
            kept=[],
        )
    biased = {p.name.rpartition(".")[0] for p in layer.parameters if p.name.endswith(".bias")}
    flops, saved, activations, out = 0.0, list[SavedTensor](), 0, width
    matrices = [p for p in layer.parameters if len(p.shape) > 1]
    for p in layer.parameters:
        gradient = p.slot_bytes(dtype) if p.trainable else 0
        if len(p.shape) < 2:
            module, _, kind = p.name.rpartition(".")
            if kind == "weight" and module not in biased:
                nbytes = tokens * p.elements * each
                saved += [SavedTensor(0, nbytes, nbytes), SavedTensor(gradient, 0, 0)]
                activations += nbytes
            continue
        out_size, in_size = p.shape
        flops += 2.0 * tokens * p.elements
        for size in (out_size, in_size):
            saved.append(SavedTensor(0, tokens * size * each, tokens * size * each))
            activations += tokens * size * each
        saved.append(SavedTensor(gradient, 0, 0))
    if len(matrices) >= _LEAST_FOR_ATTENTION:
        flops += 4.0 * tokens * positions * width
    if len(matrices) == 1 and last:  # a head: its input is the boundary, its result the output
        out = next((size for size in matrices[0].shape if size != width), width)
        saved, activations = [SavedTensor(saved[-1].stays, 0, 0)], 0
    elif matrices:  # the result of the last product is added to the residual, and saved by no operation
        saved = [SavedTensor(0, tokens * width * each, 0), *saved[1:]]
        activations = max(0, activations - tokens * width * each)
    output = tokens * out * each
    touched = 2.0 * (activations + output)
    return Work(
        output_bytes=output,
        forward_flops=flops,
        backward_flops=2 * flops,
        forward_bytes=touched,
        backward_bytes=2 * touched,
        saved=saved,
        kept=[*saved, SavedTensor(0, 0, tokens * width * each)],
    )
