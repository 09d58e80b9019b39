"""Runs layers forward and backward on the meta device: counts operations, bytes touched and bytes saved, and no values.

Tensors on the meta device have shapes and no memory. The tensors that autograd saves are those that it would save in a
real step, so bytes are exact. Fused attention is that of the CPU, which torch does not choose on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from offload.advise.work import Work
from offload.engine.layouts import bytes_of_boundary
from offload.planning.memory_profile import SavedTensor
from pipe.nested import map_tensors, tensors_in
from pipe.torch_private.data import pytree
from pipe.torch_private.dispatch import OperationMode

__all__ = ["profile"]

_aten = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 4,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 10,
}
_FIRST_OPERAND = {4: 0, 10: 1}


def profile(shards: Sequence[Sequence[nn.Module]], value: Any) -> list[Work]:
    """The work of each shard on this input of the first layer, a tensor on the meta device.

    Raises what the layers raise: an input of a wrong shape, or a layer that needs values.
    """
    works = []
    for j, layers in enumerate(shards):
        work, value = _profile(layers, value, first=j == 0)
        works.append(work)
    return works


class _Operations(OperationMode):
    """Counts the arithmetic of matrix products, and the bytes that other operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.nbytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (attention := _ATTENTION.get(func)) is not None:
            query, key = args[_FIRST_OPERAND[attention]], args[_FIRST_OPERAND[attention] + 1]
            self.flops += attention * query.numel() * key.shape[-2]
        elif func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        elif not func.is_view:
            self.nbytes += sum(t.nbytes for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
        return result


class _FusedAttention(TorchFunctionMode):
    """Runs ``scaled_dot_product_attention`` as the CPU's fused kernel wherever a CPU would, also on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            fused = _fused(*args, **kwargs)
            if fused is not None:
                return fused
        return func(*args, **kwargs)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    alike = query.dim() == 4 and query.shape[:2] == key.shape[:2] and query.shape[-1] == value.shape[-1]
    if dropout_p or not alike or (attn_mask is not None and attn_mask.requires_grad):
        return None
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    call = _aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = call(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


class _Saved:
    """The tensors that autograd saves; weights are known by their storage."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = {
            StorageWeakRef(w.untyped_storage()): w.nbytes if w.requires_grad else 0 for w in weights if w.numel()
        }
        #: Storage, and bytes of its gradient.
        self._saved: list[tuple[StorageWeakRef, int]] = []
        self._nbytes: dict[StorageWeakRef, int] = {}

    def add(self, tensor: Tensor) -> Tensor:
        """Called for each saved tensor."""
        if tensor.layout is torch.strided and tensor.numel():
            storage = StorageWeakRef(tensor.untyped_storage())
            differentiable = tensor.is_floating_point() or tensor.is_complex()
            self._saved.append((storage, tensor.nbytes if differentiable else 0))
            self._nbytes[storage] = tensor.untyped_storage().nbytes()
        return tensor

    def saved_tensors(self, elsewhere: Collection[StorageWeakRef]) -> list[SavedTensor]:
        """The saved tensors in the order in which backward uses them; those in ``elsewhere`` are not freed by it."""
        first: dict[StorageWeakRef, int] = {}
        for k, (storage, _) in enumerate(self._saved):
            first.setdefault(storage, k)
        seen: set[StorageWeakRef] = set()
        found = []
        for k in range(len(self._saved) - 1, -1, -1):
            storage, flows = self._saved[k]
            if storage in self._weights:
                found.append(SavedTensor(0 if storage in seen else self._weights[storage], 0, 0))
                seen.add(storage)
            else:
                ends = first[storage] == k and storage not in elsewhere
                found.append(SavedTensor(0, flows, self._nbytes[storage] if ends else 0))
        return found


def _profile(layers: Sequence[nn.Module], value: Any, *, first: bool) -> tuple[Work, Any]:
    def leaf(tensor: Tensor) -> Tensor:
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(differentiable and not first)

    value = map_tensors(leaf, value)
    given = value
    inputs = {StorageWeakRef(t.untyped_storage()) for t in tensors_in(given)}
    weights = [p for layer in layers for p in layer.parameters()]
    saved = _Saved(weights)
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor)
    forward, backward = _Operations(), _Operations()
    with torch.enable_grad(), _FusedAttention(), hooks, forward:
        for layer in layers:
            value = layer(value)
    outputs = [t for t in tensors_in(value) if t.requires_grad]
    if outputs:
        with backward:
            sources = [*(w for w in weights if w.requires_grad), *(t for t in tensors_in(given) if t.requires_grad)]
            gradients = [torch.empty_like(t) for t in outputs]
            torch.autograd.grad(outputs, list(dict.fromkeys(sources)), gradients, allow_unused=True)
    work = Work(
        output_bytes=sum(bytes_of_boundary(t) for t in tensors_in(value)),
        forward_flops=forward.flops,
        backward_flops=backward.flops,
        forward_bytes=forward.nbytes,
        backward_bytes=backward.nbytes,
        saved=saved.saved_tensors(inputs),
        # The input of the first cell is held like that of any other.
        kept=saved.saved_tensors(()),
    )
    return work, value
