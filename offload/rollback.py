"""Restores the layers of a model if the construction of an ``OffloadModel`` fails.

Parameters move to their homes shard by shard, and each frees its old memory: two copies of a model may not fit. So
parameters are restored from the homes written so far. Only values that homes do not hold are kept until the model is
made: those that a file will replace, and those of modules that initialise themselves.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.forms.quantised import refresh, stored_tensors

__all__ = ["Rollback"]


@dataclass(frozen=True)
class _Parameter:
    """The state of a parameter before it moved."""

    device: torch.device
    address: int
    gradient: Tensor | None
    #: Its old memory, where its home will hold other values.
    data: Tensor | None


class Rollback:
    """Records the state of a model before its parameters move, and the values of ``replaced`` tensors change."""

    def __init__(self, model: nn.Module, replaced: Container[Tensor]) -> None:
        self._members = [(m, m._parameters, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
        self._parameters: dict[nn.Parameter, _Parameter] = {}
        self._values: dict[Tensor, Tensor] = {}
        for _, _, parameters, buffers in self._members:
            tensors = [t for t in (*parameters.values(), *buffers.values()) if t is not None]
            bare = any(t.is_meta and t not in replaced for t in tensors)  # the module will initialise itself
            for p in parameters.values():
                if p is not None and not p.is_meta:
                    known = self._parameters.get(p)
                    keeps = bare or p in replaced or (known is not None and known.data is not None)
                    self._parameters[p] = _Parameter(p.device, p.data_ptr(), p.grad, p.detach() if keeps else None)
            for b in buffers.values():
                if b is not None and not b.is_meta and (bare or b in replaced) and b not in self._values:
                    self._values[b] = b.detach().clone()
        self._parts = [each for each in stored_tensors([("", model)]) if each.part_of is not None]
        for each in self._parts:
            part = each.parameter
            self._parameters[part] = _Parameter(part.device, part.data_ptr(), None, None)

    @torch.no_grad()
    def restore(self) -> None:
        """Restores parameters and buffers, values and gradients. A moved parameter gets new memory on its device."""
        for module, mapping, parameters, buffers in self._members:
            vars(module)["_parameters"] = mapping
            mapping.clear()
            mapping.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
        for parameter, was in self._parameters.items():
            if parameter.data_ptr() != was.address or parameter.device != was.device:
                parameter.grad = None  # .data cannot change its device under a .grad
                data = parameter.detach().clone() if was.data is None else was.data
                parameter.data = data.to(was.device)
            if parameter.grad is not was.gradient:
                parameter.grad = was.gradient
        for each in self._parts:
            for alias in each.aliases:
                alias.data = each.parameter.data
            assert each.part_of is not None
            refresh(each.part_of)
        for buffer, values in self._values.items():
            buffer.copy_(values)
