"""Attributes that a model's forward sets: those of each chunk are kept apart, those of blocks and arguments restored.

A forward may set an attribute before its blocks and read it after them (a mask, a length), or set it on a block, which
reads it again when it is recomputed. In between, other chunks and forwards run the same code.

Limit: changes inside objects that attributes refer to (a list that grows) are shared by all chunks.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from pipe.nested import LEAVES

__all__ = ["ArgumentsThen", "AttributesThen", "OwnAttributes"]

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
    """The plain attributes of some modules, or objects, at the time when this object is made; not those ``skipped``."""

    def __init__(self, modules: Sequence[object], skipped: Collection[str] = _OF_TORCH) -> None:
        self._then = [(vars(module), vars(module).copy()) for module in modules]
        self._skipped = skipped

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
            for name in (now.keys() | then.keys()).difference(self._skipped)
            if now.get(name, _MISSING) is not then.get(name, _MISSING)
        ]
        try:
            for owner, name, _, value in changed:
                _put(owner, name, value)
            yield
        finally:
            for owner, name, value, _ in changed:
                _put(owner, name, value)


class ArgumentsThen:
    """Objects and arrays of NumPy among the arguments of a block, with their contents when this object is made.

    Code between blocks, or a block, may change them: a counter, a scale. A recomputation sees what its forward saw.
    """

    def __init__(self, objects: Sequence[object], arrays: Sequence[Any]) -> None:
        self._objects = AttributesThen(objects, ())
        self._arrays = [(array, array.copy()) for array in arrays]

    @classmethod
    def of(cls, leaves: Iterable[Any]) -> ArgumentsThen | None:
        """Those among the flat arguments of a block; None if there are none."""
        others = list({id(x): x for x in leaves if type(x) not in LEAVES and not isinstance(x, _UNCHANGED)}.values())
        numpy = sys.modules.get("numpy")
        arrays = [] if numpy is None else [x for x in others if isinstance(x, numpy.ndarray) and x.flags.writeable]
        objects = [x for x in others if hasattr(x, "__dict__")]
        return cls(objects, arrays) if objects or arrays else None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context in which the arguments have these contents."""
        changed = [(x, x.copy(), then) for x, then in self._arrays if x.tobytes() != then.tobytes()]
        try:
            for array, _, then in changed:
                array[...] = then
            with self._objects.again():
                yield
        finally:
            for array, now, _ in changed:
                array[...] = now


#: Arguments that are restored otherwise, or that nothing changes.
_UNCHANGED = (Tensor, nn.Module, type, types.FunctionType, types.MethodType)


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
