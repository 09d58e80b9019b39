"""Finds the ``DistributedDataParallel`` modules that wrap a module.

DistributedDataParallel reduces gradients in backward only after its own forward. A training step that does not call
that forward silently leaves the gradients of each rank unreduced. The wrapped module has no reference to its wrapper;
but the wrapper registers it as a submodule, and torch calls a global hook for each registration.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["wrappers_of"]

_wrappers: WeakSet[DistributedDataParallel] = WeakSet()


def _note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel):
        _wrappers.add(parent)


register_module_module_registration_hook(_note)


def wrappers_of(module: nn.Module) -> list[Any]:
    """The ``DistributedDataParallel`` modules that wrap ``module``, or a module that contains it."""
    return [wrapper for wrapper in _wrappers if any(inner is module for inner in wrapper.module.modules())]
