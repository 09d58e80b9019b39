"""Finds what a function uses besides its arguments: modules, tensors, and values that other code may change.

A function that is to run again is any callable: a module, a lambda, a bound method, a ``functools.partial``, a closure.
:func:`captured` looks where Python keeps what such a function can refer to: in its closure, its defaults, the object
that it is bound to, and the globals and attributes that its code names. :func:`frozen` is the same function with the
variables of its closure as they are now, so that a loop's variable, or a flag, has this value again.

Limits: functions of torch and of the standard library are not followed, nor are containers of more than
``MOST_ELEMENTS``, and what code names by a string (``getattr``) is not found.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from pipe.recompute.contents import CONTAINERS, PLAIN, of_a_library
from pipe.recompute.generators import generator_types

__all__ = ["Captured", "captured", "frozen"]

#: Containers with more are taken for data that does not change.
MOST_ELEMENTS = 256

_COLLECTIONS = list, tuple, set, frozenset, deque, Mapping
_IGNORED = BuiltinFunctionType, ModuleType, CodeType, type
_MISSING = object()


class Captured:
    """What a function uses besides its arguments."""

    __slots__ = ("generators", "modules", "objects", "variables")

    def __init__(self) -> None:
        self.generators: list[Any] = []
        self.modules: list[nn.Module] = []
        #: Tensors, and containers of variable elements.
        self.objects: list[Any] = []
        #: Global variables and attributes of objects that the function may read: a description, the dictionary that
        #: they are in, and their values before the first run.
        self.variables: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    def record_changes(self) -> None:
        """After the first run. What the function itself changes is no change by others."""
        self.variables = [
            (what, owner, {name: value for name, value in before.items() if owner.get(name, _MISSING) is value})
            for what, owner, before in self.variables
        ]

    def check(self, name: str) -> None:
        """Raises RuntimeError if other code has changed a variable since the first run; ``name``: of the function."""
        for what, owner, before in self.variables:
            for variable, value in before.items():
                if owner.get(variable, _MISSING) is not value:
                    raise RuntimeError(
                        f"expected {what}, {variable!r}, that {name} uses to be the same in backward, got one that was "
                        f"changed since; pass its value as an argument, or change it after backward"
                    )


def captured(*values: Any) -> Captured:
    """What functions use, and nested values hold, in an order that is the same in every run of a program."""
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
            elif kind is MethodType:
                waiting += value.__self__, value.__func__
            elif kind is FunctionType:
                waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
                if not of_a_library(value.__module__):
                    waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
                    own, there = _names(value.__code__), value.__globals__
                    names |= own
                    read = {name: there[name] for name in own if name in there}
                    waiting += read.values()
                    found.variables.append(("a global variable", there, read))
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
        read = {name: own_dict.get(name, _MISSING) for name in names if name in own_dict or hasattr(kind, name)}
        found.variables.append((f"an attribute of a {kind.__name__}", own_dict, read))
    return found


def frozen(function: Callable[..., Any], known: dict[int, CellType] | None = None) -> Callable[..., Any]:
    """The function with the variables of its closure as they are now; changes that it makes to them are its own."""
    if isinstance(function, functools.partial):
        return functools.partial(frozen(function.func, known), *function.args, **function.keywords)
    if type(function) is not FunctionType or not function.__closure__ or of_a_library(function.__module__):
        return function
    known = {} if known is None else known
    cells = []
    for cell in function.__closure__:
        copied = known.get(id(cell))
        if copied is None:
            copied = known[id(cell)] = CellType()
            if _is_set(cell):
                content = cell.cell_contents
                copied.cell_contents = frozen(content, known) if callable(content) else content
        cells.append(copied)
    code, there = function.__code__, function.__globals__
    again = FunctionType(code, there, function.__name__, function.__defaults__, tuple(cells))
    again.__kwdefaults__ = function.__kwdefaults__
    again.__dict__.update(function.__dict__)
    return again


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> dict[str, None]:
    """The globals and attributes that a function's code names, those of functions inside it included."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return dict.fromkeys([*code.co_names, *chain(*inner)])


def _is_set(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
