"""Random generators as functions on their state: those of the process and of devices, and those that modules hold.

A layer with its own ``torch.Generator`` (so that its masks do not depend on the draws of other layers) would draw
other numbers in a recomputation, unless that generator is found and rewound like the global ones.

:func:`held_generators` finds ``torch.Generator``, ``random.Random``, ``numpy.random.Generator`` and
``numpy.random.RandomState`` as an attribute of a module, or as an element of a list, tuple, set or dict that is an
attribute; :func:`generators_in` finds those among arguments. Others (an attribute of an attribute, a closure) are not.
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

from pipe.nested import LEAVES, flatten

__all__ = ["Generator", "generator_types", "generators_in", "generators_of", "held_generators"]

# The attributes of every module: containers of modules, tensors and hooks.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
#: Types of most other attributes.
_NONE = {type(None), bool, int, float, str, torch.Tensor}


@dataclass(frozen=True)
class Generator:
    """A random generator, as functions on its whole state."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    moved: Callable[[Any], bool]
    """Whether the generator has left a given state."""
    shared: bool = True
    """Whether other threads may draw from it."""
    owner: Any = None
    """The generator itself, if a module or an argument holds it."""


def _generator(
    name: str,
    get: Callable[[], Any],
    set_: Callable[[Any], Any],
    same: Callable[[Any, Any], bool],
    shared: bool = True,
    owner: Any = None,
) -> Generator:
    return Generator(name, get, set_, lambda state: not same(state, get()), shared, owner)


_of_cpu = torch.default_generator
_CPU = Generator(
    "cpu", _of_cpu.get_state, torch.set_rng_state, lambda state: not torch.equal(state, _of_cpu.get_state())
)
_PYTHON = _generator("python", random.getstate, random.setstate, operator.eq)


def _same(a: Any, b: Any) -> bool:
    """Whether two states of a generator of NumPy are equal: nested dicts of numbers and arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def _numpy() -> Any:
    return sys.modules["numpy"].random


_NUMPY = _generator("numpy", lambda: _numpy().get_state(legacy=False), lambda state: _numpy().set_state(state), _same)


def generators_of(devices: Iterable[torch.device], held: Iterable[Any] = ()) -> list[Generator]:
    """The generators of the process, of ``devices``, and those that :func:`held_generators` found."""
    # A forward can only draw from NumPy if it has been imported.
    found = [_CPU, _PYTHON, _NUMPY] if "numpy" in sys.modules else [_CPU, _PYTHON]
    for device in sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str):
        module = torch.get_device_module(device)
        get, set_ = partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
        found.append(_generator(str(device), get, set_, torch.equal, shared=False))
    return found + [_held(generator) for generator in held]


def held_generators(modules: Iterable[nn.Module]) -> list[Any]:
    """The generators that ``modules`` hold themselves, each once. Their submodules are not searched."""
    found: dict[int, Any] = {}
    kinds = generator_types()
    for module in modules:
        for name, value in module.__dict__.items():
            if type(value) in _NONE or name in _OF_EVERY_MODULE:
                continue
            if isinstance(value, kinds):
                found[id(value)] = value
            elif isinstance(value, (list, tuple, set, dict)):
                members = value.values() if isinstance(value, dict) else value
                found.update((id(member), member) for member in members if isinstance(member, kinds))
    # SystemRandom has no state.
    return [generator for generator in found.values() if not isinstance(generator, random.SystemRandom)]


def generators_in(value: Any) -> list[Any]:
    """The generators among the leaves of a nested value, such as the arguments of a call, each once."""
    kinds = generator_types()
    found = {id(x): x for x in flatten(value)[0] if type(x) not in LEAVES and isinstance(x, kinds)}
    return [generator for generator in found.values() if not isinstance(generator, random.SystemRandom)]


def _held(generator: Any) -> Generator:
    name = f"{type(generator).__module__.split('.')[0]}.{type(generator).__name__} of a layer"
    if isinstance(generator, torch.Generator):
        return _generator(name, generator.get_state, generator.set_state, torch.equal, owner=generator)
    if isinstance(generator, random.Random):
        return _generator(name, generator.getstate, generator.setstate, operator.eq, owner=generator)
    if hasattr(generator, "set_state"):
        # NumPy's RandomState caches a normal number besides its bit generator; Generator does not.
        get = partial(generator.get_state, legacy=False)
        return _generator(name, get, generator.set_state, _same, owner=generator)
    bits = generator.bit_generator
    return _generator(name, lambda: bits.state, partial(setattr, bits, "state"), _same, owner=generator)


def generator_types() -> tuple[type, ...]:
    """The types of generators that there can be now."""
    numpy = sys.modules.get("numpy")
    # A layer can only hold a generator of NumPy if it has been imported.
    return (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
