"""Saves the hooks and instance ``forward`` of modules before a forward, and restores them for its recomputation.

A hook may change inputs and outputs of a module, so a hook that is registered or removed between a forward and its
backward would make the recomputation another function. The same holds for ``module.forward = ...``.

Guarantees
    * Inside :meth:`Hooks.again` every module has the hooks and the ``forward`` from the start of the recorded forward.
      Afterwards it has those from before the recomputation.
    * Hooks of these packages (:class:`EngineHook`) change no values and are not compared: those that are registered
      during the recomputation run.

Global module hooks (``torch.nn.modules.module.register_module_forward_hook``) are shared by all threads, so they
cannot be replaced for one recomputation. If they have changed, it is refused; torch's own (counters of operations,
trackers) change no result and are not compared.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from pipe.torch_private.modules import HOOKS_OF_MODULES, global_module_hooks

__all__ = ["EngineHook", "HookAttributes", "Hooks"]

_hooks_of: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attrgetter(*HOOKS_OF_MODULES)

#: For each module with hooks or a forward of the instance: its hooks of each kind, and that forward or None.
_Recorded = dict[nn.Module, tuple[tuple[dict[int, Any], ...], Any]]
_NOTHING: tuple[tuple[dict[int, Any], ...], Any] = ({},) * len(HOOKS_OF_MODULES), None


class EngineHook:
    """A hook of these packages, which does not change the result of a recomputation."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> Any:
        """Calls the hook."""
        return self._hook(*arguments)


class HookAttributes:
    """The saved values of the attributes of modules that hold hooks, and of instance ``forward`` attributes."""

    __slots__ = ("_values",)

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        names = *HOOKS_OF_MODULES, "forward"
        self._values = [(own := vars(module), {name: own[name] for name in names if name in own}) for module in modules]

    def restore(self) -> None:
        """Restores them. May be called again after it was interrupted itself."""
        for attributes, values in self._values:
            if "forward" in attributes and "forward" not in values:
                del attributes["forward"]
            attributes.update(values)


class Hooks:
    """The hooks of some modules in one forward; made before it."""

    __slots__ = ("_global", "_modules", "_recorded")

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = modules
        self._recorded = _record(modules)
        self._global: list[Any] = []

    def record_changes(self, *, add: bool) -> None:
        """To be called after the forward. Hooks that the forward removed stay recorded, since they ran.

        ``add``: whether a recomputation also runs the hooks that the forward registered. One that starts from the
        attributes of before the forward registers them again itself.
        """
        for module, (after, _) in _record(self._modules).items() if add else ():
            before, forward = self._recorded.get(module, _NOTHING)
            self._recorded[module] = tuple({**old, **new} for old, new in zip(before, after, strict=True)), forward
        self._global = _global_hooks()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context for a recomputation, with the recorded hooks. Raises if global module hooks have changed."""
        if self._global != _global_hooks():
            raise RuntimeError(
                "hooks for all modules (register_module_forward_hook and its like) were registered or removed between "
                "a forward and its backward, which runs layers again: it would compute something else; register them "
                "before the forward and remove them after the backward, or compute without checkpointing"
            )
        now = _record(self._modules)
        if now == self._recorded:
            yield
            return
        changed = [m for m in now.keys() | self._recorded.keys() if now.get(m) != self._recorded.get(m)]
        before = HookAttributes(changed)
        try:
            for module in changed:
                self._put(module)
            yield
        finally:
            before.restore()

    def _put(self, module: nn.Module) -> None:
        recorded, forward = self._recorded.get(module, _NOTHING)
        attributes = vars(module)
        for name, hooks in zip(HOOKS_OF_MODULES, recorded, strict=True):
            engines = {key: hook for key, hook in attributes[name].items() if isinstance(hook, EngineHook)}
            # A copy: a hook that removes itself removes itself from the module's dict.
            attributes[name] = OrderedDict({**hooks, **engines})
        attributes.pop("forward", None)
        if forward is not None:
            attributes["forward"] = forward


def _record(modules: Sequence[tuple[str, nn.Module]]) -> _Recorded:
    recorded: _Recorded = {}
    for _, module in modules:
        hooks = _hooks_of(module)
        forward = vars(module).get("forward")
        if forward is not None or any(hooks):
            kinds = tuple({k: h for k, h in kind.items() if type(h) is not EngineHook} for kind in hooks)
            if forward is not None or any(kinds):
                recorded[module] = kinds, forward
    return recorded


def _global_hooks() -> list[Any]:
    return [
        (key, hook)
        for hooks in global_module_hooks()
        for key, hook in hooks.items()
        if not str(getattr(hook, "__module__", None)).startswith("torch.")
    ]
