"""Layers that were built on the meta device get memory and values, one shard at a time.

A model larger than memory cannot be built first and offloaded afterwards. Built under ``torch.device("meta")`` it has
shapes only; here the layers of one shard are given memory, initialise themselves, and go home before the next shard.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Materializer"]


class Materializer:
    """Remembers what replaced each meta parameter, so that tied parameters stay tied across layers."""

    def __init__(self) -> None:
        self._parameters: dict[nn.Parameter, nn.Parameter] = {}
        self._buffers: dict[Tensor, Tensor] = {}

    def materialize(self, name: str, layer: nn.Module) -> None:
        """Gives a layer's meta parameters and buffers memory on the CPU, and calls ``reset_parameters``.

        The order of the calls is that of ``layer.modules()``, so the random numbers are those of a model that was
        emptied onto the CPU and initialised as a whole.

        Raises:
            ValueError: if a module has meta parameters or buffers, but no ``reset_parameters`` to initialise them.
        """
        made: list[nn.Module] = []
        for path, module in layer.named_modules():
            if not self._give_memory(module):
                continue
            if not callable(getattr(module, "reset_parameters", None)):
                raise ValueError(
                    f"{type(module).__name__} {'.'.join(filter(None, (name, path)))!r} is on the meta device and has "
                    f"no reset_parameters() to initialise itself; add one, or build the layer on the CPU"
                )
            made.append(module)
        for module in made:
            module.reset_parameters()  # type: ignore[operator]

    def _give_memory(self, module: nn.Module) -> bool:
        found = False
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                real = self._parameters.get(parameter)
                if real is None:
                    real = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                    self._parameters[parameter] = real
                module._parameters[key] = real
                found = True
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = self._buffers.setdefault(buffer, torch.empty_like(buffer, device="cpu"))
                found = True
        return found
