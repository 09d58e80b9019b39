"""Infers the sizes of the boundaries of an input from copies of the layers on the meta device, without computing.

Only modules of ``torch.nn`` without hooks are run: other layers may count their calls, or keep what they see, so that
running them once more could be noticed. Where inference ends, sizes are learnt while the first forward runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.layouts import bytes_of_boundary
from pipe.nested import map_tensors, tensors_in
from pipe.torch_private import has_module_hooks, without_modes

__all__ = ["inferred_boundaries"]


def inferred_boundaries(
    shards: Sequence[Sequence[nn.Module]], call: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype | None
) -> Iterator[int]:
    """Bytes of the output of each shard, for this call of the first layer, as far as they can be inferred.

    ``dtype``: in which floating-point parameters and inputs are computed, if not in their own.
    """
    inputs = tensors_in(call)
    if any(x.layout is not torch.strided or x.is_nested or torch.is_autocast_enabled(x.device.type) for x in inputs):
        return

    def on_meta(tensor: Tensor) -> Tensor:
        own = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=own, device="meta")

    args, kwargs = map_tensors(on_meta, call)
    value: Any = None
    for j, layers in enumerate(shards):
        for k, layer in enumerate(layers):
            if not _only_of_torch(layer):
                return
            twin = _on_meta(layer, dtype)
            try:
                with torch.no_grad(), without_modes():
                    value = twin(*args, **kwargs) if j == k == 0 else twin(value)
            except Exception:  # also in its forward, which then says what is wrong; or it needs values
                return
        yield sum(bytes_of_boundary(x) for x in tensors_in(value))


def _only_of_torch(layer: nn.Module) -> bool:
    modules = list(layer.modules())
    return not has_module_hooks(modules) and all(
        type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module) for module in modules
    )


def _on_meta(layer: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of a layer whose parameters and buffers have shapes and types, but no values."""
    twins: dict[int, Any] = {}
    for parameter in layer.parameters():
        own = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        twins[id(parameter)] = nn.Parameter(torch.empty_like(parameter, dtype=own, device="meta"), requires_grad=False)
    for buffer in layer.buffers():
        twins[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(layer, twins)
