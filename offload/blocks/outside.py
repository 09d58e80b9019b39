"""The parameters and buffers of a model outside of its blocks: placed on the compute device, and cast in a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offload.streaming.materialize import Materializer, Values
from offload.streaming.quantised import is_taken_apart

__all__ = ["OutsideCasts", "place_outside"]


@torch.no_grad()
def place_outside(modules: Mapping[str, nn.Module], device: torch.device, values: Mapping[Tensor, Values]) -> None:
    """Moves the parameters and buffers of ``modules``, without their children, to ``device``.

    Those on the meta device are materialized. ``values`` are sources of parameters and buffers, if not the modules
    themselves. One module after the other, so that no second copy of all of them is made. The old memory of a parameter
    is not written. Quantised parameters stay as they are.
    """
    materializer = Materializer(values)
    read: set[nn.Parameter] = set()
    for path, module in modules.items():
        gradients = [(p, p.grad) for p in module._parameters.values() if p is not None and not p.is_meta]
        for p, _ in gradients:
            p.grad = None  # must be where the parameter is
            if p in values and p not in read:
                read.add(p)
                p.data = torch.empty_like(p, device="cpu")
        materializer.allocate_module(path, module)
        materializer.fill()
        for here in module._parameters.values():
            if here is not None and not is_taken_apart(here, [module]):
                here.data = here.data.to(device)
        for p, gradient in gradients:
            p.grad = None if gradient is None else gradient.to(device)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)


class OutsideCasts:
    """The floating-point parameters of ``modules``, without their children, as ``dtype`` while a forward runs.

    In place of each parameter its module has a cast, made once a forward, also where parameters are tied. The cast is a
    part of the graph, so gradients are added to the parameter in its own type.
    """

    def __init__(self, modules: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
        self._modules = modules
        self.dtype = dtype
        self._replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    def __enter__(self) -> None:
        """Replaces the parameters."""
        casts: dict[nn.Parameter, Tensor] = {}
        try:
            for module in self._modules.values():
                members: dict[str, Any] = module._parameters
                for key, p in members.items():
                    if p is not None and p.is_floating_point() and p.dtype != self.dtype:
                        if p not in casts:
                            casts[p] = p.to(self.dtype)
                        self._replaced.append((members, key, p))
                        members[key] = casts[p]
        except BaseException:
            self.end()
            raise

    def __exit__(self, *error: object) -> None:
        """Puts the parameters back."""
        self.end()

    def cast(self, x: Tensor) -> Tensor:
        """An input of the model in the type, if it is of floating point."""
        return x.to(self.dtype) if x.is_floating_point() else x

    def end(self) -> None:
        """Puts the parameters back. May be called again after an interrupt."""
        while self._replaced:
            members, key, p = self._replaced[-1]
            members[key] = p
            self._replaced.pop()
