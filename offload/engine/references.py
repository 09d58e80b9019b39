"""Detects by reference counts whether other code holds parameters of a model, and so can read them at any time.

An update may stay pending as long as every reader of its parameters asks the model for them, which finishes it first.
Code that already holds a parameter, its gradient or a view of its home (a list for an average, a NumPy array) does not
ask. So the references that exist are compared with those that the engine knows of.

Unclear cases count as held; the cost is an update that does not overlap with the next forward.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from offload.streaming.graph_references import BY_GRAPHS
from offload.streaming.shard import Shard
from pipe.torch_private.tensors import native_uses

__all__ = ["References"]


class References:
    """The engine's own references to the parameters of a model; counted once, when all homes are made.

    ``held``: parameters that other parts of the engine hold, once for each reference.
    """

    def __init__(self, shards: Sequence[Shard], held: Iterable[nn.Parameter] = ()) -> None:
        self._shards = shards
        #: How many references of the engine, and of the modules themselves, each parameter has.
        self._ours: Counter[nn.Parameter] = Counter()
        for module in dict.fromkeys(m for shard in shards for layer in shard.layers for m in layer.modules()):
            self._ours.update(p for p in dict.values(module._parameters) if p is not None)
        for shard in shards:
            slices = {id(s): s for s in (*shard.own, *shard.slices)}  # a slice may be in both
            self._ours.update(s.parameter for s in slices.values())
        self._ours.update(held)
        self._ours.update(list(self._ours))  # the references of the counter itself

    def held_elsewhere(self, known: Counter[nn.Parameter]) -> bool:
        """Whether code outside of the engine holds parameters, their gradients or memory of their homes.

        ``known``: the parameters to check, and how often optimizers and graphs of the model hold each.
        """
        for parameter, held in known.items():
            ours = self._ours.get(parameter)
            if ours is None:
                continue  # it stays on the compute device, where updates are never pending
            ours += held + 1  # ``known`` itself
            ours += BY_GRAPHS if native_uses(parameter) > 1 else 0
            if sys.getrefcount(parameter) - ours != _UNHELD or weakref.getweakrefcount(parameter):
                return True
            gradient = parameter.grad
            if gradient is not None and sys.getrefcount(gradient) != _UNHELD_GRADIENT:
                return True
        return any(shard.home is not None and shard.count_home_owners() != shard.home_uses for shard in self._shards)


def _unheld() -> int:
    """How many references ``sys.getrefcount`` counts in the loop above besides the known ones, in this Python."""
    held = {nn.Parameter(torch.empty(0)): 1}
    for parameter, ours in held.items():
        return sys.getrefcount(parameter) - ours
    raise AssertionError


def _unheld_gradient() -> int:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    gradient = parameter.grad
    return sys.getrefcount(gradient)


_UNHELD_GRADIENT = _unheld_gradient()

#: The count above without other holders: references of the expressions themselves.
_UNHELD = _unheld()
