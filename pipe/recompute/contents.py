"""Saves and restores what modules and Python objects hold: attributes, modes, hooks, buffers, elements of containers.

A second run must find the modules and the objects that it gets as the first one did: a counter, a hidden state, a list,
a hook that was registered or removed since, a patched ``forward``. What is saved are references; of NumPy arrays it is
a copy, and of tensors the version: one that was changed in place raises RuntimeError.

Of modules, what an attribute refers to is followed one level deep; of arguments, everything that can be reached. Not
followed are functions, modules in objects, and objects of classes of the standard library (but its containers), of
torch, and of these packages. Parameters and children of modules are left alone.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipe.nested import attributes_of
from pipe.recompute.thread_state import PACKAGES
from pipe.torch_private.modules import HOOKS_OF_MODULES

__all__ = ["CONTAINERS", "PLAIN", "Contents", "EngineHook", "of_a_library"]

_OF_TORCH = frozenset(vars(nn.Module()))
#: Types of values that hold nothing that can change.
PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
#: Types of containers that can change.
CONTAINERS = list, dict, set, deque
#: Packages that are not followed.
_OTHERS = sys.stdlib_module_names - {"__main__"} | {"torch", *PACKAGES}
_hooks_of: Callable[[dict[str, Any]], tuple[dict[int, Any], ...]] = itemgetter(*HOOKS_OF_MODULES)
_NO_HOOKS: tuple[dict[int, Any], ...] = ({},) * len(HOOKS_OF_MODULES)


class EngineHook:
    """A hook of these packages, which does not change the result of a recomputation: it is left where it is."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> Any:
        """Calls the hook."""
        return self._hook(*arguments)


class _Held(NamedTuple):
    """What a module holds: its attributes, or only its mode; its hooks and its buffers, if there are any."""

    attributes: dict[str, Any]
    whole: bool
    hooks: tuple[dict[int, Any], ...] | None
    buffers: dict[str, Any] | None


def _held_by(module: nn.Module, whole: bool) -> _Held:
    own = module.__dict__
    attributes = {**own} if whole else {"training": own["training"]} if "training" in own else {}
    hooks = tuple([{**kind} for kind in found]) if any(found := _hooks_of(own)) else None
    return _Held(attributes, whole, hooks, {**own["_buffers"]} if own["_buffers"] else None)


def _keeps_its_own(module: nn.Module) -> bool:
    """Whether attributes of a module are those of the present run, as ``no_sync()`` of a wrapper around a backward."""
    kind = type(module)
    if getattr(kind, "shows_another", False):  # the attributes are those of a module of the user
        return False
    defined = kind.__module__
    return defined.partition(".")[0] in PACKAGES or defined.startswith(("torch.nn.parallel.", "torch.distributed."))


class Contents:
    """What some values hold now."""

    __slots__ = ("_before", "_keeps", "_records")

    def __init__(self, before: list[tuple[Any, Any]], records: dict[int, int] | None = None) -> None:
        self._before = before
        #: Number of elements of each container that is a record, by ``id``.
        self._records = {} if records is None else records
        #: The records that keep their elements behind this number when they get their contents.
        self._keeps: dict[int, int] = {}

    @classmethod
    def of_modules(cls, modules: Iterable[nn.Module], attributes: bool = True) -> Contents:
        """Of modules; only modes, hooks and buffers, if not ``attributes``, and of modules of these packages."""
        before: list[tuple[Any, Any]] = []
        for module in modules:
            whole = attributes and not _keeps_its_own(module)
            before.append((module, _held_by(module, whole)))
            if whole:
                own = module.__dict__
                before += [(v, _content_of(v)) for k, v in own.items() if type(v) not in PLAIN and k not in _OF_TORCH]
        return cls(before)

    @classmethod
    def of(cls, values: Iterable[Any]) -> Contents:
        """Of these values. Containers are records: what a further run adds to them is added to the present ones."""
        before = [(value, _content_of(value)) for value in values]
        return cls(before, {id(value): len(content[0]) for value, content in before if isinstance(value, CONTAINERS)})

    @classmethod
    def reachable(cls, roots: Iterable[Any]) -> Contents:
        """Of all values that can be reached from some, each once."""
        found: dict[int, tuple[Any, Any]] = {}
        waiting = list(roots)
        while waiting:
            value = waiting.pop()
            if id(value) in found or type(value) in PLAIN:
                continue
            if type(value) is tuple or isinstance(value, frozenset):
                found[id(value)] = value, None
                waiting.extend(value)
                continue
            content = None if isinstance(value, nn.Module) else _content_of(value)
            found[id(value)] = value, content
            if type(content) is tuple:
                elements, attributes = content
                waiting.extend(elements or ())
                waiting.extend((attributes or {}).values())
        return cls(list(found.values()))

    def with_those(self, other: Contents) -> Contents:
        """Of the values of both; those of ``other`` are no records."""
        theirs = {id(value) for value, _ in other._before}
        mine = [(value, content) for value, content in self._before if id(value) not in theirs]
        return Contents(mine + other._before, {k: n for k, n in self._records.items() if k not in theirs})

    @property
    def values(self) -> list[Any]:
        """The values."""
        return [value for value, _ in self._before]

    def check(self, when: str) -> None:
        """Raises RuntimeError if a tensor was changed in place; ``when``: for the error."""
        for value, content in self._before:
            if isinstance(value, Tensor) and _differs(value, content):
                owners = [each for each, held in self._before if type(held) is _Held]
                names = [repr(name) for each in owners for name, x in each.__dict__.items() if x is value]
                what = f"attribute {names[0]}, a tensor" if names else "a tensor"
                raise RuntimeError(
                    f"expected {what} of shape {tuple(value.shape)}, not to be changed in place {when}: a "
                    f"recomputation would start from the changed value; assign a new tensor, register it as a buffer, "
                    f"or compute without recomputation"
                )

    def record_changes(self) -> bool:
        """After a forward of modules: whether it changed an attribute. Raises if it changed a tensor in place."""
        changed = False
        for value, content in self._before:
            if type(content) is not _Held:
                changed |= _differs(value, content)
            elif content.whole and not _same_items(own := value.__dict__, content.attributes):
                changed = True
                for name, x in content.attributes.items():
                    if type(x) is Tensor and x.grad_fn is not None and own.get(name) is not x:
                        content.attributes[name] = x.detach().requires_grad_()  # else each batch holds the one before
        if changed:
            self.check("while the module runs")
        return changed

    def again(self) -> Contents:
        """Gives all values what they held; returns what they hold now. Raises before it changes any."""
        self.check("by other code since the forward")
        present = Contents.of(self.values)
        present._keeps = self._records
        self.put()
        return present

    def put(self) -> bool:
        """Gives all values what they held; returns whether that was something else than now. May be repeated."""
        changed = False
        keeps, self._keeps = self._keeps, {}
        for value, content in self._before:
            if type(content) is _Held:
                changed |= _put_held(value.__dict__, content)
            elif not isinstance(value, Tensor):
                added = _elements(value)[keeps[id(value)] :] if id(value) in keeps else []
                if added or _differs(value, content):
                    changed = True
                    _put(value, content, added)
        return changed


