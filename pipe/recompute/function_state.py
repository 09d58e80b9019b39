"""The state that a function must find when it runs again: what it captured, and the objects that are its arguments.

What a recomputation can restore, it restores: generators, buffers, attributes, hooks, variables of a closure. What
it cannot, or what other code may have changed on purpose, is compared: parameters, modes, tensors, globals, attributes
and elements of the objects that the function reads. If it differs, backward raises RuntimeError and names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from pipe.nested import LEAVES, flatten
from pipe.recompute.captured import Captured, captured, frozen
from pipe.recompute.generators import generators_of
from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.region import RunState
from pipe.recompute.rerun import refuse_cached_parametrizations

__all__ = ["FunctionState", "function_state"]

_MISSING = object()


class FunctionState(RunState):
    """The state before one run of a function."""

    __slots__ = ("_captured", "_ended", "_values", "_versions")

    def __init__(self, watched: WatchedModule, found: Captured | None, devices: set[Any]) -> None:
        module_state = ModuleState(watched) if watched.all else None
        held = watched.generators
        if found is not None and found.generators:
            held = [*{id(each): each for each in (*held, *found.generators)}.values()]
        super().__init__(devices, generators_of(devices, held), module_state)
        self._captured = None if found is None or not (found.tensors or found.values) else found
        self._values: list[list[Any]] = []
        self._versions: list[int] = []
        self._ended = False
        if self._captured is not None:
            self._values = self._present()

    def _present(self) -> list[list[Any]]:
        assert self._captured is not None
        return [_members(owner, names) for _, owner, names in self._captured.values]

    def record_changes(self) -> None:
        """After the first run: drops what it did not change."""
        super().record_changes()
        self._ended = True
        if self._captured is not None:
            # What the function itself changes is no change by others.
            now = self._present()
            for k, (before, after) in enumerate(zip(self._values, now, strict=True)):
                if _changed(before, after) is not None:
                    self._values[k] = []
            self._versions = [-1 if x.is_inference() else x._version for x in self._captured.tensors]

    def check(self, name: str) -> None:
        """Raises RuntimeError if a further run would differ from the first; ``name``: of it."""
        super().check(name)
        if not self._ended:
            return
        if self._module_state is not None:
            self._module_state.check()
        if self._captured is None:
            return
        for tensor, version in zip(self._captured.tensors, self._versions, strict=False):
            if version != -1 and tensor._version != version:
                raise RuntimeError(
                    f"expected a tensor of shape {tuple(tensor.shape)} that {name} uses to be the same in backward, "
                    f"got one that was changed in place since; clone it before changing it, or pass it as an argument"
                )
        for (what, owner, names), before in zip(self._captured.values, self._values, strict=True):
            if before:
                k = _changed(before, _members(owner, names))
                if k is not None:
                    which = f"{what}, {names[k]!r}," if names is not None else what
                    raise RuntimeError(
                        f"expected {which} that {name} uses to be the same in backward, got one that was changed "
                        f"since; pass its value as an argument, or change it after backward"
                    )


def _members(owner: Any, names: tuple[str, ...] | None) -> list[Any]:
    if names is not None:
        return [owner.get(name, _MISSING) for name in names]
    if isinstance(owner, dict):
        return [x for pair in owner.items() for x in pair]
    return [*owner]


def _changed(before: list[Any], after: list[Any]) -> int | None:
    """The index of the first member that is another object, or None."""
    for k, (a, b) in enumerate(zip(before, after, strict=False)):
        if a is not b:
            return k
    return None if len(before) == len(after) else min(len(before), len(after))


def function_state(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], module: nn.Module | None
) -> tuple[FunctionState, Callable[..., Any]] | None:
    """The state before a run of a function, and the function that is to run again.

    None if it cannot be repeated, since its layers find their shapes in this run.

    Args:
        function: the function.
        args, kwargs: of the run.
        module: all that it uses; None if that is to be found out.
    """
    found = None
    if module is not None:
        watched = WatchedModule(module)
        leaves = flatten(args)[0]
    else:
        leaves = flatten((args, kwargs))[0]
        others = [x for x in leaves if type(x) not in LEAVES and not isinstance(x, Tensor)]
        if others or not isinstance(function, nn.Module):
            found = captured(function, others)
            watched = WatchedModule(*found.modules)
        else:
            watched = WatchedModule(function)
    for each in watched.all:
        if isinstance(each, LazyModuleMixin) and each.has_uninitialized_params():
            return None
    refuse_cached_parametrizations(watched.all)
    devices = watched.devices | {x.device for x in leaves if isinstance(x, Tensor)}
    if found is not None:
        devices |= {x.device for x in found.tensors}
    return FunctionState(watched, found, devices), function if module is not None else frozen(function)
