"""Tells iterators that may be reset in place, so that the next epoch has the same iterator object, and sees resets.

``iter(loader)`` usually makes a new iterator. A ``DataLoader`` with ``persistent_workers=True`` resets the one that it
has, and an object that is loader and iterator in one resets itself. While another thread is inside its ``next()``, a
reset would lose batches or raise; and an end that was read ahead belongs to the epoch before the reset.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from pipe.nested import attributes_of
from pipe.torch_private.data import DataLoaderIterator, is_persistent

__all__ = ["attributes_at_end", "may_be_reset"]


def may_be_reset(iterator: Iterator[Any]) -> bool:
    """Whether ``iter()`` of a loader may reset the iterator, or one that it reads (such as in a ``map`` or ``zip``)."""
    return any(map(_may_be_reset, _iterators_in(iterator)))


def _may_be_reset(iterator: Any) -> bool:
    if isinstance(iterator, DataLoaderIterator):
        return is_persistent(iterator)
    kind = type(iterator)
    # A length is that of an epoch, so the object is a loader, or is made once for it.
    return hasattr(kind, "__len__") or not _returns_itself(getattr(kind, "__iter__", None))


def _returns_itself(method: Any) -> bool:
    code = getattr(method, "__code__", None)  # methods that are built in have none, and reset nothing
    return code is None or code.co_code == _itself.__code__.co_code


def _itself(self: Any) -> Any:
    return self


def attributes_at_end(iterator: Iterator[Any]) -> list[tuple[Any, ...]]:
    """The attributes of an iterator and of those that it reads. Nothing but a reset changes them after its end."""
    return [pair for each in _iterators_in(iterator) for pair in attributes_of(each)]


def _iterators_in(iterator: Iterator[Any]) -> list[Any]:
    """The iterator, and those that it reads."""
    found: list[Any] = [iterator]
    for each in found:
        if not isinstance(each, DataLoaderIterator):
            held = [*gc.get_referents(each), *(value for _, value in attributes_of(each))]
            for value in list(held):
                if isinstance(value, tuple):  # zip holds its iterators in one
                    held += value
            found += [
                value
                for value in {id(value): value for value in held}.values()
                if hasattr(type(value), "__next__") and not any(value is other for other in found)
            ]
    return found
