"""Finds operations that a recomputation can skip because no gradient needs their results (dead code).

A cell is recomputed only for the tensors that its graph saves. A block that ends in a linear layer, a dropout and a sum
saves the layer's input and the dropout's mask, not the layer's output, so recomputing the layer's product, a third of a
transformer block's forward, would be useless. The graph still needs a node for it, so :mod:`pipe.recompute.elimination`
calls the operation, but with a result of the right shape and type that has no values.

::

    first run     op 1   op 2   op 3   op 4 ... op n        autograd saved results of op 2 and op 4, computed from op 1
    recompute     op 1   op 2    ---   op 4 ...  ---

The first run is recorded: which storages each operation read and wrote, and which of them autograd saved. Going
backwards from the saved tensors, the arguments of each needed operation are alive; results that no needed operation
reads are dead. A recomputation may have another data flow (a layer may branch on values that it reads on the host);
:mod:`pipe.recompute.elimination` checks for that.

Guarantees
    * Only operations whose result depends only on their arguments' values, and whose behaviour depends on no value,
      are left out: products, sums, activation functions. Any other operation runs, and its arguments are alive.
    * Where values may be read or saved without being recorded, all earlier results are alive: with grad mode off, as
      inside a custom function; under other saved-tensor hooks, as inside a layer that checkpoints or offloads by
      itself; with tensor subclasses; and where a tensor appears that no recorded operation produced, as from a compiled
      layer or from NumPy. If hooks of a module would read the values, nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipe.torch_private.autograd import saved_tensor_hooks
from pipe.torch_private.dispatch import OperationMode

__all__ = [
    "DETACH",
    "DROPOUT",
    "EMPTY",
    "IN_PLACE",
    "VIEWS",
    "DeadCode",
    "Listener",
    "needs_gradient",
    "tensors_of",
]

_aten = torch.ops.aten


def _operations(*names: str) -> frozenset[Any]:
    """Operations by their names, ``name`` or ``name.overload``."""
    pairs = (name.partition(".") for name in names)
    return frozenset(getattr(getattr(_aten, name), overload or "default") for name, _, overload in pairs)


_PRODUCTS = _operations("mm", "addmm", "bmm", "baddbmm", "convolution")
_COMPUTED = _PRODUCTS | _operations(
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg", "gelu", "silu", "clone", "_to_copy"
)
#: Their results share their arguments' storages.
VIEWS = _operations("view", "_unsafe_view", "t", "transpose.int", "permute", "unsqueeze", "expand", "slice.Tensor")
#: Run even if no operation reads the result, but then their arguments' values are not needed.
IN_PLACE = _operations("add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor")
DROPOUT = _aten.native_dropout.default
EMPTY, _DRAW = _aten.empty_like.default, _aten.bernoulli_.float
#: Not counted: without saved-tensor hooks, autograd detaches an operation's own results when it saves them.
DETACH = _aten.detach.default


@dataclass(frozen=True)
class DeadCode:
    """The operations of a cell, and which of them a recomputation may leave out."""

    operations: tuple[Any, ...]
    dead: frozenset[int]
    """Numbers of the operations that are left out."""
    given: dict[int, tuple[bool, ...]]
    """For each operation with an argument that was left out: which of its tensors need gradients. On this, besides the
    operation itself, it depends which of them autograd saves; in the first run none that is left out."""


class Listener(OperationMode):
    """Records a first run: ``with hooks, listener: ...``, where the saved-tensor hooks call :meth:`saved`."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Any] = []
        self._read: list[list[int]] = []
        self._written: list[list[int]] = []
        self._needs_gradient: list[tuple[bool, ...]] = []
        self._live: set[int] = set()
        # Storages by address. Even a weak reference keeps the address from being reused by another storage.
        self._seen: dict[int, StorageWeakRef] = {}
        self._hooks: Any = None

    def __enter__(self) -> Listener:
        self._hooks = _hooks()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        # The hooks refer to this object: without this, the cycle would live until the garbage collector runs.
        self._hooks = None
        super().__exit__(*error)

    def meets(self, tensors: Iterable[Tensor]) -> None:
        """Registers tensors that exist before the run: its input, parameters and buffers."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._seen.setdefault(reference.cdata, reference)

    def saved(self, tensor: Tensor) -> None:
        """Records that autograd saves a tensor."""
        self._live.update(self._storages((tensor,)))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Records the operation, and runs it."""
        kwargs = kwargs or {}
        tensors = list(tensors_of((args, tuple(kwargs.values()))))
        read = self._storages(tensors)
        if func is DETACH:
            self._live.update(read)  # under these hooks autograd does not detach: the layer does, and may read values
            return func(*args, **kwargs)
        unseen = bool(types) or not torch.is_grad_enabled() or _hooks() != self._hooks
        if unseen:
            self._live.update(self._seen)
        result = func(*args, **kwargs)
        self.meets(tensors_of((result,)))
        written = self._storages(tensors_of((result,)))
        if unseen:
            self._live.update(written)
        self._operations.append(func)
        self._read.append(read)
        self._written.append(written)
        self._needs_gradient.append(needs_gradient(tensors))
        return result

    def dead_code(self) -> DeadCode | None:
        """The operations that a recomputation may leave out; None if no matrix product is among them."""
        done: set[int] = set()
        while True:
            live, dead, in_place = set(self._live), set(), []
            for k in reversed(range(len(self._operations))):
                func, unread = self._operations[k], live.isdisjoint(self._written[k])
                if func in _COMPUTED and unread:
                    dead.add(k)
                elif func in IN_PLACE and unread and k not in done:
                    in_place.append(k)
                elif not (func in VIEWS or self._only_draws(k, live)):
                    live.update(self._read[k])
            left_out = {storage for k in dead for storage in self._written[k]}
            for k, func in enumerate(self._operations):
                if func is DROPOUT and not left_out.isdisjoint(self._read[k]):
                    left_out.add(self._written[k][0])
            dead.update(k for k in in_place if self._written[k][0] in left_out)
            # The value that an in-place operation writes into an existing tensor must be computed.
            missing = {k for k in in_place if k not in dead and not left_out.isdisjoint(self._read[k])}
            if not missing:
                break
            done |= missing
        if not any(self._operations[k] in _PRODUCTS for k in dead):
            return None
        given = {k: self._needs_gradient[k] for k, read in enumerate(self._read) if not left_out.isdisjoint(read)}
        return DeadCode(tuple(self._operations), frozenset(dead), given)

    def _only_draws(self, k: int, live: set[int]) -> bool:
        """Whether only random numbers are read of an operation's result, independent of its arguments' values."""
        func = self._operations[k]
        if func is EMPTY:
            return self._operations[k + 1 : k + 2] == [_DRAW] and self._written[k] == self._written[k + 1]
        return func is _DRAW or (func is DROPOUT and self._written[k][0] not in live)

    def _storages(self, tensors: Iterable[Tensor]) -> list[int]:
        """The addresses of tensors' storages. An unknown one may have been computed from any earlier tensor."""
        addresses = []
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                self._live.update(self._seen)
                continue
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in self._seen:
                self._live.update(self._seen)
                self._seen[reference.cdata] = reference
            addresses.append(reference.cdata)
        return addresses


def _hooks() -> Any:
    return saved_tensor_hooks(while_tracing=True)


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_of(value)


def needs_gradient(tensors: Iterable[Tensor]) -> tuple[bool, ...]:
    """For each tensor, whether it needs a gradient."""
    return tuple([tensor.requires_grad for tensor in tensors])
