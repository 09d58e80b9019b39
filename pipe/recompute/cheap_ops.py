"""Lean graphs: a kept graph does not keep what is cheap to compute again.

What a transformer block saves for its backward is the results of products, which are dear, and those of norms and of
activation functions, which are not: nearly two fifths of the bytes for a few hundredths of the time. A tensor that a
cheap operation made is saved as that operation and its arguments, which the graph keeps anyway for the operation's own
backward, and is made again when backward asks for it. More graphs then fit into the same bytes.

Guarantees
    * The same kernel runs on the same values, so backward reads the same bits.
    * An argument, or a tensor that is kept, that was changed in place in between raises, as it does in any graph.
    * A result that was written over before it was saved is saved as it is.

Tensors that rest elsewhere until backward (the weights of a shard) stand in recipes as references; see ``hold``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipe.nested import parts_of
from pipe.torch_private import TorchDispatchMode, pytree

__all__ = ["CheapRecompute", "Kept", "Made"]

_aten = torch.ops.aten
#: Operations that save all of their tensors for their own backward, so that holding these costs nothing.
_CHEAP = {_aten.gelu.default, _aten.silu.default, _aten.native_layer_norm.default}


@dataclass(frozen=True)
class _OptimizerFactory:
    """How a tensor was made."""

    func: Any
    args: Any
    kwargs: Any
    versions: tuple[int, ...]

    def make(self) -> Tensor:
        """The tensor once more.

        Raises:
            RuntimeError: if an argument was changed in place since.
        """
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
    """A view of what a recipe makes."""

    recipe: _OptimizerFactory
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def resolve(self) -> Tensor:
        """The view, made again."""
        return self.recipe.make().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Kept:
    """A tensor that the graph keeps, as it was when it was saved."""

    tensor: Tensor
    version: int

    def resolve(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: if it was changed in place since.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that a kept graph needs for its backward was changed in "
                f"place after it was saved; clone it before changing it"
            )
        return self.tensor


class CheapRecompute(TorchDispatchMode):
    """One forward whose graph is to be kept lean: ``with torch.autograd.graph.saved_tensors_hooks(lean.pack,
    lean.unpack), lean: ...``."""

    def __init__(self, hold: Callable[[Tensor], Any] = lambda tensor: tensor, changing: Iterable[Tensor] = ()) -> None:
        """
        Args:
            hold: what stands in a recipe for an argument: the tensor, or an object with ``resolve()``.
            changing: tensors that later forwards write in place, before backward; what is saved of them is copied.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._hold = hold
        self._changing = {_storage_of(tensor) for tensor in changing}
        self._recipes: dict[StorageWeakRef, _OptimizerFactory] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled layers stay compiled."""
        return True

    def __exit__(self, *raised: Any) -> None:
        """Forgets all that no graph asked for."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        # Graphs hold the hook that packed for them. Without this, the graph of an operation that takes part in a recipe
        # would hold, through hook and recipe, its own result; and live for ever.
        self._recipes.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Does the operation, and notes how its result was made if that is cheap."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if types:
            return result  # subclasses of tensors do as they like
        if func in _CHEAP:
            made = result[0] if isinstance(result, tuple) else result
            if made.layout is not torch.strided:
                return result
            # As they are: a detached tensor, made below autograd, would not count the changes of the one it is of.
            held_args, held_kwargs = pytree.tree_map_only(Tensor, self._hold, (args, kwargs))
            recipe = _OptimizerFactory(func, held_args, held_kwargs, _versions((held_args, held_kwargs)))
            self._recipes[StorageWeakRef(made.untyped_storage())] = recipe
        elif func._schema.is_mutable and self._recipes:
            for tensor in pytree.tree_leaves((args, kwargs)):
                for part in parts_of(tensor) if isinstance(tensor, Tensor) else ():
                    self._recipes.pop(StorageWeakRef(part.untyped_storage()), None)
        return result

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor is not kept, but made again."""
        return tensor.layout is torch.strided and StorageWeakRef(tensor.untyped_storage()) in self._recipes

    def pack(self, tensor: Tensor) -> Tensor | Made | Kept:
        """What the graph keeps for a tensor."""
        if not self.knows(tensor):
            # Without detaching, an operation that saves its own result would hold itself, and what it saved, for ever.
            kept = tensor.detach()
            if self._changing and tensor.layout is torch.strided and _storage_of(tensor) in self._changing:
                return kept.clone()
            # A layer may prepare its own weights in place, for every chunk alike.
            is_weight = isinstance(tensor, torch.nn.Parameter) or tensor.is_inference()
            return kept if is_weight else Kept(kept, tensor._version)
        recipe = self._recipes[StorageWeakRef(tensor.untyped_storage())]
        return Made(recipe, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

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
