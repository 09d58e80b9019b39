"""Layers that were built on the meta device get memory and values, one shard at a time.

A model larger than memory cannot be built first and offloaded afterwards. Built under ``torch.device("meta")`` it has
shapes only. Here the parameters of one shard are given memory that nobody touches, which costs nothing, until they are
home; there they initialise themselves, or are read from the files of a pretrained model.

Invariant: values are written at home and nowhere else. What a file supplies is not initialised first, and what it
supplied is never overwritten by a module that initialises its other parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["Materializer", "Values"]


class Values(Protocol):
    """What a tensor is to hold."""

    def read_into(self, destination: Tensor) -> None:
        """Reads it into the memory where the tensor rests."""
        ...


class Materializer:
    """Remembers what replaced each meta tensor, so that tied parameters stay tied across layers.

    Args:
        stored: what each parameter or buffer, on the meta device or not, is to be read from.
    """

    def __init__(self, stored: Mapping[Tensor, Values] | None = None) -> None:
        self._stored = dict(stored or {})
        self._parameters: dict[nn.Parameter, nn.Parameter] = {}
        self._buffers: dict[Tensor, Tensor] = {}
        #: Parameters that still have no values.
        self._empty: set[Tensor] = set()
        #: Modules that have to initialise themselves, and tensors that are to be read.
        self._bare: list[nn.Module] = []
        self._unread: list[Tensor] = []
        self._read: set[Tensor] = set()

    def give_memory(self, name: str, layer: nn.Module) -> None:
        """Replaces a layer's meta parameters and buffers by tensors on the CPU, still without values.

        Raises:
            ValueError: if a module has some that nothing supplies, and no ``reset_parameters`` to initialise them.
        """
        for path, module in layer.named_modules():
            if self._replace(module):
                if not callable(getattr(module, "reset_parameters", None)):
                    raise ValueError(
                        f"{type(module).__name__} {'.'.join(filter(None, (name, path)))!r} is on the meta device and "
                        f"has no reset_parameters() to initialise itself; add one, supply all that it has as "
                        f"pretrained, or build the layer on the CPU"
                    )
                self._bare.append(module)
        tensors = (*layer.parameters(), *layer.buffers())
        self._unread += [tensor for tensor in tensors if tensor in self._stored and tensor not in self._read]

    def has_values(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's present values count."""
        return parameter not in self._empty and parameter not in self._stored

    def give_values(self) -> None:
        """To be called when the parameters of the layers so far are home: initialises or reads them there.

        The order of initialisation is that of ``modules()``, so the random numbers are those of a model that was
        emptied onto the CPU and initialised as a whole.
        """
        for module in self._bare:
            _initialise(module)
            # A tied one may have been read before. Without this, it would have initial values again.
            self._unread += [p for p in module.parameters(recurse=False) if p in self._stored]
        for tensor in dict.fromkeys(self._unread):
            self._stored[tensor].read_into(tensor)
        self._read.update(self._unread)
        self._empty.clear()
        self._bare.clear()
        self._unread.clear()

    def _replace(self, module: nn.Module) -> bool:
        """Whether the module has to initialise something."""
        bare = False
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                real = self._parameters.get(parameter)
                if real is None:
                    real = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                    self._parameters[parameter] = real
                    self._empty.add(real)
                module._parameters[key] = real
                bare |= not self._is_stored(parameter, real)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = self._buffers.setdefault(buffer, torch.empty_like(buffer, device="cpu"))
                bare |= not self._is_stored(buffer, self._buffers[buffer])
        return bare

    def _is_stored(self, meta: Tensor, real: Tensor) -> bool:
        if meta in self._stored:
            self._stored[real] = self._stored[meta]
        return meta in self._stored


@torch.no_grad()
def _initialise(module: nn.Module) -> None:
    """Calls ``reset_parameters``; what it put in the place of a parameter, instead of writing there, is copied."""
    homes = {key: (p, p.data) for key, p in module._parameters.items() if p is not None}
    module.reset_parameters()  # type: ignore[operator]
    for key, (parameter, home) in homes.items():
        now = module._parameters[key]
        assert now is not None
        if now is not parameter or now.data_ptr() != home.data_ptr():
            home.copy_(now)
            parameter.data = home
            module._parameters[key] = parameter
