"""Materializes layers from the meta device in storage, one shard at a time: by ``reset_parameters`` or from files.

A model larger than memory cannot be built and then offloaded. Built under ``torch.device("meta")`` it has shapes only.
Here the parameters of one shard get virtual memory, which is never written and so costs nothing, until they are moved
to storage; there their modules initialise them, or they are read from pretrained files.

Invariant: values are written in storage only. A tensor read from a file is not initialised first, and not overwritten
by a module that initialises its other parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload.meta_device.recipes import Recipe, recipe_of
from offload.storage.buffer import empty_on_host

__all__ = ["InPlace", "Materializer", "Values", "move_buffers"]


class Values(Protocol):
    """A source of a tensor's values."""

    def read_into(self, destination: Tensor) -> None:
        """Reads the values into the tensor's storage."""
        ...


class InPlace:
    """The values of a parameter whose storage holds them already."""

    def read_into(self, destination: Tensor) -> None:
        """Does nothing."""


class Materializer:
    """Replaces meta tensors; remembers the replacements, so that tied parameters stay tied across layers.

    ``stored``: sources of parameters and buffers, on the meta device or not.
    """

    def __init__(self, stored: Mapping[Tensor, Values] | None = None) -> None:
        self._stored = dict(stored or {})
        #: By the tensor on the meta device.
        self._real: dict[Tensor, Tensor] = {}
        #: Tensors without values yet.
        self._empty: set[Tensor] = set()
        #: Modules to initialise, parameters whose values are made by recorded calls, and tensors to read.
        self._uninitialised: list[nn.Module] = []
        self._recipes: list[tuple[Tensor, Recipe]] = []
        self._unread: list[Tensor] = []
        self._read: set[Tensor] = set()

    def allocate(self, name: str, layer: nn.Module) -> None:
        """Replaces a layer's meta tensors. Raises ValueError if a module lacks sources and ``reset_parameters``."""
        for path, module in layer.named_modules():
            self.allocate_module(".".join(filter(None, (name, path))), module)

    def allocate_module(self, path: str, module: nn.Module) -> None:
        """Replaces the meta tensors of one module, but not those of its children; raises as :meth:`allocate` does."""
        if self._replace(path, module):
            if not callable(getattr(module, "reset_parameters", None)):
                raise ValueError(
                    f"{type(module).__name__} {path!r} is on the meta device and has no reset_parameters() to "
                    f"initialise itself; add one, supply all its parameters and buffers by pretrained, build it on the "
                    f"CPU, or build the model under init_empty_weights(), where buffers have values"
                )
            self._uninitialised.append(module)
        tensors = (*module._parameters.values(), *module._buffers.values())
        self._unread += [t for t in tensors if t is not None and t in self._stored and t not in self._read]

    def has_values(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's current values are to be copied to storage."""
        return parameter not in self._empty and parameter not in self._stored

    def is_empty(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has memory that was never written."""
        return parameter in self._empty

    @property
    def idle(self) -> bool:
        """Whether all parameters have their values, so that :meth:`fill` would do nothing."""
        return not (self._uninitialised or self._recipes or self._unread)

    def fill(self) -> None:
        """Initialises or reads the parameters of the layers so far, which are in storage now.

        In the order of ``modules()``: the random numbers are those of a whole model after ``to_empty(device="cpu")``.
        """
        for module in self._uninitialised:
            _initialise(module)
            # A tied parameter may have been read before. Without this, it keeps initial values.
            self._unread += [p for p in module.parameters(recurse=False) if p in self._stored]
        for parameter, recipe in self._recipes:
            recipe.repeat(parameter)
        for tensor in dict.fromkeys(self._unread):
            self._stored[tensor].read_into(tensor)
        self._read.update(self._unread)
        self._empty.clear()
        self._uninitialised.clear()
        self._recipes.clear()
        self._unread.clear()

    def _replace(self, path: str, module: nn.Module) -> bool:
        """Replaces a module's meta tensors; returns whether any has to be initialised by the module."""
        uninitialised = False
        both: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in both:
            for key, meta in tensors.items():
                if meta is None or not meta.is_meta:
                    continue
                new = meta not in self._real  # else it is tied
                if new:
                    real = empty_on_host(meta)
                    real = nn.Parameter(real, meta.requires_grad) if isinstance(meta, nn.Parameter) else real
                    self._real[meta] = real
                    self._empty.add(real)
                real = tensors[key] = self._real[meta]
                if meta in self._stored:
                    self._stored[real] = self._stored[meta]
                elif (recipe := recipe_of(meta)) is None:
                    uninitialised = True
                elif new:
                    recipe.check(f"{path}.{key}")
                    self._recipes.append((real, recipe))
        return uninitialised


@torch.no_grad()
def _initialise(module: nn.Module) -> None:
    """Calls ``reset_parameters``; copies the values of parameters that it replaced instead of writing to them."""
    homes = {key: (p, p.data) for key, p in module._parameters.items() if p is not None}
    module.reset_parameters()  # type: ignore[operator]
    for key, (parameter, home) in homes.items():
        now = module._parameters[key]
        assert now is not None
        if now is not parameter or now.data_ptr() != home.data_ptr():
            home.copy_(now)
            parameter.data = home
            module._parameters[key] = parameter


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Moves the buffers of some modules to a device."""
    for module in (inner for each in modules for inner in each.modules()):
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
