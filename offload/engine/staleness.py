"""Whether anybody can have written to a home since the last pass: what slots hold is current only if nobody could.

Between calls the homes belong to the user. A write in place shows in a tensor's count of changes, but one through
``.data``, a NumPy view or another alias does not. So it is not asked whether somebody wrote, but whether somebody could
have: a parameter is reached through the ``_parameters`` of its module, or by who holds it or an alias of it already.

Invariant: :meth:`StalenessTracker.since_mark` is True only if, from the mark to now,

* no value was taken out of, or put into, any ``_parameters`` (they note it: ``getattr``, ``parameters()``,
  ``state_dict()``, ``copy`` and all else go through them),
* nobody but the engine held a parameter, strongly or weakly (reference counts),
* nobody but the engine held memory of a home (use counts of the storages: views, ``detach()``, NumPy arrays).

Whatever is unclear counts as a write, and costs a load. A plain optimizer, an ``OffloadOptimizer``, or a list of
parameters holds parameters, so while one is alive every call loads; models that only infer load once.

Not seen: a write to memory by its bare address, and one through ``.data`` of a parameter that was dug out of an
autograd node or the garbage collector.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import ItemsView, Iterable, Iterator, Sequence, ValuesView
from typing import Any

import torch
from torch import nn

from offload.streaming.shard import Shard
from pipe.torch_private import native_uses, storage_uses

__all__ = ["StalenessTracker"]


class _Note:
    """Whether a value was taken out of one of the dicts that share this."""

    def __init__(self) -> None:
        self.touched = True


class _Noting(dict[str, "nn.Parameter | None"]):
    """The ``_parameters`` of a module. Copies of it are plain dicts."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], note: _Note) -> None:
        super().__init__(parameters)
        self._note = note

    def __getitem__(self, key: str) -> nn.Parameter | None:
        self._note.touched = True
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: nn.Parameter | None) -> None:
        self._note.touched = True
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._note.touched = True
        super().__delitem__(key)

    def __iter__(self) -> Iterator[str]:
        # Without this override, ``dict(self)`` and ``{**self}`` would take the values past the others.
        self._note.touched = True
        return super().__iter__()

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        self._note.touched = True
        return super().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        self._note.touched = True
        return super().values()

    def get(self, key: str, default: Any = None) -> Any:
        self._note.touched = True
        return super().get(key, default)

    def pop(self, *arguments: Any) -> Any:
        self._note.touched = True
        return super().pop(*arguments)

    def popitem(self) -> Any:
        self._note.touched = True
        return super().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._note.touched = True
        return super().setdefault(key, default)

    def update(self, *arguments: Any, **more: Any) -> None:
        self._note.touched = True
        super().update(*arguments, **more)

    def clear(self) -> None:
        self._note.touched = True
        super().clear()

    def copy(self) -> dict[str, nn.Parameter | None]:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


class StalenessTracker:
    """Watches the homes of a model; made once, when its parameters are there.

    Args:
        shards: of the model.
        held: parameters that other parts of the engine hold, as often as they do.
    """

    def __init__(self, shards: Sequence[Shard], held: Iterable[nn.Parameter] = ()) -> None:
        self._shards = shards
        self._note = _Note()
        self._marked = False
        #: How many references of the engine, and of the modules themselves, each parameter has.
        self._ours: Counter[nn.Parameter] = Counter()
        for module in dict.fromkeys(m for shard in shards for layer in shard.layers for m in layer.modules()):
            parameters = _Noting(module._parameters, self._note)
            module.__dict__["_parameters"] = parameters
            self._ours.update(p for p in parameters.values() if p is not None)
        for shard in shards:
            self._ours.update(s.parameter for s in (*shard.own, *shard.slices))
        self._ours.update(held)
        self._ours.update(list(self._ours))  # the counter holds each one, too

    def mark(self) -> None:
        """To be called when a pass has ended and every parameter is home."""
        self._marked = self._nobody_else()
        self._note.touched = False

    def forget(self) -> None:
        """Takes the mark away: what follows may change homes."""
        self._marked = False

    def since_mark(self) -> bool:
        """Whether nobody can have written to a home since the mark; False if there is none."""
        return self._marked and not self._note.touched and self._nobody_else()

    def held_elsewhere(self, known: Counter[nn.Parameter], views: Counter[int]) -> bool:
        """Whether code outside of the engine holds parameters, their gradients or memory of their homes.

        Args:
            known: the parameters that are asked about, and how often optimizers and graphs of the model hold each.
            views: how many tensors optimizers have made of the home of each shard, by its index.
        """
        for parameter, held in known.items():
            ours = self._ours[parameter] + held + 1  # ``known`` itself
            ours += _BY_GRAPHS if native_uses(parameter) > 1 else 0
            if sys.getrefcount(parameter) - ours != _UNHELD or weakref.getweakrefcount(parameter):
                return True
            gradient = parameter.grad
            if gradient is not None and sys.getrefcount(gradient) != _UNHELD_GRADIENT:
                return True
        return any(
            storage_uses(shard.home.tensor) != 1 + len(shard.own) + views[shard.index]
            for shard in self._shards
            if shard.home is not None and shard.index in views
        )

    def _nobody_else(self) -> bool:
        for parameter, ours in self._ours.items():
            if sys.getrefcount(parameter) - ours != _UNHELD or weakref.getweakrefcount(parameter):
                return False
        return all(
            storage_uses(shard.home.tensor) == 1 + len(shard.own) for shard in self._shards if shard.home is not None
        )


def _unheld() -> int:
    """What ``sys.getrefcount`` counts in the loop above besides the references that are known, in this Python."""
    held = {nn.Parameter(torch.empty(0)): 1}
    for parameter, ours in held.items():
        return sys.getrefcount(parameter) - ours
    raise AssertionError


def _by_graphs() -> int:
    """How many references to a parameter's Python object graphs hold, however many they are, in this torch."""
    parameter = nn.Parameter(torch.ones(1))
    before = sys.getrefcount(parameter)
    output = parameter * 1.0
    after = sys.getrefcount(parameter)
    del output
    return after - before


def _unheld_gradient() -> int:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    gradient = parameter.grad
    return sys.getrefcount(gradient)


_BY_GRAPHS, _UNHELD_GRADIENT = _by_graphs(), _unheld_gradient()

#: What the counts above come to where there is nobody else: references of the expressions themselves.
_UNHELD = _unheld()
