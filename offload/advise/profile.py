"""Finds the shards of a model, and what they compute, touch and save for backward, by running it on the meta device.

Tensors on the meta device have shapes and no memory. The tensors that autograd saves are those that it would save in a
real step, so bytes are exact. Fused attention is that of the CPU, which torch does not choose on the meta device.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from offload.advise.sources import Source, failing
from offload.arguments import layer_bytes
from offload.engine.recorder import Recorder
from offload.engine.sizes import bytes_of_boundary
from offload.partition import cut_within
from offload.planning.memory_profile import SavedTensor
from pipe.nested import map_tensors, tensors_in
from pipe.torch_private.data import pytree
from pipe.torch_private.dispatch import OperationMode

__all__ = ["Work", "works_of"]

_aten = torch.ops.aten
#: Operations for each element of the query and each key, and the position of the query among the arguments.
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: (4, 0),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (10, 1),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one block does with one micro-batch. A multiply-add counts two."""

    #: Of what enters it, and of what it returns.
    input_bytes: int = 0
    output_bytes: int = 0
    #: Of matrix products.
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    #: Read and written by all other operations.
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    #: Tensors saved for a backward, in its order, without the input of the cell.
    saved: Sequence[SavedTensor] = ()
    #: The same of a graph that is kept, with the input.
    kept: Sequence[SavedTensor] = ()


def works_of(
    source: Source,
    limit_bytes: int | None,
    rows: int,
    shape: Sequence[int],
    *,
    is_given: bool = False,
    param_dtype: torch.dtype | None = None,
) -> Mapping[nn.Module, Work]:
    """The shards that a model makes of its blocks within a limit, in the order of their calls, with their work.

    Args:
        rows, shape: of a micro-batch, and of one row: of the input if it ``is_given``, else of tokens.
        param_dtype: in which layers compute, if not in that of the parameters.

    Adds to the assumptions of ``source``. Raises ValueError for a model that does not run on such an input.
    """
    blocks = list(source.blocks.values())
    shards, model = blocks, source.model
    if source.merges:  # small neighbours share a shard
        ends = [0, *itertools.accumulate(cut_within(layer_bytes(blocks, param_dtype), limit_bytes))]
        shards = [nn.Sequential(*blocks[a:b]) for a, b in itertools.pairwise(ends)]
        model = nn.Sequential(*shards)
    stored = {p: p.dtype for p in model.parameters()}
    if param_dtype is not None:
        model.to(param_dtype)
    value = _input(shards[0], [rows, *shape], is_given=is_given)
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": False} if takes_cache else {}
    source.assumptions.append(f"the input is {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}")
    with failing(f"--input: the model does not run where {source.assumptions[-1]}, which --input or --positions say"):
        works = _profiles(shards, partial(model, value, **kwargs))
    for p, dtype in stored.items():
        p.data = p.data.to(dtype)
    # A block that is not called is stored all the same.
    return works | {shard: Work() for shard in shards if shard not in works}


def _input(begin: nn.Module, shape: Sequence[int], *, is_given: bool) -> Tensor:
    """Numbers of rows if the first shard begins with a table, else as many values as its first matrix or norm takes."""
    first = next(module for module in begin.modules() if any(p is not None for p in module._parameters.values()))
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        return torch.zeros(*shape, dtype=torch.long, device="meta")
    weight = next(first.parameters())
    return torch.empty(*shape, *([] if is_given else weight.shape[-1:]), dtype=weight.dtype, device="meta")


def _profiles(blocks: Sequence[nn.Module], call: Callable[[], Any]) -> dict[nn.Module, Work]:
    """The work of each block in the order in which ``call`` calls them, on the meta device.

    A value that is read is taken to be true: models compare their inputs to find what is unusual. A block that is
    called several times counts once. Raises what the model raises.
    """
    works: dict[nn.Module, Work] = {}

    def measured(block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            work, output = _profile(block, forward, args, kwargs)
            works.setdefault(block, work)
            return output

        return run

    for block in blocks:
        vars(block)["forward"] = measured(block)
    try:
        with torch.enable_grad(), _FusedAttention(), _Operations():
            call()
    finally:
        for block in blocks:
            del vars(block)["forward"]
    return works


class _Operations(OperationMode):
    """Counts the arithmetic of matrix products, and the bytes that other operations read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.nbytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:
            return True
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _ATTENTION:
            factor, query = _ATTENTION[func]
            self.flops += factor * args[query].numel() * args[query + 1].shape[-2]
        elif func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        elif not func.is_view:
            self.nbytes += sum(t.nbytes for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
        return result


class _FusedAttention(TorchFunctionMode):
    """Runs ``scaled_dot_product_attention`` as the CPU's fused kernel wherever a CPU would, also on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attends = func is nn.functional.scaled_dot_product_attention
        if attends and (fused := _fused(*args, **kwargs)) is not None:
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
    same = 1 if enable_gqa else 2  # sizes of batch and heads
    alike = query.dim() == 4 and query.shape[:same] == key.shape[:same] and query.shape[-1] == value.shape[-1]
    if dropout_p or not alike or (attn_mask is not None and attn_mask.requires_grad):
        return None
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    call = _aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = call(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


class _Recorder(Recorder):
    """Records what autograd saves on the meta device, where weights are known by their storage."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        # Below the address of any tensor there.
        self._numbers = {StorageWeakRef(w.untyped_storage()): -k for k, w in enumerate(weights, 1) if w.numel()}
        self._weights = {-k: w.nbytes for k, w in enumerate(weights, 1) if w.requires_grad}
        self._range = range(0)
        self._saved, self.nbytes = [], {}

    def add(self, tensor: Tensor) -> None:
        """Called for each saved tensor."""
        if (number := self._numbers.get(StorageWeakRef(tensor.untyped_storage()))) is not None:
            self._saved.append((number, 0))
        elif tensor.numel():
            super().add(tensor)


def _profile(block: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Work, Any]:
    args, kwargs = given = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), (args, kwargs))
    weights = [*block.parameters()]
    saved = _Recorder(weights)

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    forward, backward = _Operations(), _Operations()
    with hooks, forward:
        value = call(*args, **kwargs)
    outputs = [t for t in tensors_in(value) if t.requires_grad]
    if outputs:
        with backward:
            sources = [t for t in (*weights, *tensors_in(given)) if t.requires_grad]
            gradients = [torch.empty_like(t) for t in outputs]
            torch.autograd.grad(outputs, list(dict.fromkeys(sources)), gradients, allow_unused=True)
    return Work(
        input_bytes=sum(bytes_of_boundary(t) for t in tensors_in(given)),
        output_bytes=sum(bytes_of_boundary(t) for t in tensors_in(value)),
        forward_flops=forward.flops,
        backward_flops=backward.flops,
        forward_bytes=forward.nbytes,
        backward_bytes=backward.nbytes,
        saved=saved.saved_tensors(tensors_in(given)),
        # The input of the first cell is held like that of any other.
        kept=saved.saved_tensors(()),
    ), value
