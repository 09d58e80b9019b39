"""Saves and restores what Python objects hold: attributes, elements of containers, values of NumPy arrays.

A call that gets an object, or whose modules hold one, may change it, and so may other code between its two runs.
:class:`Objects` is the content of all that can be reached from some objects, before a first run::

    objects = Objects([context])
    output = call(context)
    objects.record_changes()
    ...
    present = objects.again()
    call(context)
    present.restore()

Guarantee: the second run finds in each object what it held before the first. A tensor that was changed in place since
raises RuntimeError.

Not followed: modules, functions, and objects of classes of the standard library (but its containers), of torch, and of
these packages.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from pipe.recompute.thread_state import PACKAGES

__all__ = ["Objects", "Present", "content_of", "differs", "put"]

_CONTAINERS = list, dict, set, deque
#: Packages of classes whose objects are not followed.
_OTHERS = sys.stdlib_module_names - {"__main__"} | {"torch", *PACKAGES}


def content_of(value: Any) -> Any:
    """What shows whether a value was changed, and restores it: a copy, or the version of a tensor; None: no change."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if _is_array(value):
        return value.copy()
    elements = tuple(value.items() if isinstance(value, dict) else value) if isinstance(value, _CONTAINERS) else None
    attributes = _attributes(value)
    return None if elements is None and attributes is None else (elements, attributes)


def differs(value: Any, content: Any) -> bool:
    """Whether a value has been changed since ``content`` was taken of it."""
    if content is None:
        return False
    if isinstance(value, Tensor):
        return bool(value._version != content)
    now = content_of(value)
    if _is_array(value):
        return bool(now.tobytes() != content.tobytes())
    return not all(map(_same, now, content))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    if a is None or b is None:
        return a is b
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    return all(x is y or (type(x) is tuple and len(x) == 2 and x[0] is y[0] and x[1] is y[1]) for x, y in pairs)


def put(value: Any, content: Any) -> None:
    """Restores what a value held. Tensors keep theirs."""
    if content is None or isinstance(value, Tensor):
        return
    if _is_array(value):
        value[...] = content
        return
    elements, attributes = content
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(elements)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(elements)
    if attributes is not None:
        for name in (_attributes(value) or {}).keys() - attributes.keys():
            object.__delattr__(value, name)
        for name, before in attributes.items():
            object.__setattr__(value, name, before)


class Objects:
    """What can be reached from some objects, and what each of it holds now."""

    __slots__ = ("_before", "_roots")

    def __init__(self, roots: Iterable[Any]) -> None:
        self._roots = list(roots)
        self._before = _reachable(self._roots)

    @property
    def found(self) -> list[Any]:
        """All that can be reached and is not a plain value."""
        return [value for value, _ in self._before]

    def record_changes(self) -> None:
        """To be called after the first run. Raises RuntimeError if it changed a tensor in place."""
        self._check("the first run, which got it")

    def _check(self, who: str) -> None:
        for value, content in self._before:
            if isinstance(value, Tensor) and differs(value, content):
                raise RuntimeError(
                    f"a tensor of shape {tuple(value.shape)} in an object that is an argument was changed in place by "
                    f"{who}: a recomputation would start from the changed value; assign a new tensor to the object, or "
                    f"compute without recomputation"
                )

    def take_back(self) -> None:
        """After the first run: undoes its changes."""
        for value, content in self._before:
            put(value, content)

    def again(self) -> Present:
        """Gives all objects what they held; returns what restores what they hold now. Raises before it changes any."""
        self._check("other code since the forward")
        present = Present(_reachable([*self._roots, *self.found]))
        for value, content in self._before:
            if differs(value, content):
                put(value, content)
        return present


class Present:
    """What objects hold during a backward."""

    __slots__ = ("_contents",)

    def __init__(self, contents: list[tuple[Any, Any]]) -> None:
        self._contents = contents

    def restore(self) -> None:
        """May be called again after it was interrupted."""
        for value, content in self._contents:
            if differs(value, content):
                put(value, content)


def _reachable(roots: Iterable[Any]) -> list[tuple[Any, Any]]:
    """All values that can be reached, each once, with what it holds."""
    found: dict[int, tuple[Any, Any]] = {}
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in found or value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
            continue
        if type(value) is tuple or isinstance(value, frozenset):
            found[id(value)] = value, None
            waiting.extend(value)
            continue
        content = content_of(value)
        found[id(value)] = value, content
        if type(content) is tuple:
            elements, attributes = content
            for element in elements or ():
                waiting.append(element)
            waiting.extend((attributes or {}).values())
    return list(found.values())


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that is followed."""
    kind = type(value)
    if kind.__module__ == "builtins" or isinstance(value, (nn.Module, Enum, Tensor)):
        return None
    if kind.__module__.partition(".")[0] in _OTHERS and kind is not types.SimpleNamespace:
        return None
    found = dict(getattr(value, "__dict__", ()))
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            own = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, own):
                found[own] = getattr(value, own)
    return found


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype != object
