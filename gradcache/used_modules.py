"""Finds the modules and trainable tensors that a function uses: in its arguments, closure, object and globals.

A loss may be a module, a bound method of one, or a lambda over a temperature; an encoder may be a method of a plain
object that holds modules. Their parameters must be part of a step too.

Assumes that a function refers to these objects by name: objects that it looks up by a string, or gets from a compiled
extension, are not found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from pipe.recompute.captured import captured

__all__ = ["CallableModel", "UsedModules", "as_modules"]


class UsedModules:
    """The modules, and trainable leaf tensors outside them, that ``values`` (functions, nested values) use.

    Their order is the same in every process that runs the same program.
    """

    def __init__(self, *values: Any) -> None:
        found = captured(*values)
        self.modules = found.modules
        self.tensors = [x for x in found.objects if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]

    def parameters(self) -> list[Tensor]:
        """Each trainable tensor once."""
        found = [parameter for module in self.modules for parameter in module.parameters()] + self.tensors
        return list({id(tensor): tensor for tensor in found if tensor.requires_grad}.values())


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
