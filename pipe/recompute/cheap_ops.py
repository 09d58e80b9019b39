"""Saved-tensor hooks that recompute the results of cheap operations (norms, activations) instead of saving them.

A transformer block saves the results of matrix products, which are expensive to recompute, and those of norms and
activation functions, which are cheap: nearly two fifths of the bytes for a few hundredths of the time. The result of a
cheap operation is saved as the operation and its arguments, which the graph keeps anyway for the operation's own
backward, and is recomputed when backward unpacks it. More graphs then fit into the same memory.

Guarantees
    * The same kernel runs on the same values, so backward reads the same bits.
    * If an argument or a saved tensor is changed in place before backward, unpacking raises, as in any graph.
    * A result that was changed in place before it was saved is saved itself.

Arguments that are offloaded until backward (the weights of a shard) are held as references; see ``hold``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipe.nested import parts_of
from pipe.torch_private.data import pytree
from pipe.torch_private.dispatch import OperationMode

__all__ = ["CheapRecompute", "Kept", "Made"]

_aten = torch.ops.aten
#: Operations that save all of their arguments for their own backward, so that holding these costs no memory.
_CHEAP = {_aten.gelu.default, _aten.silu.default, _aten.native_layer_norm.default}


@dataclass(frozen=True)
class _Operation:
    """A cheap operation with its arguments."""

    func: Any
    args: Any
    kwargs: Any
    versions: tuple[int, ...]

    def compute(self) -> Tensor:
        """The result, computed again."""
        if _versions((self.args, self.kwargs)) != self.versions:
            raise RuntimeError(
                f"a tensor that {self.func} needs for its backward was changed in place after it was used; clone it "
                f"before changing it"
            )
        args, kwargs = pytree.tree_map(_resolved, (self.args, self.kwargs))
        with torch.no_grad():
            made = self.func(*args, **kwargs)
        result: Tensor = made[0] if isinstance(made, tuple) else made
        return result


@dataclass(frozen=True)
class Made:
    """A view of the result of an operation, to be recomputed."""

    operation: _Operation
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def resolve(self) -> Tensor:
        """The view, computed again."""
        return self.operation.compute().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Kept:
    """A saved tensor with its version."""

    tensor: Tensor
    version: int

    def resolve(self) -> Tensor:
        """The tensor."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that a kept graph needs for its backward was changed in "
                f"place after it was saved; clone it before changing it"
            )
        return self.tensor


class CheapRecompute(OperationMode):
    """A dispatch mode for one forward, together with its saved-tensor hooks::

    with torch.autograd.graph.saved_tensors_hooks(cheap.pack, cheap.unpack), cheap: ...
    """

    def __init__(
        self,
        hold: Callable[[Tensor], Any] = lambda tensor: tensor,
        changing: Iterable[Tensor] = (),
        weights: Collection[StorageWeakRef] = (),
    ) -> None:
        """
        Args:
            hold: converts an argument to the object that is held for it: the tensor, or an object with ``resolve()``.
            changing: tensors that later forwards write in place, before backward; they are saved as copies.
            weights: memory that the layers may write in every forward alike, so that it is no error.
        """
        super().__init__()
        self._hold = hold
        self._changing = {_storage_of(tensor) for tensor in changing}
        self._weights = weights
        self._operations: dict[StorageWeakRef, _Operation] = {}

    def __exit__(self, *raised: Any) -> None:
        """Drops the operations whose results no graph saved."""
        super().__exit__(*raised)
        # Graphs hold the hook that packed for them. Without this, the graph of an operation would hold its own result
        # through hook and operation: a reference cycle that is never freed.
        self._operations.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation, and records it if it is cheap."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if types:
            return result  # subclasses of tensors may define operations of their own
        if func in _CHEAP:
            made = result[0] if isinstance(result, tuple) else result
            if made.layout is not torch.strided:
                return result
            # Not detached: a tensor detached below autograd would not share the version counter.
            held_args, held_kwargs = pytree.tree_map_only(Tensor, self._hold, (args, kwargs))
            operation = _Operation(func, held_args, held_kwargs, _versions((held_args, held_kwargs)))
            self._operations[StorageWeakRef(made.untyped_storage())] = operation
        elif func._schema.is_mutable and self._operations:
            for tensor in pytree.tree_leaves((args, kwargs)):
                for part in parts_of(tensor) if isinstance(tensor, Tensor) else ():
                    self._operations.pop(StorageWeakRef(part.untyped_storage()), None)
        return result

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor is recomputed instead of saved."""
        return tensor.layout is torch.strided and StorageWeakRef(tensor.untyped_storage()) in self._operations

    def pack(self, tensor: Tensor) -> Tensor | Made | Kept:
        """The object that the graph keeps for a tensor."""
        if not self.knows(tensor):
            # Without detaching, an operation that saves its own result would be in a reference cycle with it.
            kept = tensor.detach()
            storage = _storage_of(tensor) if tensor.layout is torch.strided else None
            if storage in self._changing:
                return kept.clone()
            # Versions of weights are not checked: a layer may change its own weights in place in each forward.
            return kept if storage in self._weights or tensor.is_inference() else Kept(kept, tensor._version)
        operation = self._operations[StorageWeakRef(tensor.untyped_storage())]
        return Made(operation, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    @staticmethod
    def unpack(saved: Tensor | Made | Kept) -> Tensor:
        """The tensor."""
        return saved if isinstance(saved, Tensor) else saved.resolve()


def _storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _resolved(value: Any) -> Any:
    return value.resolve() if hasattr(value, "resolve") else value


def _versions(value: Any) -> tuple[int, ...]:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return tuple(tensor._version for tensor in tensors if not tensor.is_inference())
