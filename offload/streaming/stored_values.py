"""The weights that homes store in a form (``store_dtype``): their values, and who may read and write them.

At home such a parameter is a view of the bfloat16 values that loads read: it may be read there, but only an optimizer
of this package writes it. Everything else goes through :class:`StoredValues`: ``state_dict()``, checkpoints, files.

Guarantees
    * The step of any other optimizer over such a parameter raises before it changed anything.
    * What other code writes to such a parameter is found before the next pass (:func:`check_seal`), since it is not a
      value of the form.
    * Reading and writing values takes memory for one parameter, or less.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.partition import aligned
from offload.storage import Tier
from offload.storage.contract import bytes_of, in_order
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice

__all__ = [
    "StoredValues",
    "check_seal",
    "deferring_values",
    "defers_values",
    "note_owner",
    "seal",
    "stored_values",
    "values_in_full",
]

#: The shard of each parameter that is stored in a form, by the parameter's identity. There is no reference to the
#: parameter, weak ones included: they count as those of code that may read it at any time.
_owners: weakref.WeakValueDictionary[int, Shard] = weakref.WeakValueDictionary()
_hook: Any = None
_deferring = contextvars.ContextVar("deferring", default=False)


def seal(shard: Shard) -> None:
    """Notes that the parameters have the values that are stored."""
    shard.form_versions = tuple(s.parameter._version for s in shard.formed)


def check_seal(shard: Shard) -> None:
    """Raises RuntimeError if other code has written to parameters that are stored in a form."""
    if shard.form_versions is None:
        return
    if (other := next((s for s in shard.assigned() if s.form is not None), None)) is not None:
        shard.point_home(other)
        raise RuntimeError(
            f"other data was assigned to parameter {other.name}, but with store_dtype= only an OffloadOptimizer "
            f"writes parameters; the assignment was dropped. Load values by load_state_dict()"
        )
    for s, version in zip(shard.formed, shard.form_versions, strict=True):
        if s.parameter._version != version:
            raise RuntimeError(
                f"parameter {s.name} was written in place, but with store_dtype= only an OffloadOptimizer writes "
                f"parameters: what was written is not a value of its form. Load values by load_state_dict() or "
                f"load_checkpoint()"
            )


class StoredValues:
    """The values of one parameter, in their own type. Has what code that writes files asks of a tensor."""

    layout = torch.strided

    def __init__(self, shard: Shard, s: Slice) -> None:
        assert s.form is not None
        self._shard, self._slice, self._form = shard, s, s.form
        self.shape = s.parameter.shape
        self.device = torch.device("cpu")
        #: That of the values which the form keeps exactly.
        self.dtype = s.full_dtype if s.form.exact else s.dtype
        self.nbytes = self.shape.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def data_ptr(self) -> int:
        """Address of what is stored."""
        return self._slice.parameter.data_ptr()

    def stride(self) -> tuple[int, ...]:
        """Layout of the values."""
        return self._slice.stride

    def in_full(self) -> Tensor:
        """A copy of the values in the parameter's own type."""
        found = torch.empty_strided(self.shape, self.stride(), dtype=self._slice.full_dtype)
        self._form.decode(*self._at_home(), in_order(found))
        return found

    def detach(self) -> Tensor:
        """A copy of the values."""
        return self.in_full().to(self.dtype)

    def write(self, values: Tensor) -> None:
        """Stores values of any type, rounded to the nearest where the form is not exact."""
        dense = torch.empty_strided(self.shape, self.stride(), dtype=self._slice.full_dtype).copy_(values)
        self._form.encode(in_order(dense), *self._at_home())
        torch.autograd.graph.increment_version(self._slice.parameter)
        seal(self._shard)

    def _at_home(self) -> tuple[Tensor, Tensor | None]:
        return in_order(self._shard.home_view(self._slice)), self._shard.lower_view(self._slice)


def note_owner(shard: Shard) -> None:
    """Makes the values of the parameters of a shard known; called for each new shard."""
    global _hook
    formed = shard.formed
    _owners.update((id(s.parameter), shard) for s in formed)
    if formed and _hook is None:
        _hook = register_optimizer_step_pre_hook(_refuse)


def stored_values(tensor: Any) -> StoredValues | None:
    """The stored values of a parameter at home; None for any other tensor, and while it has memory of its own."""
    shard = _owners.get(id(tensor))
    s = None if shard is None else next(s for s in shard.formed if s.parameter is tensor)
    return None if shard is None or s is None or s in shard.assigned() else StoredValues(shard, s)


def _refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raises RuntimeError for an optimizer that would write parameters itself."""
    if getattr(optimizer, "updates_homes", False):
        return
    if any(id(p) in _owners for group in optimizer.param_groups for p in group["params"]):
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"expected an OffloadOptimizer for a model with store_dtype=, got a {kind}, which would write rounded "
            f"parameters; nothing was changed. Use OffloadOptimizer(model, {kind}, ...), or make the model without "
            f"store_dtype"
        )


@contextlib.contextmanager
def deferring_values() -> Iterator[None]:
    """A context in which ``state_dict()`` has :class:`StoredValues`, each of which is read when it is used."""
    token = _deferring.set(True)
    try:
        yield
    finally:
        _deferring.reset(token)


def defers_values() -> bool:
    """Whether this is inside of :func:`deferring_values`."""
    return _deferring.get()


def values_in_full(shards: Iterable[Shard], tier: Tier) -> dict[int, Tensor]:
    """Copies of the values of all parameters that are stored in a form, by the address of what is stored.

    Where homes are files, the copies are in a file as well, which is removed with them.
    """
    places, end = [], 0
    for shard in shards:
        for s in shard.formed:
            places.append((shard, s, end))
            end += aligned(s.full_nbytes)
    if not places:
        return {}
    block = tier.allocate(end, "state-dict")
    for shard, s, offset in places:
        block.write(bytes_of(StoredValues(shard, s).in_full()), offset)
    return {s.parameter.data_ptr(): s.in_full(offset).own_view(block.tensor) for _, s, offset in places}
