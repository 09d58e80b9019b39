"""Finds random generators that modules hold as attributes, and reads and writes their state.

A layer with its own ``torch.Generator`` (so that its masks do not depend on the draws of other layers) would draw
other numbers in a recomputation, unless that generator is found and rewound like the global ones.

It finds ``torch.Generator``, ``random.Random``, ``numpy.random.Generator`` and ``numpy.random.RandomState`` as an
attribute of a module, or as an element of a list, tuple, set or dict that is an attribute. Other generators (an
attribute of an attribute, a closure) are not found.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipe.recompute import numpy_state

__all__ = ["GeneratorState", "held_generators", "state_of"]

# The attributes of every module: containers of modules, tensors and hooks.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class GeneratorState:
    """The whole state of one generator, as functions."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    moved: Callable[[Any], bool]
    """Whether the generator has left a given state."""


def held_generators(modules: Iterable[nn.Module]) -> list[Any]:
    """The generators that ``modules`` hold themselves, each once. Their submodules are not searched."""
    kinds = _kinds()
    found: dict[int, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name in _OF_EVERY_MODULE:
                continue
            if isinstance(value, kinds):
                found[id(value)] = value
            elif isinstance(value, (list, tuple, set, dict)):
                members = value.values() if isinstance(value, dict) else value
                found.update((id(member), member) for member in members if isinstance(member, kinds))
    # SystemRandom has no state.
    return [generator for generator in found.values() if not isinstance(generator, random.SystemRandom)]


def state_of(generator: Any) -> GeneratorState:
    """The state of a generator that :func:`held_generators` found."""
    name = f"{type(generator).__module__.split('.')[0]}.{type(generator).__name__} of a layer"
    if isinstance(generator, torch.Generator):

        def write(state: Any) -> None:
            generator.set_state(state)

        return GeneratorState(
            name, generator.get_state, write, lambda state: not torch.equal(state, generator.get_state())
        )
    if isinstance(generator, random.Random):
        return GeneratorState(
            name, generator.getstate, generator.setstate, lambda state: bool(state != generator.getstate())
        )
    # NumPy's RandomState caches a normal number besides its bit generator; Generator does not.
    old = hasattr(generator, "set_state")

    def get() -> Any:
        return generator.get_state(legacy=False) if old else generator.bit_generator.state

    def set_(state: Any) -> None:
        if old:
            generator.set_state(state)
        else:
            generator.bit_generator.state = state

    return GeneratorState(name, get, set_, lambda state: not numpy_state.same(state, get()))


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    # A layer can only hold a generator of NumPy if it has been imported.
    return (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
