"""Runs a recomputation without the operations that :mod:`pipe.recompute.dead_code` found unnecessary.

They were found in the first run, and the recomputation may have another data flow. The result of a skipped operation
is a :class:`LeftOut`, a tensor without values: any use of its values raises instead of computing wrong numbers, and the
recomputation then runs again in full.

Guarantee: it runs again in full, before any gradient is computed, if it runs another operation, or passes a left-out
value to an operation that is not skipped; if it reads such a value on the host (``tolist()``, NumPy, another library);
if autograd saves one, or a layer keeps one (as an attribute, in a closure).

A layer's result itself may be left out. If the layer keeps it as an attribute, that is a :class:`LeftOut` after
backward; see :class:`set_dead_code_elimination`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from pipe.nested import tensors_in
from pipe.recompute.dead_code import DETACH, DROPOUT, EMPTY, IN_PLACE, VIEWS, DeadCode, needs_gradient, tensors_of
from pipe.torch_private.data import pytree
from pipe.torch_private.dispatch import OperationMode, no_torch_function

__all__ = [
    "LeftOut",
    "is_dead_code_elimination_enabled",
    "leaving_out",
    "set_dead_code_elimination",
    "stop_leaving_out",
]

T = TypeVar("T")
_eliminates = True


class set_dead_code_elimination:
    """Turns dead code elimination off or on: in this process, or inside a ``with`` statement.

    If it is off, each recomputation runs all operations of its forward. For layers that keep their results after a
    recomputation::

        with set_dead_code_elimination(False):
            loss = model(x).sum()
            loss.backward()
    """

    def __init__(self, enabled: bool) -> None:
        global _eliminates
        self._before, _eliminates = _eliminates, enabled

    def __enter__(self) -> None:
        """Does nothing: the constructor has set the mode."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _eliminates
        _eliminates = self._before


def is_dead_code_elimination_enabled() -> bool:
    """Whether recomputations skip operations that no gradient needs; see :class:`set_dead_code_elimination`."""
    return _eliminates


class LeftOut(Tensor):
    """The result of a skipped operation: it has shape, strides, type, device and graph, but no values.

    It has no memory: any access to its values raises, also in kernels of other libraries.
    """

    # Operations on it are intercepted below autograd only, so that it has a graph like any other tensor.
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> LeftOut:
        """A tensor like ``like``, on ``device``."""
        made: LeftOut = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises. (Inside a recomputation, the dispatch mode handles operations before this method.)"""
        raise RuntimeError(_no_values(str(func)))

    def data_ptr(self) -> int:
        """Raises, since the real result 0 could be taken for an address."""
        raise RuntimeError(_no_values("data_ptr()"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LeftOut(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _no_values(reader: str) -> str:
    return (
        f"{reader} reads a value that a recomputation left out, since no gradient needs it; keep a copy of the output "
        f"of the forward, or call pipe.recompute.elimination.set_dead_code_elimination(False) before the forward"
    )


class _OtherFlow(BaseException):
    """Raised if the recomputation differs from the first run. Not an ``Exception``, so that layers do not catch it."""


def leaving_out(code: DeadCode | None, run: Callable[[contextlib.AbstractContextManager[Any]], T]) -> tuple[T, bool]:
    """Calls ``run(mode)``, which runs its operations inside the context ``mode``; ``mode`` skips dead code.

    ``run`` is called again, with a null context, if it differs from the run in which ``code`` was found.

    Returns:
        The result, in which tensors may be :class:`LeftOut`, and False if a second run was necessary.
    """
    if code is None or not _eliminates:
        return run(contextlib.nullcontext()), True
    skipper = _Skipper(code)
    try:
        result = run(skipper)
        skipper.check(result)
        return result, True
    except _OtherFlow:
        pass
    except Exception:
        if not skipper.results:
            raise
        # Probably a read of a left-out value; if not, the second run raises the same exception.
    return run(contextlib.nullcontext()), False


def stop_leaving_out(mode: contextlib.AbstractContextManager[Any]) -> None:
    """To be called after an exception inside ``mode``, whose exit an interrupt may have prevented."""
    if isinstance(mode, _Skipper):
        mode.stopped = True


class _Skipper(OperationMode):
    """Skips dead code in the operations that run inside, as long as they are those of the first run."""

    def __init__(self, code: DeadCode) -> None:
        super().__init__()
        self._code = code
        self._count = 0
        self._same = True
        self.stopped = False
        # All left-out results, to find those that are still referenced after the run.
        self.results: list[ref[LeftOut]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation, or makes a tensor like its result."""
        kwargs = kwargs or {}
        if self.stopped or (func is DETACH and LeftOut not in types):
            return func(*args, **kwargs)
        k, self._count = self._count, self._count + 1
        self._same &= k < len(self._code.operations) and func is self._code.operations[k]
        if self.results and not self._same:
            raise _OtherFlow
        dead = self._same and k in self._code.dead  # if not the same, nothing was skipped yet, and all operations run
        if LeftOut in types:
            return self._with_left_out_arguments(k, dead, func, args, kwargs)
        return self._leave_out(*_shape_of_result(func, args, kwargs)) if dead else func(*args, **kwargs)

    def _with_left_out_arguments(
        self, k: int, dead: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        needed = needs_gradient(tensors_of((args, tuple(kwargs.values()))))
        if func is DETACH or self._code.given.get(k) != needed:
            raise _OtherFlow
        if func in IN_PLACE and dead and isinstance(args[0], LeftOut):
            return args[0]
        if dead or func in VIEWS:
            return self._leave_out(*_shape_of_result(func, args, kwargs))
        if func is not DROPOUT and func is not EMPTY:
            raise _OtherFlow
        # Only draws random numbers: the contents of its argument do not matter.
        result = func(*pytree.tree_map_only(LeftOut, _memory_like, args), **kwargs)
        if func is EMPTY:
            return result
        return self._leave_out(result[0], result[0].device), result[1]

    def _leave_out(self, like: Tensor, device: torch.device) -> LeftOut:
        result = LeftOut(like, device)
        self.results.append(ref(result))
        return result

    def check(self, result: Any) -> None:
        """Raises if fewer operations ran than in the first run, or left-out values are kept outside the result."""
        if not self.results:
            return
        if self._count != len(self._code.operations):
            raise _OtherFlow
        tensors = tensors_in(result)
        known = {id(tensor) for tensor in tensors} | {id(x._base) for x in tensors if isinstance(x, LeftOut)}
        kept = (reference() for reference in self.results)
        if any(tensor is not None and id(tensor) not in known for tensor in kept):
            raise _OtherFlow


def _memory_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


def _shape_of_result(
    func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, torch.device]:
    """A tensor on the meta device that is like an operation's result, and the device of that result."""
    devices: list[torch.device] = []

    def shape_only(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() or not devices:  # a 0-dimensional tensor may be on the host while the others are not
            devices.insert(0, value.device) if value.dim() else devices.append(value.device)
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

    # None of these operations takes a list of tensors.
    shapes = [shape_only(value) for value in args]
    options = {name: shape_only(value) for name, value in kwargs.items()}
    device = options.pop("device", None) or devices[0]
    return func(*shapes, **options), torch.device(device)
