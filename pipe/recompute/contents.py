"""Saves and restores what modules and Python objects hold: attributes, modes, hooks, elements, variables of functions.

A second run must find the modules and the objects that it uses as the first one did: a counter, a hidden state, a list,
a hook that was registered or removed since, a patched ``forward``, a loop's variable. What is saved are references; of
NumPy arrays it is a copy, and of tensors the version: one that was changed in place raises RuntimeError.

Of modules, what an attribute refers to is followed one level deep; of arguments, everything that can be reached. Not
followed are functions, modules in objects, and objects of classes of the standard library (but its containers), of
torch, and of these packages. Parameters and children of modules are left alone.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from operator import is_, itemgetter
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipe.nested import attributes_of
from pipe.recompute.thread_state import PACKAGES
from pipe.torch_private.modules import HOOKS_OF_MODULES

__all__ = ["CONTAINERS", "PLAIN", "Contents", "Variables", "attributes_in", "elements_in", "of_a_library"]

_OF_TORCH = frozenset(vars(nn.Module()))
#: Types of values that hold nothing that can change.
PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
#: Types of containers that can change.
CONTAINERS = list, dict, set, deque
#: Packages that are not followed.
_OTHERS = sys.stdlib_module_names - {"__main__"} | {"torch", *PACKAGES}
#: The buffers and hooks of a module.
_members_of: Callable[[dict[str, Any]], tuple[dict[Any, Any], ...]] = itemgetter("_buffers", *HOOKS_OF_MODULES)


@dataclass(frozen=True, slots=True)
class Variables:
    """Some names in a dictionary: globals that a function reads, or attributes of an object."""

    there: dict[str, Any]
    names: list[str]


class _Held(NamedTuple):
    """What a module holds: its attributes, or only its mode; its buffers, and if it is whole, its hooks."""

    attributes: dict[str, Any]
    whole: bool
    members: list[dict[Any, Any]]


def _held_by(module: nn.Module, whole: bool) -> _Held:
    own = module.__dict__
    if whole:
        return _Held({**own}, True, [{**each} for each in _members_of(own)])
    return _Held({"training": own["training"]} if "training" in own else {}, False, [{**own["_buffers"]}])


@functools.lru_cache(maxsize=1024)
def _keeps_its_own(kind: type[nn.Module]) -> bool:
    """Whether attributes of a module are those of the present run, as ``no_sync()`` of a wrapper around a backward."""
    defined = kind.__module__
    return defined.partition(".")[0] in PACKAGES or defined.startswith(("torch.nn.parallel.", "torch.distributed."))


class Contents:
    """What some values hold now.

    ``records``: whether containers are records: what a further run adds to them is added to the present elements.
    """

    __slots__ = ("_before", "_keeps", "_records")

    def __init__(self, before: list[tuple[Any, Any]], *, records: bool = False) -> None:
        self._before, self._records = before, records
        #: By ``id``, from which element on containers keep what they have when they get their contents.
        self._keeps: dict[int, int] = {}

    @classmethod
    def of_modules(cls, modules: Iterable[nn.Module], attributes: bool = True) -> Contents:
        """Of modules; only modes and buffers, if not ``attributes``, and of modules of these packages."""
        before: list[tuple[Any, Any]] = []
        for module in modules:
            whole = attributes and not _keeps_its_own(type(module))  # type: ignore[arg-type]
            before.append((module, _held_by(module, whole)))
            if whole:
                own = module.__dict__
                before += [(v, _content_of(v)) for k, v in own.items() if type(v) not in PLAIN and k not in _OF_TORCH]
        return cls(before)

    @classmethod
    def of(cls, values: Iterable[Any], *, records: bool = False) -> Contents:
        """Of these values."""
        return cls([(value, _content_of(value)) for value in values], records=records)

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
            if type(content) is _Held and content.whole:
                content.attributes["_parameters"] = None  # they may be there for this run only
        if changed:
            self.check("while the module runs")
        return changed

    def present(self) -> Contents:
        """What the values hold now, to be put back after a further run."""
        now = Contents.of(self.values)
        if self._records:
            now._keeps = {id(x): len(content[0]) for x, content in self._before if isinstance(x, CONTAINERS)}
        return now

    def put(self) -> bool:
        """Gives all values what they held; returns whether that was something else than now. May be repeated."""
        changed = False
        keeps, self._keeps = self._keeps, {}
        for value, content in self._before:
            if type(content) is _Held:
                changed |= _put_held(value.__dict__, content)
            elif not isinstance(value, Tensor):
                added = (elements_in(value) or [])[keeps[id(value)] :] if id(value) in keeps else []
                if added or _differs(value, content):
                    changed = True
                    _put(value, content, added)
        return changed


def _put_held(own: dict[str, Any], held: _Held) -> bool:
    if held.whole:
        held.attributes["_parameters"] = own["_parameters"]
    changed = held.whole and not _same_items(own, held.attributes)
    if changed:
        for name in own.keys() - held.attributes.keys():
            del own[name]
    if changed or not held.whole:
        own.update(held.attributes)
    for now, before in zip(_members_of(own), held.members, strict=False):
        if (now or before) and not _same_items(now, before):
            changed = True
            now.clear()
            now.update(before)
    return changed


def _same_items(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return list(a) == list(b) and all(map(is_, a.values(), b.values()))


def _content_of(value: Any) -> Any:
    """What shows whether a value was changed, and restores it: a copy, or the version of a tensor; None: no change."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if _is_array(value):
        return value.copy()
    elements, attributes = elements_in(value), attributes_in(value)
    return None if elements is None and attributes is None else (elements, attributes)


