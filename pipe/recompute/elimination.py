"""Elimination of dead code: a recomputation leaves out the operations that :mod:`pipe.recompute.dead_code` found.

The guess of one run is used in another, whose data flow may differ. What is left out has a result without values, a
:class:`LeftOut`, so that whatever would use them is an error before it is a wrong number; and then the recomputation
runs again in full.

Guarantees
    * A recomputation that differs in what matters runs again in full, before any gradient is computed: it does another
      operation, or gives what was left out to one that is to be done; it reads such a value on the host (``tolist()``,
      NumPy, a library of its own); autograd saves one, or a layer keeps one (as an attribute, in a closure).

A layer's result itself may be left out. A layer that keeps it as an attribute finds a :class:`LeftOut` there after
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
from pipe.torch_private import TorchDispatchMode, no_torch_function, pytree

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
    """Turns the elimination of dead code off, or on again: in this process, or inside of a ``with`` statement.

    Off, each recomputation does all that its forward did. For layers that keep their results beyond a recomputation::

        with set_dead_code_elimination(False):
            loss = model(x).sum()
            loss.backward()
    """

    def __init__(self, enabled: bool) -> None:
        global _eliminates
        self._before, _eliminates = _eliminates, enabled

    def __enter__(self) -> None:
        """What was asked for already holds."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _eliminates
        _eliminates = self._before


def is_dead_code_elimination_enabled() -> bool:
    """Whether recomputations leave out what no gradient needs; see :class:`set_dead_code_elimination`."""
    return _eliminates


class LeftOut(Tensor):
    """The result of an operation that was left out: shape, strides, type, device and graph, but no values.

    Whatever needs its values raises, in a kernel of any library too, since it has no memory.
    """

    # Operations on it are met below autograd only, so that it gets a graph as any other tensor does.
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> LeftOut:
        """A tensor like another one, on a device of its own."""
        made: LeftOut = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises: inside of a recomputation the mode that leaves operations out comes first."""
        raise RuntimeError(_no_values(str(func)))

    def data_ptr(self) -> int:
        """Raises; the address 0, which there is, would be taken for memory."""
        raise RuntimeError(_no_values("data_ptr()"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LeftOut(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _no_values(reader: str) -> str:
    return (
        f"{reader} reads a value that a recomputation left out, since no gradient needs it; keep a copy of what the "
        f"forward returned, or call pipe.recompute.elimination.set_dead_code_elimination(False) before the forward"
    )


class _OtherFlow(BaseException):
    """The recomputation is not what the first run was. Not an ``Exception``: layers must not catch it."""


def leaving_out(code: DeadCode | None, run: Callable[[contextlib.AbstractContextManager[Any]], T]) -> tuple[T, bool]:
    """What ``run(mode)`` returns, whose operations are done inside of the context ``mode``.

    Args:
        code: what may be left out; None: nothing.
        run: runs a cell again. It is called a second time, with a mode that does nothing, if the first time turns out
            to differ from the run that ``code`` was learnt from.

    Returns:
        The result, in which tensors may be :class:`LeftOut`, and whether ``code`` was right as far as it was used.
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
        if not skipper.left_out:
            raise
        # A read of what was left out, unless it happens again.
    return run(contextlib.nullcontext()), False


def stop_leaving_out(mode: contextlib.AbstractContextManager[Any]) -> None:
    """To be called where the run inside of ``mode`` ended by an exception.

    An interrupt may have skipped the end of the mode itself, and what runs until it is taken away must not be left out.
    """
    if isinstance(mode, _Skipper):
        mode.stopped = True


class _Skipper(TorchDispatchMode):
    """Leaves dead code out of what runs inside, as long as that does what the first run did."""

    def __init__(self, code: DeadCode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._code = code
        self._count = 0
        self._same = True
        self.stopped = False
        # All of what was left out, to find what outlives the run.
        self._results: list[ref[LeftOut]] = []

    @property
    def left_out(self) -> bool:
        """Whether anything was."""
        return bool(self._results)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled layers stay compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Does the operation, or makes a tensor like its result."""
        kwargs = kwargs or {}
        if self.stopped or (func is DETACH and LeftOut not in types):
            return func(*args, **kwargs)
        k, self._count = self._count, self._count + 1
        self._same &= k < len(self._code.operations) and func is self._code.operations[k]
        if self._results and not self._same:
            raise _OtherFlow
        dead = self._same and k in self._code.dead  # else it is too early for harm, and all of them are done
        if LeftOut in types:
            return self._given_what_is_left_out(k, dead, func, args, kwargs)
        return self._leave_out(func, args, kwargs) if dead else func(*args, **kwargs)

    def _given_what_is_left_out(
        self, k: int, dead: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        needed = needs_gradient(tensors_of((args, tuple(kwargs.values()))))
        if func is DETACH or self._code.given.get(k) != needed:
            raise _OtherFlow
        if func in IN_PLACE and dead and isinstance(args[0], LeftOut):
            return args[0]
        if dead or func in VIEWS:
            return self._leave_out(func, args, kwargs)
        if func is not DROPOUT and func is not EMPTY:
            raise _OtherFlow
        # Only draws numbers, for which any memory will do.
        result = func(*pytree.tree_map_only(LeftOut, _memory_like, args), **kwargs)
        if func is EMPTY:
            return result
        return self._stand_in(result[0], result[0].device), result[1]

    def _leave_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LeftOut:
        return self._stand_in(*_shape_of_result(func, args, kwargs))

    def _stand_in(self, like: Tensor, device: torch.device) -> LeftOut:
        result = LeftOut(like, device)
        self._results.append(ref(result))
        return result

    def check(self, result: Any) -> None:
        """To be called at the end, with what the run returned.

        Raises:
            _OtherFlow: if less was done than in the first run, or what was left out is kept besides the result.
        """
        if not self._results:
            return
        if self._count != len(self._code.operations):
            raise _OtherFlow
        tensors = tensors_in(result)
        known = {id(tensor) for tensor in tensors} | {id(x._base) for x in tensors if isinstance(x, LeftOut)}
        kept = (reference() for reference in self._results)
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
        if value.dim() or not devices:  # a number beside tensors may lie on the host
            devices.insert(0, value.device) if value.dim() else devices.append(value.device)
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

    # None of these operations takes a list of tensors.
    shapes = [shape_only(value) for value in args]
    options = {name: shape_only(value) for name, value in kwargs.items()}
    device = options.pop("device", None) or devices[0]
    return func(*shapes, **options), torch.device(device)