def _put_held(own: dict[str, Any], held: _Held) -> bool:
    changed = False
    if not held.whole:
        own.update(held.attributes)
    elif not _same_items(own, held.attributes):
        changed = True
        for name in own.keys() - held.attributes.keys():
            del own[name]
        own.update(held.attributes)
    now = _hooks_of(own)
    if held.hooks is not None or any(now):
        for kind, before in zip(now, held.hooks or _NO_HOOKS, strict=True):
            there, wanted = _without_engines(kind), _without_engines(before)
            if there != wanted:
                changed = True
                engines = {key: hook for key, hook in kind.items() if type(hook) is EngineHook}
                kind.clear()
                kind.update({**wanted, **engines})
    if held.buffers is not None and not _same_items(own["_buffers"], held.buffers):
        changed = True
        own["_buffers"].clear()
        own["_buffers"].update(held.buffers)
    return changed


def _without_engines(hooks: dict[int, Any]) -> dict[int, Any]:
    return {key: hook for key, hook in hooks.items() if type(hook) is not EngineHook}


def _same_items(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return list(a) == list(b) and all(map(is_, a.values(), b.values()))


def _content_of(value: Any) -> Any:
    """What shows whether a value was changed, and restores it: a copy, or the version of a tensor; None: no change."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if _is_array(value):
        return value.copy()
    elements = _elements(value) if isinstance(value, CONTAINERS) else None
    attributes = _attributes(value)
    return None if elements is None and attributes is None else (elements, attributes)


def _elements(value: Any) -> list[Any]:
    # Keys and values in turn: pairs would be other objects each time.
    return [x for pair in value.items() for x in pair] if isinstance(value, dict) else [*value]


def _differs(value: Any, content: Any) -> bool:
    """Whether a value has been changed since ``content`` was taken of it."""
    if content is None:
        return False
    now = _content_of(value)
    if isinstance(value, Tensor):
        return bool(now != content)
    if _is_array(value):
        return bool(now.tobytes() != content.tobytes())
    (elements, attributes), (old_elements, old_attributes) = now, content
    if (attributes is None) is not (old_attributes is None):
        return True
    same = len(elements or ()) == len(old_elements or ()) and all(map(is_, elements or (), old_elements or ()))
    return not (same and (attributes is None or _same_items(attributes, old_attributes)))


def _put(value: Any, content: Any, more: Sequence[Any] = ()) -> None:
    """Restores what a value held; a container gets ``more`` elements besides."""
    if _is_array(value):
        value[...] = content
        return
    elements, attributes = content
    if elements is not None:
        elements = [*elements, *more]
        value.clear()
        if isinstance(value, dict):
            value.update(zip(elements[::2], elements[1::2], strict=True))
        else:
            (value.update if isinstance(value, set) else value.extend)(elements)
    if attributes is not None:
        for name in (_attributes(value) or {}).keys() - attributes.keys():
            object.__delattr__(value, name)
        for name, before in attributes.items():
            object.__setattr__(value, name, before)


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that is followed."""
    kind = type(value)
    if kind.__module__ == "builtins" or isinstance(value, (nn.Module, Enum, Tensor)):
        return None
    if of_a_library(kind.__module__) and kind is not types.SimpleNamespace:
        return None
    return dict(attributes_of(value))


def of_a_library(module: str | None) -> bool:
    """Whether the classes and functions of a module are not followed."""
    return (module or "").partition(".")[0] in _OTHERS


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype != object
