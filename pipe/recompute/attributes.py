"""Saves and restores plain Python attributes that modules change in forward: a hidden state, a counter, a list.

Guarantee: inside :meth:`Attributes.again` an attribute that the forward rebound, and a container or an object that it
changed, has its value from before the forward; with ``others`` also what other code has changed since. Afterwards
it has its value from before the recomputation. Modules of which no attribute changed in their first forwards cost
nothing.

Limits: changes inside what objects and containers of attributes refer to, and attributes that a module begins to
change later, are not detected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from pipe.recompute.objects import content_of, differs, put

__all__ = ["Attributes", "Stateful"]

#: Forwards after which a module that changed no attribute is taken to change none.
FORWARDS_NOTED = 2

_OF_TORCH = frozenset(vars(nn.Module()))
_MISSING = object()


class Stateful:
    """The modules of a model that may change their attributes, narrowed down by its first forwards."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.modules = list(modules)
        self._forwards = 0
        self._seen: set[nn.Module] = set()

    def add(self, name: str, module: nn.Module) -> None:
        """To be called with a module whose attributes other code has changed since a forward."""
        if module not in self._seen:
            self._seen.add(module)
            if all(module is not other for _, other in self.modules):
                self.modules.append((name, module))

    def learn(self, changed: set[nn.Module]) -> None:
        """To be called after a forward with the modules that changed attributes."""
        if self._forwards < FORWARDS_NOTED:
            self._forwards += 1
            self._seen |= changed
            if self._forwards == FORWARDS_NOTED:
                self.modules = [(name, module) for name, module in self.modules if module in self._seen]


class Attributes:
    """The attributes of modules before one forward."""

    __slots__ = ("_before", "_changed", "_recorded", "_stateful")

    def __init__(self, stateful: Stateful) -> None:
        self._stateful, self._recorded = stateful, False
        self._before = [
            (name, module, {k: (v, content_of(v)) for k, v in vars(module).items() if k not in _OF_TORCH})
            for name, module in stateful.modules
        ]
        #: For each changed attribute: the module's attributes, its name, its value and the content of that.
        self._changed: list[tuple[dict[str, Any], str, Any, Any]] = []

    def record_changes(self, *, others: bool = False) -> None:
        """To be called after the forward: keeps the old values of changed attributes, and with ``others`` of all."""
        changed: set[nn.Module] = set()
        for name, module, key, value, content in self._differences():
            if isinstance(value, Tensor) and differs(value, content):
                raise RuntimeError(
                    f"module {name or 'itself'!r} changed its attribute {key!r}, a tensor, in place while it ran; a "
                    f"recomputation would start from the changed value: register it as a buffer, or assign a new tensor"
                )
            self._changed.append((vars(module), key, value, content))
            changed.add(module)
        self._recorded = others
        if not others:
            self._before = []
        self._stateful.learn(changed)

    def _differences(self) -> Iterator[tuple[str, nn.Module, str, Any, Any]]:
        for name, module, before in self._before:
            now = vars(module)
            for key in before.keys() | (now.keys() - _OF_TORCH):
                value, content = before.get(key, (_MISSING, None))
                if now.get(key, _MISSING) is not value or differs(value, content):
                    yield name, module, key, value, content

    def take_back(self) -> None:
        """After :meth:`record_changes`: restores the attributes that the forward changed."""
        for owner, key, value, content in self._changed:
            _put(owner, key, value, content)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context with the attributes from before the forward. If it is the forward, its changes are undone."""
        if self._recorded:
            self._note_others()
        present = [(owner, key, owner.get(key, _MISSING)) for owner, key, _, _ in self._changed]
        contents = [content_of(value) for _, _, value in present]
        try:
            for owner, key, value, content in self._changed:
                _put(owner, key, value, content)
            yield
        finally:
            for (owner, key, value), content in zip(present, contents, strict=True):
                _put(owner, key, value, content)
            for _, module, key, value, content in [] if self._recorded else list(self._differences()):
                _put(vars(module), key, value, content)

    def _note_others(self) -> None:
        """Adds to what is restored the attributes that other code has bound anew since the forward."""
        known = {(id(owner), key) for owner, key, _, _ in self._changed}
        for name, module, key, value, content in list(self._differences()):
            if (id(vars(module)), key) not in known:
                self._changed.append((vars(module), key, value, content))
                self._stateful.add(name, module)


def _put(owner: dict[str, Any], key: str, value: Any, content: Any) -> None:
    if value is _MISSING:
        owner.pop(key, None)
        return
    owner[key] = value
    put(value, content)
