"""What calls of a model give to it: arguments, or chunks of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipe.torch_private.tracing import transform_under_way

__all__ = ["as_call", "names_taken", "refuse_transforms", "to_device"]


def names_taken(layer: nn.Module) -> list[str]:
    """Names of the arguments of a layer's forward besides the first, in order; none for ``*args`` and ``**kwargs``."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = [p for p in inspect.signature(layer.forward).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters[1:]]


def as_call(i: int, chunk: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Chunk ``i`` as arguments and keyword arguments of the model. Raises TypeError for what is neither."""
    if isinstance(chunk, Tensor):
        return (chunk,), {}
    if isinstance(chunk, tuple) and len(chunk) == 2:
        args, kwargs = chunk
        if isinstance(args, (tuple, list)) and isinstance(kwargs, dict):
            return tuple(args), kwargs
    raise TypeError(f"expected a tensor or (args, kwargs) as chunk {i}, got {type(chunk).__name__}")


def to_device(device: torch.device, dtype: torch.dtype | None, x: Tensor) -> Tensor:
    """A tensor of a call on the compute device, in ``dtype`` if it has floating point numbers and that is given."""
    # Without waiting, a copy from page-locked memory reads what a loader has written there since.
    goes_on = x.layout is torch.strided and x.is_pinned()
    return x.to(device, dtype if dtype is not None and x.is_floating_point() else x.dtype, non_blocking=not goes_on)


def refuse_transforms(tensors: Iterable[Tensor]) -> None:
    """Raises RuntimeError if a mechanism other than autograd transforms or traces a call on these tensors."""
    transform = transform_under_way(tensors)
    if transform is not None:
        raise RuntimeError(
            f"an OffloadModel cannot run inside {transform}: its weights are in memory only while their shard "
            f"runs, which only backward() supports; transform, export or trace the bare module"
        )
