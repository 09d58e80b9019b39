"""Private names of ``torch.nn``: hooks of modules, and base classes of normalisations."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as BatchOrInstanceNorm
from torch.nn.utils import parametrize

__all__ = ["HOOKS_OF_MODULES", "BatchNorm", "BatchOrInstanceNorm", "caches_parametrizations"]


#: The attributes of a module that hold its hooks by number, and options of some of these hooks.
HOOKS_OF_MODULES = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip


def caches_parametrizations(modules: Iterable[nn.Module]) -> bool:
    """Whether ``parametrize.cached()`` is in force, and one of the modules has a parametrization."""
    return bool(parametrize._cache_enabled) and any(map(parametrize.is_parametrized, modules))
