"""Copies tensors out of homes for ``copy.deepcopy``, each by itself and bit by bit.

Of a view ``copy.deepcopy`` copies the whole storage, which is the home of a shard; and a tensor subclass may copy by
computing (a quantised weight is dequantised and quantised again, to other values).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offload.streaming.quantised import is_wrapped, with_parts
from offload.streaming.shard import Shard
from pipe.nested import parts_of

__all__ = ["CopiesOfHomes"]


class CopiesOfHomes(TorchFunctionMode):
    """A mode in which ``copy.deepcopy`` copies parameters of ``shards``, and their parts, without the rest of the home.

    ``results``: also copies results of a graph, without the graph, as a pickle does.
    """

    def __init__(self, shards: Sequence[Shard], *, results: bool = False) -> None:
        super().__init__()
        homes = (s.parameter for shard in shards for s in shard.own if s.parameter.numel())
        self._homes = {tensor.untyped_storage().data_ptr() for tensor in homes}
        self._results = results

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                copied = self._copied(tensor, memo)
                if copied is not None:
                    memo[id(tensor)] = copied
            if id(tensor) in memo:
                return memo[id(tensor)]
        return func(*args, **(kwargs or {}))

    def _copied(self, tensor: Any, memo: dict[Any, Any]) -> Tensor | None:
        if not tensor.is_leaf:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad) if self._results else None
        if is_wrapped(tensor):
            if not all(map(self._at_home, parts_of(tensor))):
                return None
            rebuilt = with_parts(tensor, partial(self._copy_of_part, memo=memo))
            return nn.Parameter(rebuilt, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else rebuilt
        return self._copy_of_part(tensor, memo) if type(tensor) is Tensor and self._at_home(tensor) else None

    def _at_home(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return False
        return tensor.untyped_storage().data_ptr() in self._homes

    @staticmethod
    def _copy_of_part(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
        # Tensors on the same memory still share it.
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        copied = memo.get(place)
        if copied is None:
            copied = memo[place] = tensor.detach().clone()
        new: Tensor = copied.detach()
        return new