def elements_in(value: Any) -> list[Any] | None:
    """What a container that can change holds: of a dict keys and values in turn, of a variable its value."""
    if isinstance(value, dict):  # keys and values in turn: pairs would be other objects each time
        return [x for pair in value.items() for x in pair]
    if isinstance(value, CellType):
        try:
            return [value.cell_contents]
        except ValueError:
            return []
    return [*value] if isinstance(value, CONTAINERS) else None


def _differs(value: Any, content: Any) -> bool:
    """Whether a value has been changed since ``content`` was taken of it."""
    if content is None:
        return False
    now = _content_of(value)
    if isinstance(value, Tensor):
        return bool(now != content)
    if _is_array(value):
        return bool(now.tobytes() != content.tobytes())
    (elements, attributes), (old_elements, old_attributes) = now or (None, None), content
    same = len(elements or ()) == len(old_elements or ()) and all(map(is_, elements or (), old_elements or ()))
    return not (same and _same_items(attributes or {}, old_attributes or {}))


def _put(value: Any, content: Any, more: list[Any]) -> None:
    """Restores what a value held; a container gets ``more`` elements besides."""
    if _is_array(value):
        value[...] = content
        return
    elements, attributes = content
    if isinstance(value, CellType):
        if elements:
            value.cell_contents = elements[0]
        else:
            del value.cell_contents
    elif elements is not None:
        elements = [*elements, *more]
        value.clear()
        if isinstance(value, dict):
            value.update(zip(elements[::2], elements[1::2], strict=True))
        else:
            (value.update if isinstance(value, set) else value.extend)(elements)
    if type(value) is Variables:
        for name in value.names:
            if name not in attributes:
                value.there.pop(name, None)
        value.there.update(attributes)
    elif attributes is not None:
        for name in (attributes_in(value) or {}).keys() - attributes.keys():
            object.__delattr__(value, name)
        for name, before in attributes.items():
            object.__setattr__(value, name, before)


def attributes_in(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that is followed, or the values of variables."""
    kind = type(value)
    if kind is Variables:
        return {name: value.there[name] for name in value.names if name in value.there}
    followed = kind is types.SimpleNamespace or not of_a_library(kind.__module__)
    return attributes_of(value) if followed and not isinstance(value, (nn.Module, Enum)) else None


def of_a_library(module: str | None) -> bool:
    """Whether the classes and functions of a module are not followed."""
    return (module or "").partition(".")[0] in _OTHERS


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype != object
