"""Copies what ``copy.deepcopy`` would copy otherwise: tensors of subclasses bit by bit, results of a graph without it.

A tensor subclass may copy by computing: a quantised weight is dequantised and quantised again, to other values.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offload.forms.quantised import is_wrapped, with_parts

__all__ = ["Copies"]


class Copies(TorchFunctionMode):
    """A mode: ``copy.deepcopy`` copies tensors of subclasses by their parts, and leaves out graphs as pickles do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo and not tensor.is_leaf:
                memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            elif id(tensor) not in memo and is_wrapped(tensor):
                rebuilt = with_parts(tensor, partial(copy.deepcopy, memo=memo))
                parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(rebuilt, tensor.requires_grad) if parameter else rebuilt
            if id(tensor) in memo:
                return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
