"""The values of parameters that homes store in a form (``store_dtype``), for code that reads or writes whole values.

At home such a parameter is a view of the bfloat16 values that loads read: it may be read there, but only an optimizer
of this package writes it. Everything else goes through :class:`StoredValues`: ``state_dict()``, checkpoints, files.

Guarantees
    * The step of any other optimizer over such a parameter raises before it changed anything.
    * Reading and writing values takes memory for one parameter, or less.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.planning.partition import aligned
from offload.storage import Tier
from offload.storage.buffer import host_buffer
from offload.storage.contract import bytes_of
from offload.streaming.formed_weights import formed_values, seal, store_formed
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice

__all__ = ["StoredValues", "deferring_values", "defers_values", "note_owner", "stored_values", "values_in_full"]

#: Elements that are decoded at a time.
_WINDOW = 1 << 20

#: The shard of each parameter that is stored in a form, by the parameter's identity. There is no reference to the
#: parameter, weak ones included: they count as those of code that may read it at any time.
_owners: dict[int, weakref.ref[Shard]] = {}
_hook: Any = None
_state = threading.local()


class StoredValues:
    """The values of one parameter, in their own type. Has what code that writes files asks of a tensor."""

    layout = torch.strided

    def __init__(self, shard: Shard, s: Slice) -> None:
        assert s.form is not None
        self._shard, self._slice = shard, s
        self.shape = s.parameter.shape
        self.device = torch.device("cpu")
        #: That of the values which the form keeps exactly.
        self.dtype = s.full_dtype if s.form.exact else s.dtype

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel() * self.element_size()

    def data_ptr(self) -> int:
        """Address of what is stored."""
        return self._slice.parameter.data_ptr()

    def stride(self) -> tuple[int, ...]:
        """Layout of the values."""
        return self._slice.stride

    def detach(self) -> Tensor:
        """A copy of the values."""
        values = formed_values(self._shard, self._slice)
        return values.to(self.dtype)

    def read_from(self, read_into: Callable[[Tensor], None]) -> None:
        """Stores what a function writes into a tensor. If it raises, nothing is stored."""
        values = torch.empty(self.shape, dtype=self.dtype)
        read_into(values)
        self.write(values)

    def write(self, values: Tensor) -> None:
        """Stores values of any type, rounded to the nearest where the form is not exact."""
        store_formed(self._shard, self._slice, values)
        torch.autograd.graph.increment_version(self._slice.parameter)
        seal(self._shard)


def note_owner(shard: Shard) -> None:
    """Makes the values of the parameters of a shard known; called for each new shard."""
    global _hook
    formed = shard.formed
    if formed:
        owner = weakref.ref(shard)
        identities = [id(s.parameter) for s in formed]
        _owners.update(dict.fromkeys(identities, owner))
        weakref.finalize(shard, _forget, identities, owner).atexit = False
    if formed and _hook is None:
        _hook = register_optimizer_step_pre_hook(_refuse)


def _forget(identities: Sequence[int], owner: weakref.ref[Shard]) -> None:
    for identity in identities:
        if _owners.get(identity) is owner:
            del _owners[identity]


def _owner_of(tensor: Any) -> tuple[Shard, Slice] | None:
    """The shard and slice of a parameter that is stored in a form."""
    found = _owners.get(id(tensor))
    shard = None if found is None else found()
    s = None if shard is None else next((s for s in shard.formed if s.parameter is tensor), None)
    return None if shard is None or s is None else (shard, s)


def stored_values(tensor: Any) -> StoredValues | None:
    """The stored values of a parameter at home; None for any other tensor, and while layers have the parameter."""
    found = _owner_of(tensor)
    if found is None:
        return None
    shard, s = found
    at_home = shard.home is not None and s.parameter.data_ptr() == shard.home.tensor.data_ptr() + s.offset
    return StoredValues(shard, s) if at_home else None


def _refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raises RuntimeError for an optimizer that would write parameters itself."""
    if getattr(optimizer, "updates_homes", False):
        return
    if any(_owner_of(p) is not None for group in optimizer.param_groups for p in group["params"]):
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"expected an OffloadOptimizer for a model with store_dtype=, got a {kind}, which would write rounded "
            f"parameters; nothing was changed. Use OffloadOptimizer(model, {kind}, ...), or make the model without "
            f"store_dtype"
        )


@contextlib.contextmanager
def deferring_values() -> Iterator[None]:
    """A context in which ``state_dict()`` has :class:`StoredValues`, each of which is read when it is used."""
    before, _state.deferring = defers_values(), True
    try:
        yield
    finally:
        _state.deferring = before


def defers_values() -> bool:
    """Whether this thread is inside of :func:`deferring_values`."""
    return bool(getattr(_state, "deferring", False))


def values_in_full(shards: Iterable[Shard], tier: Tier) -> dict[int, Tensor]:
    """Copies of the values of all parameters that are stored in a form, by the address of what is stored.

    Where homes are files, the copies are in a file as well, which is removed with them.
    """
    found = [(shard, s) for shard in shards for s in shard.formed]
    places, end = [], 0
    for shard, s in found:
        places.append((shard, s, end))
        end += aligned(s.full_nbytes)
    if not places:
        return {}
    block = tier.allocate(end, "state-dict")
    for shard, s, offset in places:
        for begin in range(0, s.parameter.numel(), _WINDOW):
            values = _window(shard, s, begin, min(_WINDOW, s.parameter.numel() - begin))
            block.write(bytes_of(values), offset + begin * values.element_size())
    return {s.parameter.data_ptr(): s.in_full(offset).own_view(block.tensor) for _, s, offset in places}


def _window(shard: Shard, s: Slice, begin: int, count: int) -> Tensor:
    """The values of some elements, in the order of memory."""
    assert s.form is not None
    assert shard.home is not None
    at = s.offset + begin * s.dtype.itemsize
    halves = []
    for block in (shard.home, shard.lower):
        if block is not None:
            halves.append(host_buffer(count * s.dtype.itemsize))
            block.read_into(halves[-1], at)
    values = torch.empty(count, dtype=s.full_dtype)
    s.form.decode(halves[0].view(s.dtype), halves[1].view(torch.int16) if len(halves) > 1 else None, values)
    return values
