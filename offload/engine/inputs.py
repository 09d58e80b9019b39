"""Checks what enters the first shard of a model, before a forward begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from offload.engine.layouts import refuse_hidden, refuse_strided_nested
from pipe.torch_private.tracing import transform_under_way

__all__ = ["check_inputs", "refuse_transforms"]


def check_inputs(inputs: Sequence[Sequence[Any]]) -> None:
    """Raises TypeError or RuntimeError for flat ``inputs`` of micro-batches that cannot be streamed."""
    tensors = [x for leaves in inputs for x in leaves if isinstance(x, Tensor)]
    refuse_transforms(tensors)
    for x in tensors:
        refuse_strided_nested(x, "an input of the model")
    for leaves in inputs:
        refuse_hidden(leaves, "an input of the model")


def refuse_transforms(tensors: Iterable[Tensor]) -> None:
    """Raises RuntimeError if a mechanism other than autograd transforms or traces a call on these tensors."""
    transform = transform_under_way(tensors)
    if transform is not None:
        raise RuntimeError(
            f"an OffloadModel cannot run inside {transform}: its weights are in memory only while their shard "
            f"runs, which only backward() supports; transform, export or trace the bare module"
        )
