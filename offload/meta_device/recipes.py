"""Records how code initialises parameters on the meta device, and does the same where they are stored.

A module's ``reset_parameters()`` does not know what the code around it does next: peft sets a layer that it has just
made to zero, transformers draws weights from another distribution. Under ``init_empty_weights()`` every call that
writes to a parameter is recorded, and repeated once the parameter has memory, if no file has its value.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Recipe", "give_values", "recipe_of", "record", "watch"]

#: Methods that write every element, whatever was there. So do all functions of ``torch.nn.init``.
_OVERWRITES = frozenset({"zero_", "fill_", "normal_", "uniform_", "exponential_", "log_normal_", "cauchy_"})


#: A call with all its arguments but the tensor on which it was called.
_Call = Callable[[Tensor], Any]


@dataclass
class Recipe:
    """The calls that gave a parameter its initial values, each with the views on which it was called."""

    calls: list[tuple[Sequence[_Call], _Call]] = field(default_factory=list)
    #: Whether calls were seen that cannot be repeated.
    unknown: bool = False

    def check(self, name: str) -> None:
        """Raises ValueError if it cannot be repeated for the parameter ``name``."""
        if self.unknown:
            raise ValueError(
                f"no file has a value of {name}, and its initial one was computed from other tensors, which have none "
                f"on the meta device; supply it by pretrained, or build the model on the CPU"
            )

    @torch.no_grad()
    def repeat(self, parameter: Tensor) -> None:
        """Writes values to a parameter, in the memory that it has."""
        for views, call in self.calls:
            tensor = parameter
            for view in views:
                tensor = view(tensor)
            call(tensor)


#: By the parameter on the meta device.
_recipes = WeakTensorKeyDictionary()
#: Of a parameter, and of each view: the recipe, and the calls that made the view.
_views = WeakTensorKeyDictionary()


def watch(parameter: nn.Parameter) -> None:
    """Records calls that write to a parameter on the meta device from now on."""
    _recipes[parameter] = recipe = Recipe()
    _views[parameter] = (recipe, ())


def recipe_of(parameter: Tensor) -> Recipe | None:
    """The recipe of a parameter to which calls were seen."""
    recipe: Recipe | None = _recipes.get(parameter)
    return recipe if recipe is not None and (recipe.calls or recipe.unknown) else None


def give_values(model: nn.Module, other_than: Container[Tensor]) -> None:
    """Gives memory and their initial values to the parameters of a model on the meta device, but for some.

    Raises ValueError if these were not recorded.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or parameter in other_than:
                continue
            if parameter not in made:
                recipe = recipe_of(parameter) or Recipe(unknown=True)
                recipe.check(f"{path}.{key}")
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                recipe.repeat(made[parameter])
            module._parameters[key] = made[parameter]


def record(function: Any, arguments: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
    """Notes a call that has returned, if it wrote to a parameter that is watched, or made a view of it."""
    by_name = "tensor" in named  # as functions of torch.nn.init are called
    tensor = named["tensor"] if by_name else arguments[0] if arguments else None
    if not isinstance(tensor, Tensor) or tensor not in _views:
        return
    recipe, views = _views[tensor]
    rest = arguments if by_name else arguments[1:]
    others = {key: value for key, value in named.items() if key != "tensor"}

    def call(tensor: Tensor) -> Any:
        return function(*rest, **others, tensor=tensor) if by_name else function(tensor, *rest, **others)

    name = getattr(function, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
        if not views and (name in _OVERWRITES or getattr(function, "__module__", "") == "torch.nn.init"):
            recipe.calls, recipe.unknown = [], False
        elif not recipe.calls:
            recipe.unknown = True  # what it had before is not known
        recipe.unknown |= any(isinstance(each, Tensor) for each in (*rest, *others.values()))
        recipe.calls.append((views, call))
    elif isinstance(result, Tensor) and result.is_meta and result not in _views and _same_storage(result, tensor):
        _views[result] = (recipe, (*views, call))


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return bool(StorageWeakRef(one.untyped_storage()) == StorageWeakRef(other.untyped_storage()))
