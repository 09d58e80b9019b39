"""What a graph saves in place of weights on a slot: their place there, which is looked up in the slot of the backward.

Tensors of a subclass that consist of views of the slot are taken apart. A cast of a weight that trains, as autocast
makes it, is made again when it is used: a graph does not hold a second copy of the weights in another type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.visit import Visit
from pipe.torch_private.dispatch import is_traceable_wrapper_subclass
from pipe.torch_private.tensors import negative_view

__all__ = ["REFERENCES", "Reference", "SavedWeights", "keep_casts", "origin_of_cast"]

#: Without a call of Python, no tensors of subclasses.
_PLAIN = Tensor, nn.Parameter


@dataclass(slots=True)
class _Cast:
    """A weight in another type: its position in :attr:`.Shard.slices`."""

    position: int
    dtype: torch.dtype
    #: The cast itself, of a weight that was written afterwards.
    tensor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """A view of the slot that holds a shard, or of a cast of a weight there."""

    cast: _Cast | None
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool
    version: int


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A tensor of a subclass that has views of the slot: what its parts are saved as."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def rebuilt(self, resolve: Callable[[Any], Tensor]) -> Tensor:
        parts = {n: x.rebuilt(resolve) if type(x) is _Wrapped else resolve(x) for n, x in self.parts.items()}
        tensor: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return tensor


#: What is saved in place of tensors.
REFERENCES = Reference, _Wrapped


class SavedWeights:
    """Replaces tensors that a cell saves and that are views of its slot by references.

    Methods of an object that holds neither the slot nor itself: such a cycle would hold a graph until it is collected.

    Args:
        views: those of the slot; none where weights are used where they rest, and then nothing is replaced.
    """

    __slots__ = ("_begin", "_end", "_run", "_visit", "running")

    def __init__(self, visit: Visit, views: Sequence[Tensor]) -> None:
        self._visit = visit
        visit.runs += 1
        self._run = visit.runs
        #: While a cell runs that keeps its graph: the views of the slot, and their versions before.
        self.running: Sequence[tuple[Tensor, int]] = ()
        self._begin = self._end = 0
        if views:
            storage = views[0].untyped_storage()
            self._begin = storage.data_ptr()
            self._end = self._begin + storage.nbytes()

    def refer(self, tensor: Tensor) -> Any:
        """What is saved in place of a tensor."""
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            return _in_parts(tensor, self.refer)
        if tensor.layout is not torch.strided:
            return tensor
        cast = None
        if not self._begin <= tensor.data_ptr() < self._end:
            cast = self._cast(tensor) if self.running else None
            if cast is None:
                return tensor
        last = tensor.is_conj(), tensor.is_neg(), tensor._version
        return Reference(cast, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), *last)

    def resolve(self, saved: Any) -> Tensor:
        """The tensor that was saved, in the slot that holds the shard now."""
        if type(saved) is _Wrapped:
            return saved.rebuilt(self.resolve)
        if type(saved) is not Reference:
            return saved  # type: ignore[no-any-return]
        visit = self._visit
        shard = visit.weights.shard
        # A shard may have moved into memory since the forward.
        weights = shard.slot if visit.views(visit) or shard.home is None else shard.home.tensor
        if saved.cast is not None:
            weights = self._made_again(saved.cast, weights)
        else:
            begin = saved.offset * saved.dtype.itemsize
            for k, (run, version) in visit.rewritten.items():
                s = shard.slices[k]
                if s.offset <= begin < s.offset + s.nbytes and (self._run, saved.version) < (run, version):
                    _refuse_rewritten(s.name)
        memory = torch.empty(0, dtype=saved.dtype, device=weights.device)
        begin = weights.storage_offset() // memory.element_size()
        memory.set_(weights.untyped_storage(), begin + saved.offset, saved.size, saved.stride)
        if torch.is_grad_enabled():  # the graph of the gradients keeps it, after its slot has other weights
            memory = memory.clone()
        if saved.conjugate:
            memory = memory.conj()
        return negative_view(memory) if saved.negative else memory

    def check_unwritten(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises RuntimeError if this or a later cell has written one of these, which a second run would use."""
        if self._visit.rewritten:
            own = {*map(id, parameters)}
            for k, (run, _) in self._visit.rewritten.items():
                s = self._visit.weights.shard.slices[k]
                if run >= self._run and id(s.parameter) in own:
                    _refuse_rewritten(s.name)

    def _cast(self, tensor: Tensor) -> _Cast | None:
        """The cast of a trained weight that a tensor is, or is a view of; None if it was written, or the weight."""
        node, output = origin_of_cast(tensor)
        if getattr(node, "visit", None) is not self._visit or tensor._version:
            return None
        k = self._visit.positions[output]
        (view, version), base = self.running[k], tensor if tensor._base is None else tensor._base
        alike = base.dtype != view.dtype and base.device == view.device and base.stride() == view.stride()
        if view._version != version or not alike:
            return None
        self._visit.casts.append(found := _Cast(k, base.dtype))
        return found

    def _made_again(self, cast: _Cast, weights: Tensor) -> Tensor:
        if cast.tensor is not None:
            return cast.tensor
        s = self._visit.weights.shard.slices[cast.position]
        with torch.no_grad():
            return s.view(weights).to(cast.dtype)


def _refuse_rewritten(name: str) -> None:
    raise RuntimeError(
        f"layers wrote parameter {name} in place after it was used in this forward, and its backward needs the earlier "
        f"value: write it before its only use, clone it for the use, or run fewer micro-batches or chunks a forward"
    )


def keep_casts(visit: Visit, position: int, weight: Tensor) -> None:
    """Called with the earlier value of a weight that a cell has written: the casts of it so far are kept."""
    for cast in visit.casts:
        if cast.position == position and cast.tensor is None:
            cast.tensor = weight.to(cast.dtype)


def origin_of_cast(tensor: Tensor) -> tuple[Any, int]:
    """The node and the number of its output of which a tensor is a cast, or a view of a cast; node None: it is none."""
    node = (tensor if tensor._base is None else tensor._base).grad_fn
    return node.next_functions[0] if node is not None and node.name() == "ToCopyBackward0" else (None, 0)


def _in_parts(tensor: Any, refer: Callable[[Tensor], Any]) -> Any:
    """A tensor of a subclass, taken apart if any of its parts is a view of the slot."""
    names, context = tensor.__tensor_flatten__()
    parts = {}
    for name in names:
        part = getattr(tensor, name)
        parts[name] = _in_parts(part, refer) if is_traceable_wrapper_subclass(part) else refer(part)
    if not any(type(part) in REFERENCES for part in parts.values()):
        return tensor
    return _Wrapped(type(tensor), parts, context, tensor.size(), tensor.stride())
