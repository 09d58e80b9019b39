"""Wraps a function that uses modules, such as a bound method (``clip.encode_image``), in an ``nn.Module``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from gradcache.used_modules import UsedModules

__all__ = ["CallableModel", "Towers"]


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


class Towers:
    """Converts the models of a step to modules; the same callable gives the same module, also in later steps."""

    def __init__(self) -> None:
        self._made: list[CallableModel] = []

    def of(self, models: Sequence[Any]) -> list[nn.Module]:
        """The modules themselves; callables wrapped in a :class:`CallableModel`.

        Raises:
            TypeError: for anything else.
        """
        made: list[CallableModel] = []
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
            known = [tower for tower in [*made, *self._made] if tower.function == model]
            tower = known[0] if known and _same_modules(known[0]) else CallableModel(model)
            made.append(tower)
            towers.append(tower)
        self._made = made
        return towers


def _same_modules(tower: CallableModel) -> bool:
    """Whether the function still uses the modules and tensors that it used when the tower was made."""
    now = UsedModules(tower.function)
    return [*map(id, now.modules), *map(id, now.tensors)] == [*map(id, tower.used), *map(id, tower.tensors)]
