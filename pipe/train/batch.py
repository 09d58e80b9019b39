"""Copies batches of any structure to a device, and walks the objects inside them.

A loader may yield a tensor, nested dicts, lists and tuples, named tuples, dataclasses, or an object with a ``.to``
method. A container keeps its type, and values that are no tensors stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from operator import attrgetter, is_, itemgetter, setitem
from typing import Any

import torch
from torch import Tensor

from pipe.nested import attributes_of
from pipe.torch_private.data import pytree

__all__ = ["follow", "move", "pageable_bytes", "record_stream", "walk"]


def _moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None)) and not isinstance(value, type)


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on ``device``, copied without blocking the host where the memory is pinned.

    A batch with nothing to move is returned itself.
    """
    leaves, spec = pytree.tree_flatten(batch, _moves_itself)
    moved = [_moved(leaf, device) for leaf in leaves]
    return batch if all(map(is_, moved, leaves)) else pytree.tree_unflatten(moved, spec)


def _moved(value: Any, device: torch.device) -> Any:
    if _moves_itself(value):
        try:
            return value.to(device, non_blocking=True)
        except TypeError:  # it does not take non_blocking
            return value.to(device)
    if isinstance(value, Mapping):
        items = dict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    else:
        return value
    moved = {name: move(item, device) for name, item in items.items()}
    if all(map(is_, moved.values(), items.values())):
        return value
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return moved
    # Keeps the type. Not dataclasses.replace: it calls __init__ again, which refuses init=False fields and may compute
    # values.
    copied, put = copy.copy(value), setitem if isinstance(value, Mapping) else object.__setattr__
    for name, item in moved.items():
        put(copied, name, item)
    return copied


#: Steps from a batch to an object inside it: functions of what was reached.
Path = tuple[Callable[[Any], Any], ...]

_OPAQUE = (str, bytes, int, float, complex, bool, type(None), type, torch.device, torch.dtype, torch.nn.Module)
_DEEPEST = 8  # levels of containers that are walked; deeper values are taken for object graphs, not for a batch


def _children(value: Any) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    if isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield itemgetter(key), item
    elif not isinstance(value, (Tensor, *_OPAQUE)) and not callable(value):
        for name, item in attributes_of(value).items():
            if item is not None:
                yield attrgetter(name), item


def walk(batch: Any) -> Iterator[tuple[Path, Any]]:
    """Every object that the batch reaches, with its path, outermost first; each object once."""
    seen: set[int] = set()  # ids are safe here: everything seen is kept alive by the batch while this runs
    found: deque[tuple[Path, Any]] = deque([((), batch)])
    while found:
        path, value = found.popleft()
        if id(value) not in seen and len(path) < _DEEPEST:
            seen.add(id(value))
            yield path, value
            found.extend(((*path, step), child) for step, child in _children(value))


def follow(batch: Any, path: Path) -> Any:
    """The object at ``path``; LookupError or AttributeError if this batch has no such path."""
    return functools.reduce(lambda value, step: step(value), path, batch)


def pageable_bytes(batch: Any, device: torch.device) -> int:
    """Bytes of host tensors that cannot be copied to ``device`` asynchronously because their memory is not pinned."""
    if device.type == "cpu":
        return 0
    tensors = (value for _, value in walk(batch) if isinstance(value, Tensor))
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == "cpu" and not t.is_pinned())


def record_stream(batch: Any, stream: torch.cuda.Stream | None) -> None:
    """Tells the allocator that ``stream`` uses the batch's memory until the work queued on it by now is done.

    Without this, memory allocated on a copy stream could be reused by the next copy while kernels still read it.
    """
    for _, value in walk(batch) if stream is not None else ():
        if callable(getattr(value, "record_stream", None)) and getattr(value, "is_cuda", True):
            value.record_stream(stream)
