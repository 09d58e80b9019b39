"""Wraps a function that uses modules, such as a bound method (``clip.encode_image``), in an ``nn.Module``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from gradcache.used_modules import UsedModules

__all__ = ["CallableModel", "as_modules"]


class CallableModel(nn.Module):
    """A callable with the modules that it uses as submodules, so that their parameters, buffers and modes are known."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        found = UsedModules(function)
        self.function = function
        self.used = nn.ModuleList(found.modules)
        self.tensors = found.tensors
        self.training = any(module.training for module in found.modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)


def as_modules(models: Sequence[Any], earlier: Sequence[nn.Module]) -> list[nn.Module]:
    """The models of a step as modules; the same callable gives the same module as in the ``earlier`` step.

    Raises:
        TypeError: for a model that is neither a module nor callable.
    """
    towers: list[nn.Module] = []
    for k, model in enumerate(models):
        if isinstance(model, nn.Module):
            towers.append(model)
            continue
        if not callable(model) or isinstance(model, type):
            raise TypeError(
                f"expected torch modules or callables, got {type(model).__name__} among models (models[{k}])"
            )
        # Each access makes a new bound method object, so methods are compared by equality, not by identity.
        made = [tower for tower in [*towers, *earlier] if isinstance(tower, CallableModel) and tower.function == model]
        towers.append(made[0] if made and _same_modules(made[0]) else CallableModel(model))
    return towers


def _same_modules(tower: CallableModel) -> bool:
    """Whether the function still uses the modules and tensors that it used when the tower was made."""
    now = UsedModules(tower.function)
    return [*map(id, now.modules), *map(id, now.tensors)] == [*map(id, tower.used), *map(id, tower.tensors)]
