"""Infers the sizes of the boundaries of an input from copies of the layers on the meta device, without computing.

Only code of torch is run: other layers, hooks, activation functions or patches may count their calls, draw numbers or
keep what they see, so running them once more could be noticed. Where inference ends, sizes are learnt while the first
forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.layouts import bytes_of_boundary
from offload.streaming.stored_values import stored_values
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.thread_state import restores_thread_state
from pipe.torch_private.dispatch import without_modes
from pipe.torch_private.modules import has_module_hooks

__all__ = ["inferred_boundaries"]


@restores_thread_state
def inferred_boundaries(
    shards: Sequence[Sequence[nn.Module]], call: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype | None
) -> list[int]:
    """Bytes of the output of each shard, for this call of the first layer, as far as they can be inferred.

    ``dtype``: in which floating-point parameters and inputs are computed, if not in their own.
    """
    inputs, found = tensors_in(call), list[int]()
    if any(type(x) is not Tensor or x.layout is not torch.strided or x.is_nested for x in inputs):
        return found
    if any(torch.is_autocast_enabled(x.device.type) for x in inputs):
        return found
    try:
        with torch.no_grad(), without_modes():
            args, kwargs = map_tensors(lambda x: _on_meta(x, dtype), call)
            value: Any = None
            for j, layers in enumerate(shards):
                for k, layer in enumerate(layers):
                    if not _only_of_torch(layer):
                        return found
                    twin = _twin(layer, dtype)
                    value = twin(*args, **kwargs) if j == k == 0 else twin(value)
                found.append(sum(bytes_of_boundary(x) for x in tensors_in(value)))
    except Exception:  # also in its forward, which then says what is wrong; or it needs values
        pass
    return found


def _only_of_torch(layer: nn.Module) -> bool:
    modules = list(layer.modules())
    functions = [nn.Module.__call__]
    for module in modules:
        own = vars(module)
        if not type(module).__module__.startswith("torch.nn.") or "forward" in own or module._compiled_call_impl:
            return False
        functions += [type(module).forward, *filter(callable, own.values())]
    return not has_module_hooks(modules) and all(
        (getattr(function, "__module__", None) or "").split(".")[0] == "torch" for function in functions
    )


def _twin(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy whose parameters and buffers have shapes and types, but no values; other attributes are shared."""
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin._parameters = {name: _on_meta(p, dtype) for name, p in module._parameters.items()}
    twin._buffers = {name: _on_meta(buffer, None) for name, buffer in module._buffers.items()}
    twin._modules = {name: child and _twin(child, dtype) for name, child in module._modules.items()}
    return twin


def _on_meta(tensor: Any, dtype: torch.dtype | None) -> Any:
    if tensor is None:
        return None
    own = tensor.dtype if stored_values(tensor) is None else torch.float32
    own = own if dtype is None or not tensor.is_floating_point() else dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=own, device="meta")
