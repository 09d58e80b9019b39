"""Hooks of modules, and forwards set on instances: a recomputation runs those of its forward.

A hook may change what goes in and out of a module, so one that is registered or removed between a forward and its
backward makes the recomputation another function. ``module.forward = ...`` does the same.

Guarantees
    * Inside :meth:`Hooks.again` every module has the hooks and the ``forward`` with which the noted forward began.
      Afterwards it has those from before the recomputation.
    * Hooks of these packages (:class:`EngineHook`) only look at what passes. They are not compared: what is registered
      during the recomputation runs.

Hooks for all modules (``torch.nn.modules.module.register_module_forward_hook``) are shared by all threads, so they
cannot be exchanged for one recomputation. If they have changed, it is refused; torch's own (counters of operations,
trackers) change no result and are not compared.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from pipe.torch_private import HOOKS_OF_MODULES, global_module_hooks

__all__ = ["EngineHook", "HookAttributes", "Hooks"]

_hooks_of: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attrgetter(*HOOKS_OF_MODULES)

#: A module that has any, its hooks of each kind, and the forward of the instance or None.
_Noted = dict[nn.Module, tuple[tuple[dict[int, Any], ...], Any]]
_NOTHING: tuple[tuple[dict[int, Any], ...], Any] = ({},) * len(HOOKS_OF_MODULES), None


class EngineHook:
    """A hook of these packages: it looks at what passes, and changes nothing that a recomputation computes."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> Any:
        """Calls it."""
        return self._hook(*arguments)


class HookAttributes:
    """The attributes of modules that hold hooks, and forwards of instances; made to be put back."""

    __slots__ = ("_values",)

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        names = *HOOKS_OF_MODULES, "forward"
        self._values = [(own := vars(module), {name: own[name] for name in names if name in own}) for module in modules]

    def restore(self) -> None:
        """Puts them back. May be called again after it was interrupted itself."""
        for attributes, values in self._values:
            if "forward" in attributes and "forward" not in values:
                del attributes["forward"]
            attributes.update(values)


class Hooks:
    """The hooks of some modules in one forward; made before it.

    Args:
        modules: all of those that run.
    """

    __slots__ = ("_global", "_modules", "_noted")

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = modules
        self._noted = _note(modules)
        self._global: list[Any] = []

    def seal(self, *, add: bool) -> None:
        """To be called after the forward. Hooks that it removed from modules had run.

        Args:
            add: whether a recomputation also runs the hooks that were registered by the forward. Where it starts from
                the attributes of before the forward, it registers them again itself.
        """
        for module, (after, _) in _note(self._modules).items() if add else ():
            before, forward = self._noted.get(module, _NOTHING)
            self._noted[module] = tuple({**old, **new} for old, new in zip(before, after, strict=True)), forward
        self._global = _global_hooks()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around a recomputation.

        Raises:
            RuntimeError: if hooks for all modules were registered or removed since :meth:`seal`.
        """
        if self._global != _global_hooks():
            raise RuntimeError(
                "hooks for all modules (register_module_forward_hook and its like) were registered or removed between "
                "a forward and its backward, which runs layers again: it would compute something else; register them "
                "before the forward and remove them after the backward, or compute without checkpointing"
            )
        now = _note(self._modules)
        if now == self._noted:
            yield
            return
        changed = [m for m in now.keys() | self._noted.keys() if now.get(m) != self._noted.get(m)]
        before = HookAttributes(changed)
        try:
            for module in changed:
                self._put(module)
            yield
        finally:
            before.restore()

    def _put(self, module: nn.Module) -> None:
        noted, forward = self._noted.get(module, _NOTHING)
        attributes = vars(module)
        for name, hooks in zip(HOOKS_OF_MODULES, noted, strict=True):
            engines = {key: hook for key, hook in attributes[name].items() if isinstance(hook, EngineHook)}
            # A copy: a hook that removes itself does so from the module's own.
            attributes[name] = OrderedDict({**hooks, **engines})
        attributes.pop("forward", None)
        if forward is not None:
            attributes["forward"] = forward


def _note(modules: Sequence[tuple[str, nn.Module]]) -> _Noted:
    noted: _Noted = {}
    for _, module in modules:
        hooks = _hooks_of(module)
        forward = vars(module).get("forward")
        if forward is not None or any(hooks):
            kinds = tuple({k: h for k, h in kind.items() if type(h) is not EngineHook} for kind in hooks)
            if forward is not None or any(kinds):
                noted[module] = kinds, forward
    return noted


def _global_hooks() -> list[Any]:
    return [
        (key, hook)
        for hooks in global_module_hooks()
        for key, hook in hooks.items()
        if not str(getattr(hook, "__module__", None)).startswith("torch.")
    ]
