"""Attributes that a model's forward sets on modules: those of each chunk are kept apart, and those of blocks restored.

A forward may set an attribute before its blocks and read it after them (a mask, a length), or set it on a block, which
reads it again when it is recomputed. In between, other chunks and forwards run the same code.

Limit: changes inside objects that attributes refer to (a list that grows) are shared by all chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["AttributesThen", "OwnAttributes"]

_MISSING = object()

#: Restored by the recomputation itself.
_OF_TORCH = frozenset({*vars(nn.Module()), "forward"})


class OwnAttributes:
    """The attributes that the forwards of some chunks have set, for each chunk."""

    def __init__(self, chunks: int) -> None:
        self._set: list[dict[tuple[int, str], tuple[dict[str, Any], Any]]] = [{} for _ in range(chunks)]

    @contextlib.contextmanager
    def running(self, i: int, modules: Sequence[nn.Module]) -> Iterator[None]:
        """A context in which code of chunk ``i`` runs, which may set attributes of ``modules``."""
        for (_, name), (owner, value) in self._set[i].items():
            _put(owner, name, value)
        before = [(vars(module), vars(module).copy()) for module in modules]
        try:
            yield
        finally:
            for owner, old in before:
                if _differs(owner, old):
                    for name in owner.keys() | old.keys():
                        value = owner.get(name, _MISSING)
                        if value is not old.get(name, _MISSING):
                            self._set[i][id(owner), name] = owner, value


class AttributesThen:
    """The plain attributes of some modules at the time when this object is made."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._then = [(vars(module), vars(module).copy()) for module in modules]

    @property
    def unchanged(self) -> bool:
        """Whether the modules have the same attributes now."""
        return not any(_differs(now, then) for now, then in self._then)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context in which the modules have these attributes."""
        changed = [
            (now, name, now.get(name, _MISSING), then.get(name, _MISSING))
            for now, then in self._then
            if _differs(now, then)
            for name in (now.keys() | then.keys()) - _OF_TORCH
            if now.get(name, _MISSING) is not then.get(name, _MISSING)
        ]
        try:
            for owner, name, _, value in changed:
                _put(owner, name, value)
            yield
        finally:
            for owner, name, value, _ in changed:
                _put(owner, name, value)


def _put(owner: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        owner.pop(name, None)
    else:
        owner[name] = value


def _differs(now: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return now != before  # objects that are the same are not compared
    except Exception:  # values that cannot be compared, such as tensors
        return True
