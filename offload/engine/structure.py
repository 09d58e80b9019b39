"""Detects layers, modules, parameters and buffers that were replaced, added or removed since the model was made.

The engine moves the parameters that existed when the model was made. A later one has no home, no slot and no gradient:
adapters injected into the layers, ``load_state_dict(assign=True)``, ``weight_norm`` or a swap of modules would silently
train other parameters than those shown. So each forward compares.

=============================  =====================================================================================
change                         consequence
=============================  =====================================================================================
layers replaced; parameters    RuntimeError: change the layers first, wrap them afterwards
replaced, added or removed
other modules, buffers         allowed: the next forward saves and restores the present modules and buffers
=============================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import nn

__all__ = ["Structure", "refuse_replaced"]


class Structure:
    """The modules, parameters and buffers of the ``layers`` that a model keeps by name."""

    def __init__(self, layers: Mapping[str, nn.Module | None]) -> None:
        self._layers = layers
        self._wrapped = {name: id(layer) for name, layer in layers.items()}
        self._parameters = dict(self._named_parameters())
        self._record()

    def check(self) -> bool:
        """Whether modules or buffers changed since the last call; refuses other layers or parameters than at first."""
        layers = {name: id(layer) for name, layer in self._layers.items()}
        if layers == self._wrapped and _members(self._modules) == self._recorded:
            return False
        current = {**layers, **dict(self._named_parameters())}
        wrapped = {**self._wrapped, **self._parameters}
        changed = sorted(name for name in current.keys() | wrapped.keys() if current.get(name) != wrapped.get(name))
        if changed:
            refuse_replaced(changed)
        self._record()
        return True

    def _record(self) -> None:
        modules = dict.fromkeys(m for layer in self._layers.values() if layer is not None for m in layer.modules())
        self._modules = [vars(module) for module in modules]
        self._recorded = _members(self._modules)

    def _named_parameters(self) -> Iterator[tuple[str, int]]:
        for name, layer in self._layers.items():
            for path, module in () if layer is None else layer.named_modules(prefix=name):
                yield from ((f"{path}.{key}", id(p)) for key, p in dict.items(module._parameters) if p is not None)


def refuse_replaced(names: Sequence[str]) -> None:
    """Raises RuntimeError for layers or parameters with these names."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    raise RuntimeError(
        f"layers or parameters were replaced, added or removed after this OffloadModel was made: "
        f"{', '.join(names[:5])}{more}. Homes of parameters are made once; change the layers first "
        f"(adapters, weight_norm, other modules, load_state_dict(assign=True)) and wrap them afterwards. "
        f"torch.func.functional_call with other parameters is not supported"
    )


def _members(modules: Sequence[dict[str, Any]]) -> list[Any]:
    """Of the attributes of modules: how many parameters, children and buffers each has; which ones, or their names.

    By functions of C alone, since each forward compares. Identities: all references to parameters are counted.
    """
    found: list[Any] = []
    for kind in ("_parameters", "_modules", "_buffers"):
        members = [*map(itemgetter(kind), modules)]
        found.append([*map(len, members)])
        names = kind == "_buffers"
        each = chain.from_iterable(members if names else map(dict.values, members))
        found.append([*(each if names else map(id, each))])
    return found
