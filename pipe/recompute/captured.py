"""Finds what a function uses besides its arguments: modules, tensors, and values that other code may change.

A function that is to run again is any callable: a module, a lambda, a bound method, a ``functools.partial``, a closure.
:func:`captured` looks where Python keeps what such a function can refer to: in its closure, its defaults, the object
that it is bound to, and the globals and attributes that its code names. These variables are saved and restored as other
contents are (:mod:`.contents`), so that a loop's variable, or a flag, has its value of the forward again.

Limits: functions of torch and of the standard library are not followed, nor are containers of more than
``MOST_ELEMENTS``, and what code names by a string (``getattr``) is not found.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from random import SystemRandom
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from pipe.recompute.contents import CONTAINERS, PLAIN, Variables, attributes_in, elements_in, of_a_library
from pipe.recompute.generators import generator_types

__all__ = ["Captured", "captured"]

#: Containers with more are taken for data that does not change.
MOST_ELEMENTS = 256

_COLLECTIONS = list, tuple, set, frozenset, deque, Mapping
_IGNORED = BuiltinFunctionType, ModuleType, CodeType, type, SystemRandom  # which has no state
_MISSING = object()


@dataclass(slots=True)
class Captured:
    """What a function uses besides its arguments."""

    generators: list[Any] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    #: Tensors, containers of variable elements, and variables.
    objects: list[Any] = field(default_factory=list)


def captured(*values: Any, whole: bool = False) -> Captured:
    """What functions use, and nested values hold, in an order that is the same in every run of a program.

    ``whole``: everything that the values hold, directly and indirectly, but not what functions among them use.
    """
    found = Captured()
    waiting = [*values[::-1]]
    generators = generator_types()
    seen: set[int] = set()
    names: dict[str, None] = {}
    owners: list[tuple[type, dict[str, Any]]] = []
    held: list[Any] = []  # ids are not reused meanwhile
    while waiting:
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind in PLAIN or id(value) in seen or isinstance(value, _IGNORED):
                continue
            seen.add(id(value))
            held.append(value)
            if isinstance(value, nn.Module):
                found.modules.append(value)
            elif isinstance(value, Tensor):
                found.objects.append(value)
            elif isinstance(value, generators):
                found.generators.append(value)
            elif whole:
                found.objects.append(value)
                waiting += value if isinstance(value, (tuple, frozenset)) else elements_in(value) or ()
                waiting += (attributes_in(value) or {}).values()
            elif kind is MethodType:
                waiting += value.__self__, value.__func__
            elif kind is CellType:
                found.objects.append(value)
                with contextlib.suppress(ValueError):  # it is empty
                    waiting.append(value.cell_contents)
            elif kind is FunctionType:
                waiting += value.__closure__ or ()
                if not of_a_library(value.__module__):
                    waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
                    own, there = _names(value.__code__), value.__globals__
                    names |= own
                    read = [name for name in own if name in there]
                    waiting += [there[name] for name in read]
                    found.objects.append(Variables(there, read))
            elif isinstance(value, functools.partial):
                waiting += value.func, *value.args, *value.keywords.values()
            elif isinstance(value, _COLLECTIONS):
                if len(value) <= MOST_ELEMENTS:
                    waiting += value.values() if isinstance(value, Mapping) else value
                    if isinstance(value, CONTAINERS):
                        found.objects.append(value)
            elif not of_a_library(kind.__module__) and isinstance(own_dict := getattr(value, "__dict__", None), dict):
                owners.append((kind, own_dict))
                waiting.append(getattr(kind, "__call__", None))  # noqa: B004
        # Of an object, only what the code names.
        for kind, own_dict in owners:
            for name in names:
                member = own_dict.get(name, _MISSING)
                if member is _MISSING:
                    member = getattr(kind, name, None)
                    member = member if type(member) is FunctionType else None
                if id(member) not in seen and type(member) not in PLAIN and not isinstance(member, _IGNORED):
                    waiting.append(member)
    for kind, own_dict in owners:
        # One that the object does not have has the value of its class.
        found.objects.append(Variables(own_dict, [x for x in names if x in own_dict or hasattr(kind, x)]))
    return found


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> dict[str, None]:
    """The globals and attributes that a function's code names, those of functions inside it included."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return dict.fromkeys([*code.co_names, *chain(*inner)])
