"""The tail of a cell: operations after the last tensor that autograd saves. A recomputation leaves them out.

A cell is computed again only for what its graph saves. A block that ends in a linear layer and a sum saves the layer's
input, not its output, so the layer's product, a third of a transformer block's forward, would be computed for nobody.
The graph still needs a node for it, which is why the operation is called, but its result is a tensor of the right shape
that holds NaN.

::

    first run     op 1   op 2 ... op k     op k+1 ... op n        autograd saved something last before op k+1
    recompute     op 1   op 2 ... op k     NaN    ... NaN

Guarantees
    * Only operations whose result depends on nothing but their arguments' values, and whose own behaviour depends on
      no value, are left out: products, sums, views. If any other follows the last saved tensor, nothing is left out.
    * Nor is anything left out where tensors may be saved unseen: without grad mode, as inside of a custom function;
      under other hooks for saved tensors, as inside of a layer that checkpoints or offloads on its own; or with
      subclasses of tensors, which do as they like; or where hooks of a module would see the values.
    * A recomputation whose operations are not those of the first run is found out before it ends.

A layer that keeps a result of its tail as an attribute finds NaN there after backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["Listener", "OtherOperations", "Skipper", "Tail", "listened_to"]

_aten = torch.ops.aten
_COMPUTED = {
    getattr(getattr(_aten, name), overload)
    for name, overload in (
        ("mm", "default"),
        ("addmm", "default"),
        ("bmm", "default"),
        ("baddbmm", "default"),
        ("convolution", "default"),
        ("add", "Tensor"),
        ("sub", "Tensor"),
        ("_to_copy", "default"),
    )
}
_VIEWS = {
    getattr(getattr(_aten, name), overload)
    for name, overload in (
        ("view", "default"),
        ("_unsafe_view", "default"),
        ("t", "default"),
        ("transpose", "int"),
        ("permute", "default"),
        ("unsqueeze", "default"),
        ("expand", "default"),
    )
}
_HARMLESS = _COMPUTED | _VIEWS
#: Not counted: where no hooks are, autograd detaches what it saves of an operation's own results.
_DETACH = _aten.detach.default


class OtherOperations(BaseException):
    """The recomputation did other operations than the first run. Not an ``Exception``: layers must not catch it."""


@dataclass(frozen=True)
class Tail:
    """What comes after the first ``needed`` operations of a cell."""

    needed: int
    operations: tuple[Any, ...]


class Listener(TorchDispatchMode):
    """Listens to a first run: ``with hooks, listener: ...``, where the hooks call :meth:`saved`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = 0
        self._since: list[Any] = []
        self._clean = True
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

    def saved(self) -> None:
        """Autograd saves a tensor."""
        self._since.clear()
        self._clean = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Notes the operation, and does it."""
        if func is not _DETACH:
            self._count += 1
            self._since.append(func)
        if types or not torch.is_grad_enabled() or func not in _HARMLESS or _hooks() != self._hooks:
            self._clean = False
        return func(*args, **(kwargs or {}))

    def tail(self) -> Tail | None:
        """What a recomputation may leave out."""
        if not self._clean or _COMPUTED.isdisjoint(self._since):
            return None
        return Tail(self._count - len(self._since), tuple(self._since))


class Skipper(TorchDispatchMode):
    """Leaves a tail out of what runs inside."""

    def __init__(self, tail: Tail) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tail = tail
        self._count = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled layers stay compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Does the operation, or makes a tensor like its result."""
        if func is _DETACH:
            return func(*args, **(kwargs or {}))
        position = self._count - self._tail.needed
        self._count += 1
        if position >= 0:
            if position >= len(self._tail.operations) or func is not self._tail.operations[position]:
                raise OtherOperations
            if func in _COMPUTED:
                return _like_result(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """To be called at the end.

        Raises:
            OtherOperations: if fewer operations were done than in the first run.
        """
        if self._count != self._tail.needed + len(self._tail.operations):
            raise OtherOperations


def listened_to(modules: Iterable[nn.Module]) -> bool:
    """Whether hooks see what one of these modules takes or returns."""
    return bool(_has_any_global_hook()) or any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def _hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


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
