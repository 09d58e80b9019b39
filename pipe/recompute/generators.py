"""Random generators as functions on their state: those of the process and of devices, and those that modules hold.

A layer with its own ``torch.Generator`` (so that its masks do not depend on the draws of other layers) would draw
other numbers in a recomputation, unless that generator is found and rewound like the global ones.

:func:`generators_in` finds ``torch.Generator``, ``random.Random``, ``numpy.random.Generator`` and
``numpy.random.RandomState`` as an attribute of a module, or as an element of a list, tuple, set or dict that is an
attribute. Others (an attribute of an attribute) are not.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["Generator", "generator_types", "generators_in", "generators_of", "held_generator"]

#: The attributes of every module: containers of modules, tensors and hooks.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
#: Types of most other attributes.
_NONE = {type(None), bool, int, float, str, torch.Tensor}


@dataclass(frozen=True)
class Generator:
    """A random generator, as functions on its whole state."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    same: Callable[[Any, Any], bool] = operator.eq
    """Whether two states are equal."""
    shared: bool = True
    """Whether other threads may draw from it."""
    owner: Any = None
    """The generator itself, if a module or an argument holds it."""

    def moved(self, state: Any) -> bool:
        """Whether the generator has left a state."""
        return not self.same(state, self.get())


_CPU = Generator("cpu", torch.default_generator.get_state, torch.set_rng_state, torch.equal)
_PYTHON = Generator("python", random.getstate, random.setstate)


def _same(a: Any, b: Any) -> bool:
    """Whether two states of a generator of NumPy are equal: nested dicts of numbers and arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def generators_of(devices: Iterable[torch.device], held: Iterable[Any] = ()) -> list[Generator]:
    """The generators of the process, of ``devices``, and those that modules hold."""
    # A forward can only draw from NumPy if it has been imported.
    found = [_CPU, _PYTHON]
    if numpy := sys.modules.get("numpy"):
        found.append(Generator("numpy", partial(numpy.random.get_state, legacy=False), numpy.random.set_state, _same))
    for device in sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str):
        module = torch.get_device_module(device)
        get, set_ = partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
        found.append(Generator(str(device), get, set_, torch.equal, shared=False))
    return found + [held_generator(generator) for generator in held]


def generators_in(modules: Iterable[nn.Module]) -> list[Any]:
    """The generators that ``modules`` hold themselves, each once. Their submodules are not searched."""
    kinds = generator_types()
    found: dict[int, Any] = {}
    held = [x for m in modules for n, x in m.__dict__.items() if type(x) not in _NONE and n not in _OF_EVERY_MODULE]
    for value in held:
        inner = value.values() if isinstance(value, dict) else value
        for x in inner if isinstance(value, (dict, list, tuple, set)) else (value,):
            if isinstance(x, kinds) and not isinstance(x, random.SystemRandom):  # which has no state
                found[id(x)] = x
    return list(found.values())


def held_generator(generator: Any) -> Generator:
    """A generator that a module or an argument holds."""
    name = f"{type(generator).__module__.split('.')[0]}.{type(generator).__name__} of a layer"
    of = partial(Generator, name, owner=generator)
    if isinstance(generator, torch.Generator):
        return of(generator.get_state, generator.set_state, torch.equal)
    if isinstance(generator, random.Random):
        return of(generator.getstate, generator.setstate)
    if hasattr(generator, "set_state"):
        # NumPy's RandomState caches a normal number besides its bit generator; Generator does not.
        return of(partial(generator.get_state, legacy=False), generator.set_state, _same)
    bits = generator.bit_generator
    return of(lambda: bits.state, partial(setattr, bits, "state"), _same)


def generator_types() -> tuple[type, ...]:
    """The types of generators that there can be now."""
    numpy = sys.modules.get("numpy")
    # A layer can only hold a generator of NumPy if it has been imported.
    return (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
