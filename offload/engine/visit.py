"""One shard in one pass as a node of the user's graph: its backward is the end of the shard's visit.

::

    parameters (homes)  --  Visit  --  token  --  Enter (one a cell)  --  weights on the slot  --  block

``Enter`` makes views of the slot for one cell. Its backward adds the gradients of these to the sums of the visit, on
the compute device and in 32 bits at least. When all cells have run backward, autograd runs the backward of ``Visit``:
at that moment the sums leave and the slot is free.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.engine.weights import Weights
from pipe.freed import Life
from pipe.torch_private.autograd import backward_number
from pipe.torch_private.tensors import native_uses, storage_uses

__all__ = ["Visit", "enter"]

#: Called with a visit, the nodes of its trained parameters and their gradients: returns what autograd accumulates.
Leave = Callable[["Visit", Sequence[Any], list[Tensor | None]], Sequence[Tensor | None]]


class Visit:
    """What the graph of one pass knows of a shard.

    Args:
        weights: of the shard.
        uses, place: the shards of the pass that its backward uses, in the order of the forward, and this one's place.
        leave: see :data:`Leave`.
        views: makes a shard usable in backward, and returns views of the slot that holds it. Blocks have it from here:
            a model would be a cycle if they held it, and would end late.
        life: of the pass. Only what cells save for their backward holds it, so that it ends when nothing is left to do
            for the graph, which a loss that somebody keeps does not free.
        step: what observes the pass; None: nothing.
        stores: number of calls that had stored assigned data until the forward.
    """

    __slots__ = (
        "_owned", "casts", "checked", "leave", "life", "number", "place", "positions", "rewritten", "runs", "step",
        "stores", "sums", "uses", "versions", "views", "weights", "written", "wrote",
    )  # fmt: skip

    def __init__(
        self,
        weights: Weights,
        uses: Sequence[int],
        place: int,
        leave: Leave,
        views: Callable[[Visit], Sequence[Tensor]],
        life: Life,
        stores: int,
        step: Any,
    ) -> None:
        self.weights = weights
        #: Positions in :attr:`Shard.slices` of the parameters that took a gradient in the forward.
        self.positions = weights.trained
        self.versions = weights.shard.versions()
        self.uses, self.place, self.leave, self.stores = uses, place, leave, stores
        self.life = weakref.ref(life)
        self.views, self.step = views, step
        #: The last backward in which the weights were compared with those of the forward.
        self.checked = -1
        #: The number of a backward, and the gradients of its cells so far.
        self.number, self.sums = -1, list[Tensor | None]()
        self._owned: list[bool] = []
        #: Casts of weights that kept graphs of its cells have saved.
        self.casts: list[Any] = []
        #: Weights that blocks have written in this forward: their positions and earlier values.
        self.written: list[tuple[int, Tensor]] = []
        #: Number of cells so far, and for the position of each weight that cells have written in place: the last such
        #: cell, with the version of the view of the slot then.
        self.runs = 0
        self.rewritten: dict[int, tuple[int, int]] = {}
        #: Whether a block has written parameters where they rest.
        self.wrote = False

    def begin(self) -> Tensor | None:
        """The token; None where nothing is trained. The graph refers to the visit, so this does not refer to it."""
        leaves = self.weights.leaves
        parameters = [leaves[k] for k in self.positions]
        if not parameters:
            return None
        token: Tensor = _Visit.apply(self, *parameters)  # type: ignore[no-untyped-call]
        return token

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds the gradients of one cell."""
        if self.number != (now := backward_number()):
            self.number, self.sums, self._owned = now, list(gradients), [False] * len(gradients)
            return
        differentiable = torch.is_grad_enabled()
        for n, gradient in enumerate(gradients):
            before = self.sums[n]
            if gradient is None or before is None:
                self.sums[n] = gradient if before is None else before
            elif self._owned[n]:
                before.add_(gradient)
            else:
                self.sums[n] = None
                dtype = self.weights.summed_in(self.positions[n])
                if not differentiable and before.dtype == dtype and _is_held_once(before):
                    self.sums[n] = before.add_(gradient)
                else:
                    self.sums[n] = before.to(dtype) + gradient
                self._owned[n] = not differentiable

    def take(self) -> list[Tensor | None]:
        """The sums, which are forgotten."""
        nothing: list[Tensor | None] = [None] * len(self.positions)
        sums = self.sums if self.number == backward_number() else nothing
        self.number, self.sums = -1, []
        return sums

    def restore_written(self, count: int, views: Sequence[Tensor]) -> None:
        """Restores at home and in the slot, and forgets, what was written after the first ``count`` writes."""
        with torch.no_grad():
            for k, before in reversed(self.written[count:]):
                owner, s = self.weights.owners[k]
                for place in (owner.home_view(s), views[k]):
                    place.copy_(before)
        del self.written[count:]


def _is_held_once(gradient: Tensor) -> bool:
    """Whether only one variable of the caller holds a dense gradient: neither other code nor a graph.

    As autograd asks before it adds to a gradient in place. Products return views of tensors that nothing else holds.
    """
    if type(gradient) is not Tensor or gradient.layout is not torch.strided or not _is_dense(gradient):
        return False
    return _holders(gradient) == _holders_of_one(view=gradient._base is not None)


def _holders(tensor: Tensor) -> tuple[int, ...]:
    """What Python and C++ count for a tensor, its memory, and the tensor that it is a view of."""
    base = tensor._base
    of_base = () if base is None else (native_uses(base), sys.getrefcount(base))
    return storage_uses(tensor), native_uses(tensor), sys.getrefcount(tensor), *of_base


def _is_dense(tensor: Tensor) -> bool:
    """Whether elements follow one another in some order of the dimensions: no two are at one address."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _holders_of_one(*, view: bool) -> tuple[int, ...]:
    """:func:`_holders` of a tensor, or a view, that one variable holds, counted now: debuggers count."""

    def called(tensor: Tensor) -> tuple[int, ...]:
        return _holders(tensor)

    gradient = torch.empty(1, 1)
    if view:
        gradient = gradient.t()
    return called(gradient)


@functools.cache
def _nothing(device: torch.device) -> Tensor:
    # On the compute device, so that autograd runs all nodes of a visit in one thread.
    return torch.empty(0, device=device)


class _Visit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, visit: Visit, *parameters: Tensor) -> Tensor:
        ctx.visit = visit
        return _nothing(visit.weights.device).detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        visit: Visit = ctx.visit
        gradients = visit.take()
        edges = [edge for edge, _ in ctx.next_functions]
        return (None, *visit.leave(visit, edges[-len(gradients) :], gradients))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, visit: Visit, views: Sequence[Tensor], token: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.visit = visit
        return tuple([views[k].detach() for k in visit.positions])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.visit.add(gradients)
        return None, None, _nothing(ctx.visit.weights.device)


def enter(visit: Visit, views: Sequence[Tensor], token: Tensor | None) -> list[Tensor]:
    """The weights of a shard for one cell, with their graph; ``views`` are those of the slot."""
    weights = list(views)
    if token is not None:
        entered = _Enter.apply(visit, views, token)  # type: ignore[no-untyped-call]
        for k, weight in zip(visit.positions, entered, strict=True):
            weights[k] = weight
    return weights
