"""Private names of what intercepts operations: ``torch.overrides`` and dispatch modes, and tensor subclasses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "DISPATCH_MODES",
    "FUNCTION_MODES",
    "ModeStack",
    "OperationMode",
    "is_traceable_wrapper_subclass",
    "modes_active",
    "no_subclasses",
    "with_subclasses",
    "without_modes",
]


@dataclass(frozen=True)
class ModeStack:
    """The modes of one kind that intercept torch's operations in this thread."""

    active: Callable[[], list[Any]]
    """Returns them, outermost first."""
    push: Callable[[Any], Any]
    """Without its ``__enter__``: that may have effects that the user wants once (counters, printed summaries)."""
    pop: Callable[[], Any]
    """Removes the innermost one without its ``__exit__``."""


DISPATCH_MODES = ModeStack(dispatch._get_current_dispatch_mode_stack, dispatch._push_mode, dispatch._pop_mode)


FUNCTION_MODES = ModeStack(overrides._get_current_function_mode_stack, overrides._push_mode, overrides._pop_mode)


def modes_active() -> bool:
    """Whether any mode intercepts torch's functions or operations in this thread."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


class OperationMode(dispatch.TorchDispatchMode):
    """A ``TorchDispatchMode`` under which compiled layers run compiled."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True."""
        return True


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """A context in which no mode and no tensor subclass intercepts operations."""
    with torch._C.DisableTorchFunction(), dispatch._disable_current_modes():
        yield


#: A context in which tensor subclasses work as in a forward; the backward of a loss that is one disables them.
with_subclasses: type[contextlib.AbstractContextManager[Any]] = torch._C._EnableTorchFunction


def no_subclasses() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensor subclasses do not intercept functions: they act on the subclass's own tensor."""
    return torch._C.DisableTorchFunctionSubclass()
