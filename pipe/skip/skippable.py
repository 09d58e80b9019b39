"""Skippable layers: layers that stash a tensor for a later layer, or pop one, inside a pipeline or without one.

A layer declares the names that it stashes or pops, and its ``forward`` is a generator that yields the commands::

    @skippable(stash=["residual"])
    class Begin(nn.Module):
        def forward(self, input):
            yield stash("residual", input)
            return self.layer(input)

    @skippable(pop=["residual"])
    class End(nn.Module):
        def forward(self, input):
            residual = yield pop("residual")
            return self.layer(input) + residual

Invariant: every name that is declared is used exactly once in each forward, or the forward raises.

Source: torchgpipe, "Long Skip Connections".
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from pipe.skip.namespace import Key, Namespace
from pipe.skip.tracker import current_skip_tracker

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]


@dataclass(slots=True)
class stash:  # a command, spelled as in torchgpipe  # noqa: N801, RUF100
    """The command to stash a tensor (or None) for a later layer: ``yield stash("name", tensor)``."""

    name: str
    tensor: Tensor | None


@dataclass(slots=True)
class pop:  # noqa: N801, RUF100
    """The command to pop a stashed tensor: ``tensor = yield pop("name")``."""

    name: str


Self = TypeVar("Self", bound="Skippable")


class Skippable(nn.Module):
    """A layer made skippable by :func:`skippable`; the decorated layer is ``.module``."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[tuple[str, ...]]
    poppable_names: ClassVar[tuple[str, ...]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def stashable(self) -> list[Key]:
        """The keys that are stashed here."""
        return [(self.namespaces.get(name), name) for name in self.stashable_names]

    def poppable(self) -> list[Key]:
        """The keys that are popped here."""
        return [(self.namespaces.get(name), name) for name in self.poppable_names]

    def isolate(self: Self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Moves names of this layer into a namespace, so that another pair of layers can use the same names.

        Args:
            ns: the namespace.
            only: the names to move; by default all.

        Returns:
            The layer itself.

        Raises:
            ValueError: if ``only`` has a name that this layer did not declare.
        """
        declared = {*self.stashable_names, *self.poppable_names}
        names = declared if only is None else set(only)
        if names - declared:
            raise ValueError(f"expected names among {sorted(declared)} to isolate, got only={sorted(names)}")
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def forward(self, input: Any) -> Any:
        """Runs the layer and its commands.

        Raises:
            RuntimeError: if a command was not declared, a declared name was not used, or nothing was stashed to pop.
        """
        tracker = current_skip_tracker()
        popped: dict[str, Any] = {}
        for key in self.poppable():
            if key not in tracker:
                raise RuntimeError(f"'{key[1]}' has not been stashed")
            popped[key[1]] = tracker.pop(key)
        stashed: dict[str, Any] = {}
        output = self._run(self.module(input), stashed, popped)
        missing = [f"'{name}'" for name in self.stashable_names if name not in stashed]
        if missing:
            raise RuntimeError(f"{', '.join(missing)} must be stashed but have not")
        if popped:
            raise RuntimeError(f"{', '.join(repr(name) for name in popped)} must be popped but have not")
        for key in self.stashable():
            tracker[key] = stashed[key[1]]
        return output

    def _run(self, output: Any, stashed: dict[str, Any], popped: dict[str, Any]) -> Any:
        if not isinstance(output, Generator):
            return output  # a layer without commands in this forward
        answer: Any = None
        while True:
            try:
                command = output.send(answer)
            except StopIteration as end:
                return end.value
            answer = None
            if isinstance(command, stash):
                if command.name not in self.stashable_names:
                    raise RuntimeError(f"'{command.name}' has not been declared as stashable")
                stashed[command.name] = command.tensor
            elif isinstance(command, pop):
                if command.name not in self.poppable_names:
                    raise RuntimeError(f"'{command.name}' has not been declared as poppable")
                if command.name not in popped:
                    raise RuntimeError(f"'{command.name}' has been popped already")
                answer = popped.pop(command.name)
            else:
                raise TypeError(f"expected stash(...) or pop(...) to be yielded, got {type(command).__name__}")


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Class decorator that declares the skip tensors of a layer.

    Args:
        stash: names that every forward stashes.
        pop: names that every forward pops.
    """

    stash_names, pop_names = tuple(dict.fromkeys(stash)), tuple(dict.fromkeys(pop))

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        # The module and name from which pickle imports a class; that of the decorated one is now the decorator's.
        named = {"__module__": module_cls.__module__, "__doc__": module_cls.__doc__}
        qualname = module_cls.__qualname__
        attributes = {
            "module_cls": type(module_cls.__name__, (module_cls,), {**named, "__qualname__": f"{qualname}.module_cls"}),
            "stashable_names": stash_names,
            "poppable_names": pop_names,
            "__qualname__": qualname,
            **named,
        }
        return type(module_cls.__name__, (Skippable,), attributes)

    return decorate


def verify_skippables(module: nn.Sequential) -> None:
    """Checks that every skip tensor is stashed once and popped once, later.

    Raises:
        TypeError: naming every violation.
    """
    stashed: set[Key] = set()
    popped: set[Key] = set()
    wrong: list[str] = []
    for layer_name, layer in module.named_modules():
        if not isinstance(layer, Skippable):
            continue
        both = {*layer.stashable_names} & {*layer.poppable_names}
        wrong += [f"'{layer_name}' declared '{name}' both as stashable and as poppable" for name in sorted(both)]
        for key in (key for key in layer.poppable() if key[1] not in both):
            if key in popped:
                wrong.append(f"'{layer_name}' redeclared '{key[1]}' as poppable but not isolated by namespace")
            elif key not in stashed:
                wrong.append(f"'{layer_name}' declared '{key[1]}' as poppable but it was not stashed")
            else:
                popped.add(key)
        for key in (key for key in layer.stashable() if key[1] not in both):
            if key in stashed:
                wrong.append(f"'{layer_name}' redeclared '{key[1]}' as stashable but not isolated by namespace")
            stashed.add(key)
    left = sorted(name for _, name in stashed - popped)
    wrong += [f"no module declared '{name}' as poppable but stashed" for name in left]
    if wrong:
        lines = "\n".join(f"* {line}" for line in wrong)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{lines}")
