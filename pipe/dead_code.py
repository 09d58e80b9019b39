"""Dead code of a recomputation: operations whose results nobody reads. They are left out.

A cell is computed again only for what its graph saves. A block that ends in a linear layer, a dropout and a sum saves
the layer's input and the dropout's mask, not the layer's output, so the layer's product, a third of a transformer
block's forward, would be computed for nobody. The graph still needs a node for it, which is why the operation is
called, but its result is a tensor of the right shape that holds NaN.

::

    first run     op 1   op 2   op 3   op 4 ... op n        what autograd saved was made by op 2 and op 4, of op 1
    recompute     op 1   op 2    NaN   op 4 ...  NaN

A first run is listened to: which storages each operation read and wrote, and which of them autograd saved. Backwards
from what was saved, whatever an operation read that had to be done is alive; what no such operation read is dead.

Guarantees
    * Only operations whose result depends on nothing but their arguments' values, and whose own behaviour depends on
      no value, are left out: products, sums, activation functions. Any other is done, and its arguments are alive.
    * Where values may be read or saved unseen, all that came before is alive: without grad mode, as inside of a custom
      function; under other hooks for saved tensors, as inside of a layer that checkpoints or offloads on its own;
      behind subclasses of tensors, which do as they like; and where a tensor turns up that no operation made, as from
      a compiled layer or from NumPy. Where hooks of a module would see the values, nothing is left out.
    * A recomputation whose operations are not those of the first run is found out before it ends.

A layer that keeps a dead result as an attribute finds NaN there after backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["DeadCode", "Listener", "OtherOperations", "Skipper", "listened_to"]

_aten = torch.ops.aten


def _operations(*names: str) -> frozenset[Any]:
    """Operations by their names, ``name`` or ``name.overload``."""
    pairs = (name.partition(".") for name in names)
    return frozenset(getattr(getattr(_aten, name), overload or "default") for name, _, overload in pairs)


_PRODUCTS = _operations("mm", "addmm", "bmm", "baddbmm", "convolution")
_COMPUTED = _PRODUCTS | _operations(
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg", "gelu", "silu", "clone", "_to_copy"
)
#: Their results are their arguments' storages.
_VIEWS = _operations("view", "_unsafe_view", "t", "transpose.int", "permute", "unsqueeze", "expand", "slice.Tensor")
#: Done whether or not anybody reads the result, but without a result that is read they ask for no values.
_IN_PLACE = _operations("add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor")
_DROPOUT = _aten.native_dropout.default
_EMPTY, _DRAW = _aten.empty_like.default, _aten.bernoulli_.float
#: Not counted: where no hooks are, autograd detaches what it saves of an operation's own results.
_DETACH = _aten.detach.default


class OtherOperations(BaseException):
    """The recomputation did other operations than the first run. Not an ``Exception``: layers must not catch it."""


@dataclass(frozen=True)
class DeadCode:
    """The operations of a cell, and the numbers of those that a recomputation may leave out."""

    operations: tuple[Any, ...]
    dead: frozenset[int]


class Listener(TorchDispatchMode):
    """Listens to a first run: ``with hooks, listener: ...``, where the hooks call :meth:`saved`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[Any] = []
        self._read: list[list[int]] = []
        self._written: list[list[int]] = []
        self._live: set[int] = set()
        # Storages by address. References, though weak, keep an address from being another storage's.
        self._seen: dict[int, StorageWeakRef] = {}
        self._hooks: Any = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled layers stay compiled."""
        return True

    def __enter__(self) -> Listener:
        self._hooks = _hooks()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        # The hooks tell this object, and would keep it, and it them, until the garbage is collected.
        self._hooks = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def meets(self, tensors: Iterable[Tensor]) -> None:
        """Tells of tensors that the run finds: its input, parameters and buffers."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._seen.setdefault(reference.cdata, reference)

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves a tensor."""
        self._live.update(self._storages((tensor,)))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Notes the operation, and does it."""
        kwargs = kwargs or {}
        read = self._storages(_tensors((args, tuple(kwargs.values()))))
        if func is _DETACH:
            self._live.update(read)  # no hooks, so it is the layer that detaches: to look at the value
            return func(*args, **kwargs)
        unseen = bool(types) or not torch.is_grad_enabled() or _hooks() != self._hooks
        if unseen:
            self._live.update(self._seen)
        result = func(*args, **kwargs)
        self.meets(_tensors((result,)))
        written = self._storages(_tensors((result,)))
        if unseen:
            self._live.update(written)
        self._operations.append(func)
        self._read.append(read)
        self._written.append(written)
        return result

    def dead_code(self) -> DeadCode | None:
        """What a recomputation may leave out, if that is worth it."""
        live, dead = set(self._live), set()
        for k in reversed(range(len(self._operations))):
            func, unread = self._operations[k], live.isdisjoint(self._written[k])
            if func in _COMPUTED and unread:
                dead.add(k)
            elif not (func in _VIEWS or (func in _IN_PLACE and unread) or self._only_draws(k, live)):
                live.update(self._read[k])
        if not any(self._operations[k] in _PRODUCTS for k in dead):
            return None
        return DeadCode(tuple(self._operations), frozenset(dead))

    def _only_draws(self, k: int, live: set[int]) -> bool:
        """Whether all that is read of an operation's result is random numbers, whatever its arguments hold."""
        func = self._operations[k]
        if func is _EMPTY:
            return self._operations[k + 1 : k + 2] == [_DRAW] and self._written[k] == self._written[k + 1]
        return func is _DRAW or (func is _DROPOUT and self._written[k][0] not in live)

    def _storages(self, tensors: Iterable[Tensor]) -> list[int]:
        """The addresses of tensors' storages. One that turns up from nowhere was made of anything that was before."""
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


class Skipper(TorchDispatchMode):
    """Leaves dead code out of what runs inside."""

    def __init__(self, code: DeadCode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._code = code
        self._count = 0
        self._left_out = False
        self._same = True
        self._stopped = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled layers stay compiled."""
        return True

    def stop(self) -> None:
        """From here on it leaves nothing out, and checks nothing."""
        self._stopped = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Does the operation, or makes a tensor like its result."""
        if func is _DETACH or self._stopped:
            return func(*args, **(kwargs or {}))
        k, self._count = self._count, self._count + 1
        self._same &= k < len(self._code.operations) and func is self._code.operations[k]
        if self._left_out and not self._same:
            raise OtherOperations
        if self._same and k in self._code.dead:  # else it is too early for harm, and all of them are done
            self._left_out = True
            return _like_result(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """To be called at the end.

        Raises:
            OtherOperations: if fewer operations were done than in the first run.
        """
        if self._left_out and self._count != len(self._code.operations):
            raise OtherOperations


def listened_to(modules: Iterable[nn.Module]) -> bool:
    """Whether hooks see what one of these modules takes or returns."""
    return bool(_has_any_global_hook()) or any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def _hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among an operation's arguments or results, in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _like_result(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    devices: list[torch.device] = []

    def shape_only(tensor: Tensor) -> Tensor:
        if tensor.dim() or not devices:  # a number beside tensors may lie on the host
            devices.insert(0, tensor.device) if tensor.dim() else devices.append(tensor.device)
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(Tensor, shape_only, (args, kwargs))
    device = kwargs.pop("device", None) or devices[0]
    result = func(*args, **kwargs)
    stand_in = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    return stand_in.fill_(float("nan")) if stand_in.is_floating_point() or stand_in.is_complex() else stand_in.zero_()
