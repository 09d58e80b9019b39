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
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipe.recompute.generators import generator_types

__all__ = ["Captured", "captured", "frozen"]

#: Containers with more are taken for data that does not change.
MOST_ELEMENTS = 256

_CONTAINERS = {list, tuple, dict, set, frozenset, deque, OrderedDict}
_IGNORED = BuiltinFunctionType, ModuleType, CodeType, type
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {"torch", "pipe"}
_MISSING = object()


class Captured:
    """What a function uses besides its arguments, of which a further run must find the same as the first."""

    __slots__ = ("_members", "_versions", "generators", "modules", "tensors", "values")

    def __init__(self) -> None:
        self.generators: list[Any] = []
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        #: Owners of variables and elements that the function may read: a description, the owner's dictionary or
        #: container, and the names of the variables (None: all elements).
        self.values: list[tuple[str, Any, tuple[str, ...] | None]] = []
        #: The members of each owner before the first run; None for one that this changed.
        self._members: list[list[Any] | None] = []
        #: Of the tensors after the first run.
        self._versions: list[int] = []

    def record(self) -> None:
        """To be called before the first run."""
        self._members = [_members(owner, names) for _, owner, names in self.values]

    def record_changes(self) -> None:
        """After the first run. What the function itself changes is no change by others."""
        for k, ((_, owner, names), before) in enumerate(zip(self.values, self._members, strict=True)):
            if _changed(before, owner, names) is not None:
                self._members[k] = None
        self._versions = [-1 if x.is_inference() else x._version for x in self.tensors]

    def check(self, name: str) -> None:
        """Raises RuntimeError if other code has changed something since the first run; ``name``: of the function."""
        for tensor, version in zip(self.tensors, self._versions, strict=False):
            if version != -1 and tensor._version != version:
                raise RuntimeError(
                    f"expected a tensor of shape {tuple(tensor.shape)} that {name} uses to be the same in backward, "
                    f"got one that was changed in place since; clone it before changing it, or pass it as an argument"
                )
        for (what, owner, names), before in zip(self.values, self._members, strict=True):
            k = _changed(before, owner, names)
            if k is not None:
                which = f"{what}, {names[k]!r}," if names is not None else what
                raise RuntimeError(
                    f"expected {which} that {name} uses to be the same in backward, got one that was changed "
                    f"since; pass its value as an argument, or change it after backward"
                )


def _members(owner: Any, names: tuple[str, ...] | None) -> list[Any]:
    if names is not None:
        return [owner.get(name, _MISSING) for name in names]
    return [x for pair in owner.items() for x in pair] if isinstance(owner, dict) else [*owner]


def _changed(before: list[Any] | None, owner: Any, names: tuple[str, ...] | None) -> int | None:
    """The index of the first member that is another object, or None. What was empty may be a record of the user's."""
    if not before:
        return None
    after = _members(owner, names)
    for k, (a, b) in enumerate(zip(before, after, strict=False)):
        if a is not b:
            return k
    return None if len(before) == len(after) else min(len(before), len(after))


def captured(function: Callable[..., Any], given: Iterable[Any] = ()) -> Captured:
    """What a function uses besides the tensors among its arguments; ``given``: its other arguments."""
    found = Captured()
    if isinstance(function, nn.Module):
        found.modules.append(function)
        waiting = [*given]
    else:
        waiting = [function, *given]
    generators = generator_types()
    seen: set[int] = set()
    names: set[str] = set()
    owners: list[tuple[str, Any, dict[str, Any]]] = []
    held: list[Any] = []  # ids are not reused meanwhile
    while waiting:
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind in _PLAIN or id(value) in seen or isinstance(value, _IGNORED):
                continue
            seen.add(id(value))
            held.append(value)
            if isinstance(value, nn.Module):
                found.modules.append(value)
            elif isinstance(value, Tensor):
                found.tensors.append(value)
            elif isinstance(value, generators):
                found.generators.append(value)
            elif kind is MethodType:
                waiting += value.__self__, value.__func__
            elif kind is FunctionType:
                if not _of_a_library(value.__module__):
                    names |= (own := _names(value.__code__))
                    waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
                    waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
                    there = value.__globals__
                    own = frozenset(name for name in own if name in there)
                    waiting += [there[name] for name in own]
                    found.values.append(("a global variable", there, tuple(own)))
            elif isinstance(value, functools.partial):
                waiting += value.func, *value.args, *value.keywords.values()
            elif kind in _CONTAINERS:
                if len(value) <= MOST_ELEMENTS:
                    waiting += value.values() if isinstance(value, dict) else value
                    if kind is not tuple and kind is not frozenset:
                        found.values.append((f"a {kind.__name__}", value, None))
            elif not _of_a_library(kind.__module__) and isinstance(own_dict := getattr(value, "__dict__", None), dict):
                owners.append((f"an attribute of a {kind.__name__}", kind, own_dict))
        # Of an object, only what the code names.
        for _, kind, own_dict in owners:
            for name in names:
                member = own_dict.get(name, _MISSING)
                if member is _MISSING:
                    member = getattr(kind, name, None)
                    member = member if type(member) is FunctionType else None
                if id(member) not in seen and type(member) not in _PLAIN and not isinstance(member, _IGNORED):
                    waiting.append(member)
    found.values += [(what, own_dict, tuple(n for n in names if n in own_dict)) for what, _, own_dict in owners]
    return found


def frozen(function: Callable[..., Any], known: dict[int, CellType] | None = None) -> Callable[..., Any]:
    """The function with the variables of its closure as they are now; changes that it makes to them are its own."""
    if isinstance(function, functools.partial):
        return functools.partial(frozen(function.func, known), *function.args, **function.keywords)
    if type(function) is not FunctionType or not function.__closure__ or _of_a_library(function.__module__):
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
def _names(code: CodeType) -> frozenset[str]:
    """The globals and attributes that a function's code names, those of functions inside it included."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _is_set(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _of_a_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
