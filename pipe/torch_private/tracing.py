"""Private names of ``torch.compile``, ``torch.func`` and other mechanisms that trace or transform a call."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

__all__ = [
    "breaks_compiled_graphs",
    "compiled_alike",
    "import_compiler",
    "transform_of_functions_under_way",
    "transform_under_way",
    "uncompiled_hooks",
]


F = TypeVar("F", bound=Callable[..., Any])


def breaks_compiled_graphs(function: F) -> F:
    """``function``, which ``torch.compile`` leaves out where it compiles the caller."""
    # As torch.compiler.disable, but it imports the compiler when the function is first called, not before.
    outside = torch._disable_dynamo(function)  # type: ignore[attr-defined, unused-ignore]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (outside if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return cast(F, call)


def compiled_alike(compiled: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled as ``torch.compile`` has made ``compiled``: same backend, mode and options.

    Raises ValueError if ``torch.compile`` has not made it.
    """
    names: Sequence[str] = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    if "self" not in names:
        raise ValueError(f"expected a function that torch.compile has made, got {compiled!r}")
    context = cast(FunctionType, compiled).__closure__[names.index("self")].cell_contents  # type: ignore[index]
    return cast("Callable[..., Any]", context(function))


def import_compiler() -> None:
    """Imports the compiler, as the first optimizer of a process does: 70 MiB, and they stay."""
    importlib.import_module("torch._dynamo")


def uncompiled_hooks(*hooks: Any) -> tuple[Any, ...]:
    """Hooks that ``torch.compile`` does not compile: their code is marked, once.

    Saved-tensor hooks run inside the layers, so a compiled layer would compile them too.
    """
    if "torch._dynamo" in sys.modules:
        for hook in hooks:
            code = getattr(getattr(hook, "__func__", hook), "__code__", None)
            if code is not None and code not in _uncompiled:
                sys.modules["torch._dynamo"].eval_frame.skip_code(code)
                _uncompiled.add(code)
    return hooks


_uncompiled: set[Any] = set()


def transform_of_functions_under_way() -> bool:
    """Whether a transform of ``torch.func`` is active."""
    return torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined, unused-ignore]


def transform_under_way(inputs: Iterable[Tensor]) -> str | None:
    """The name of an active mechanism other than autograd that transforms or traces a call on ``inputs``, or None."""
    if transform_of_functions_under_way():
        return "a transform of torch.func (grad, jvp, vmap, ...)"
    forward_mode = torch.autograd.forward_ad
    if forward_mode._current_level >= 0 and any(forward_mode.unpack_dual(x).tangent is not None for x in inputs):
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_compiling() and torch.compiler.is_exporting():
        return "torch.export"
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # type: ignore[attr-defined, unused-ignore]
        return "fake tensors (FakeTensorMode)"
    return None
