"""Saves and restores what modules hold: attributes, modes, hooks, buffers, and their containers one level deep.

A second run must find the modules as the first one did: a counter, a hidden state, a list, a hook that was registered
or removed since, a patched ``forward``. The saved contents are references, except for containers and objects that are
attributes, whose elements are copied.

Guarantee: after :meth:`ModuleContents.put` every module holds what it held. Parameters and children are left alone.

Limits: changes inside what objects and containers of attributes refer to are not detected. Global module hooks are
shared by all threads, so they cannot be replaced for one recomputation; if they have changed, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from pipe.recompute.objects import content_of, differs, put
from pipe.recompute.thread_state import PACKAGES
from pipe.torch_private.modules import HOOKS_OF_MODULES, global_module_hooks

__all__ = ["EngineHook", "ModuleContents", "global_hooks"]

_OF_TORCH = frozenset(vars(nn.Module()))
#: Types of attributes that hold nothing that can change.
PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_hooks_of: Callable[[dict[str, Any]], tuple[dict[int, Any], ...]] = itemgetter(*HOOKS_OF_MODULES)
_NO_HOOKS: tuple[dict[int, Any], ...] = ({},) * len(HOOKS_OF_MODULES)


def _keeps_its_own(module: nn.Module) -> bool:
    """Whether attributes of a module are those of the present run, as ``no_sync()`` of a wrapper around a backward."""
    kind = type(module)
    if getattr(kind, "shows_another", False):  # the attributes are those of a module of the user
        return False
    defined = kind.__module__
    return defined.partition(".")[0] in PACKAGES or defined.startswith(("torch.nn.parallel.", "torch.distributed."))


class EngineHook:
    """A hook of these packages, which does not change the result of a recomputation: it is left where it is."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> Any:
        """Calls the hook."""
        return self._hook(*arguments)


class ModuleContents:
    """What modules hold now; only modes, hooks and buffers, if not ``attributes``, and of modules of these packages."""

    __slots__ = ("_before",)

    def __init__(self, modules: Iterable[nn.Module], attributes: bool = True) -> None:
        self._before = [
            (
                own := module.__dict__,
                {**own}
                if (whole := attributes and not _keeps_its_own(module))
                else {k: own[k] for k in ("training",) if k in own},
                tuple([{**kind} for kind in hooks]) if any(hooks := _hooks_of(own)) else None,
                {**own["_buffers"]} if own["_buffers"] else None,
                [(v, content_of(v)) for k, v in own.items() if whole and type(v) not in PLAIN and k not in _OF_TORCH],
            )
            for module in modules
        ]

    def record_changes(self) -> bool:
        """To be called after a forward: whether it changed an attribute. Raises if it changed a tensor in place."""
        changed = False
        for own, before, _, _, held in self._before:
            if len(before) > 1 and not _same(own, before):
                changed = True
                for name, value in before.items():
                    if type(value) is Tensor and value.grad_fn is not None and own.get(name) is not value:
                        before[name] = value.detach().requires_grad_()  # else each batch would hold the one before
            for value, content in held:
                if differs(value, content):
                    changed = True
                    if isinstance(value, Tensor):
                        self._refuse(own, value, "while it runs")
        return changed

    def check(self) -> None:
        """Raises RuntimeError if a tensor that is an attribute was changed in place."""
        for own, _, _, _, held in self._before:
            for value, content in held:
                if isinstance(value, Tensor) and differs(value, content):
                    self._refuse(own, value, "before its backward")

    def _refuse(self, own: dict[str, Any], tensor: Tensor, when: str) -> None:
        name = next((name for name, value in own.items() if value is tensor), "")
        raise RuntimeError(
            f"expected a module not to change, {when}, its attribute {name!r}, a tensor, in place: a recomputation "
            f"would start from the changed value; register it as a buffer, or assign a new tensor"
        )

    def put(self) -> bool:
        """Gives the modules what they held; returns whether that was something else than now. May be repeated."""
        changed = False
        for own, before, hooks, buffers, held in self._before:
            if len(before) <= 1:
                own.update(before)
            elif not _same(own, before):
                changed = True
                for name in own.keys() - before.keys():
                    del own[name]
                own.update(before)
            now = _hooks_of(own)
            if hooks is not None or any(now):
                for kind, old in zip(now, hooks or _NO_HOOKS, strict=True):
                    changed |= _put_hooks(kind, old)
            if buffers is not None and not _same(own["_buffers"], buffers):
                changed = True
                own["_buffers"].clear()
                own["_buffers"].update(buffers)
            for value, content in held:
                if differs(value, content):
                    changed = True
                    put(value, content)
        return changed


def _put_hooks(kind: dict[int, Any], before: dict[int, Any]) -> bool:
    there = {key: hook for key, hook in kind.items() if type(hook) is not EngineHook}
    wanted = {key: hook for key, hook in before.items() if type(hook) is not EngineHook}
    if there == wanted:
        return False
    engines = {key: hook for key, hook in kind.items() if type(hook) is EngineHook}
    kind.clear()
    kind.update({**wanted, **engines})
    return True


def _same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return list(a) == list(b) and all(map(is_, a.values(), b.values()))


def global_hooks() -> list[Any]:
    """Hooks for all modules, without those of torch itself, which change no result."""
    return [
        (key, hook)
        for hooks in global_module_hooks()
        for key, hook in hooks.items()
        if not str(getattr(hook, "__module__", None)).startswith("torch.")
    ]
