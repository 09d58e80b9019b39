"""The parameters that users see, and how passes of all ranks agree: here without a mesh, where nothing differs.

With a mesh it is :class:`offload.mesh.sharded.MeshParameters`.

An update may stay pending as long as every reader of its parameters asks the model for them, which finishes it first.
Code that already holds a parameter, its gradient or a view of its home (a list for an average, a NumPy array) does not
ask. So the references that exist are compared with those that the engine knows of.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.streaming.graph_references import BY_GRAPHS
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice
from pipe.torch_private.tensors import native_uses

if TYPE_CHECKING:
    from offload.mesh.ranks import Ranks
    from offload.mesh.traffic import ExchangeBytes
    from offload.streaming.optimizers import ModelOptimizer

__all__ = ["PublicParameters"]


class PublicParameters:
    """Without a mesh: users see the parameters of the layers themselves."""

    #: Whether each rank stores a part only; if so, the ranks that do together.
    sharded = False
    ranks: Ranks | None = None
    #: Host memory that collectives take, beside the slots.
    buffer_bytes = 0

    def of(self, s: Slice) -> nn.Parameter:
        """The parameter that users see for a stored one."""
        return s.parameter

    def for_autograd(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """What users' graphs hold for parameters of layers."""
        return parameters

    def recount(self, shards: Sequence[Shard], held: Iterable[nn.Parameter]) -> None:
        """Counts the engine's own references to what users see, when all homes are made.

        ``held``: parameters that other parts of the engine hold, once for each reference.
        """
        self._counted_shards = shards
        #: How many references of the engine, and of the modules themselves, each parameter has.
        self._ours: Counter[nn.Parameter] = Counter()
        for module in dict.fromkeys(m for shard in shards for layer in shard.layers for m in layer.modules()):
            self._ours.update(p for p in dict.values(module._parameters) if p is not None)
        for shard in shards:
            slices = {id(s): s for s in (*shard.own, *shard.slices)}  # a slice may be in both
            self._ours.update(s.parameter for s in slices.values())
        self._ours.update(held)
        self._ours.update(list(self._ours))  # the references of the counter itself

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """What is stored of a parameter that users see."""
        return parameter

    def replicate(self, named: Mapping[str, nn.Parameter], modules: Iterable[nn.Module]) -> None:
        """Takes the parameters of ``modules`` that do not stream, and that each process stores whole."""

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """A context in which modules hold the parameters that they compute with, around passes."""
        return contextlib.nullcontext()

    def take_settings(self) -> None:
        """Takes over ``requires_grad`` before a forward. Raises RuntimeError for hooks that would never run."""

    def take_gradients(self) -> None:
        """Takes over gradients that were set, replaced or removed."""

    def exchange_bytes(self) -> ExchangeBytes | None:
        """What ranks hold on a device of its own memory to exchange what they store; None where they do not."""
        return None

    def accumulates(self) -> contextlib.AbstractContextManager[None]:
        """A context in which each rank keeps its gradients to itself."""
        return contextlib.nullcontext()

    def drop_sums(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drops what is kept so of the gradients of some parameters."""

    def compare(self, what: str, number: float) -> list[float]:
        """The ``number`` of each rank, at a point that all of them reach: the begin of ``what``."""
        return [number]

    def held_elsewhere(self, references: Counter[nn.Parameter]) -> bool:
        """Whether code outside of the engine holds parameters, their gradients or memory of their homes.

        ``references``: the parameters to check, and how often optimizers hold each. Unclear cases count as held; the
        cost is an update that does not overlap with the next forward.
        """
        for parameter, held in references.items():
            ours = self._ours.get(parameter)
            if ours is None:
                continue  # it stays on the compute device, where updates are never pending
            ours += held + 1  # ``references`` itself
            ours += BY_GRAPHS if native_uses(parameter) > 1 else 0
            if sys.getrefcount(parameter) - ours != _UNHELD or weakref.getweakrefcount(parameter):
                return True
            gradient = parameter.grad
            if gradient is not None and sys.getrefcount(gradient) != _UNHELD_GRADIENT:
                return True
        return any(
            shard.home is not None and shard.count_home_owners() != shard.home_uses for shard in self._counted_shards
        )

    def begin_step(self, optimizer: ModelOptimizer) -> None:
        """Called at the beginning of a step."""

    def note_step(self, optimizer: ModelOptimizer) -> None:
        """Called when a step can no longer fail, before its updates become pending."""

    def local(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The stored parameters that this process counts in a norm; one process counts those that are stored whole."""
        return list(parameters)

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm of all gradients, from that of what this process stores."""
        return norm

    def show_state(self, s: Slice, state: dict[str, Any]) -> dict[str, Any]:
        """The state of an optimizer for a parameter as users see it."""
        return state

    def stored_state(self, s: Slice, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this process stores of a state that users loaded."""
        return state


def _unheld() -> tuple[int, int]:
    """What ``sys.getrefcount`` counts in the loop above besides the known references, in this Python."""
    held = {nn.Parameter(torch.ones(1)): 1}
    for parameter, ours in held.items():
        parameter.grad = torch.ones(1)
        gradient = parameter.grad
        return sys.getrefcount(parameter) - ours, sys.getrefcount(gradient)
    raise AssertionError


#: Of a parameter, and of its gradient, without other holders: references of the expressions themselves.
_UNHELD, _UNHELD_GRADIENT = _unheld()
