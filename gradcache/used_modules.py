"""Finds the modules and trainable tensors that a function uses: in its arguments, closure, object and globals.

A loss may be a module, a bound method of one, or a lambda over a temperature; an encoder may be a method of a plain
object that holds modules. Their parameters must be part of a step too.

Assumes that a function refers to these objects by name: objects that it looks up by a string, or gets from a compiled
extension, are not found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

__all__ = ["CallableModel", "UsedModules", "as_modules", "leaves_of"]

_DEEPEST = 5
#: Longer collections are taken for data; the number of objects is limited so that the search does not slow down a step.
_LONGEST, _MOST = 256, 5000
#: Functions of these packages hold no modules of the user.
_LIBRARIES = frozenset({"builtins", "torch", "numpy", "functools", "collections", "math", "typing", "gradcache"})


class UsedModules:
    """The modules, and trainable leaf tensors outside them, that ``values`` (functions, nested values) use.

    Their order is the same in every process that runs the same program.
    """

    def __init__(self, *values: Any) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
        for value in values:
            self._visit(value, 0)

    def parameters(self) -> list[Tensor]:
        """Each trainable tensor once."""
        found = [parameter for module in self.modules for parameter in module.parameters()] + self.tensors
        return list({id(tensor): tensor for tensor in found if tensor.requires_grad}.values())

    def _visit(self, value: Any, depth: int) -> None:
        if value is None or isinstance(value, (str, bytes, int, float, type, ModuleType)) or id(value) in self._seen:
            return
        if depth > _DEEPEST or len(self._seen) > _MOST:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, Tensor):
            if value.requires_grad and value.is_leaf:
                self.tensors.append(value)
        else:
            for inner in _parts_of(value):
                self._visit(inner, depth + 1)


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from _used_by(value)
    elif isinstance(value, (Mapping, list, tuple)):
        if len(value) <= _LONGEST:
            yield from value.values() if isinstance(value, Mapping) else value
    elif type(value).__module__.partition(".")[0] not in _LIBRARIES or callable(value):
        yield from getattr(value, "__dict__", {}).values()
        # A callable object uses what the __call__ of its class uses.
        call = inspect.getattr_static(type(value), "__call__", None)
        if isinstance(call, FunctionType):
            yield call


def _used_by(function: FunctionType) -> Iterator[Any]:
    wrapped = inspect.unwrap(function)
    if wrapped is not function:
        yield wrapped
    if function.__module__ is not None and function.__module__.partition(".")[0] in _LIBRARIES:
        names: set[str] = set()
    else:
        names = set(_names_in(function.__code__))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell: the name is not bound yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in sorted(names):
        if name in function.__globals__:
            yield function.__globals__[name]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a lambda or a comprehension in it
            yield from _names_in(constant)


def leaves_of(*outputs: Tensor) -> Iterator[Tensor]:
    """Each trainable leaf that the graph of ``outputs`` reaches, one of them included."""
    seen: set[Any] = set()
    queue: list[Any] = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        queue += [following for following, _ in node.next_functions]


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
