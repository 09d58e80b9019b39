"""One shard in one pass as a node of the user's graph: its backward is the end of the shard's visit.

::

    parameters (homes)  --  Visit  --  handles  --  Enter (one a cell)  --  weights on the slot  --  block

A handle has the shape and type of a parameter, but no memory. ``Enter`` turns the handles of a shard into views of the
slot for one cell, and its backward passes on the gradients of these. Autograd sums the gradients of all cells on the
compute device, in the handle's type: 16-bit weights have 32-bit sums. When all cells have run backward, autograd runs
the backward of ``Visit``: at that moment gradients leave and the slot is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.core.weights import Weights
from pipe.freed import Life

__all__ = ["Visit", "enter"]

#: Called with a visit and the gradients of its trained parameters; returns those that autograd accumulates.
Leave = Callable[["Visit", Sequence[Any], Sequence[Tensor | None]], Sequence[Tensor | None]]


class Visit:
    """What the graph of one pass knows of a shard.

    Args:
        weights: of the shard.
        uses, place: the shards of the pass in the order of their use, and this one's place there.
        leave: see :data:`Leave`.
        life: of the pass.
    """

    __slots__ = ("checked", "leave", "life", "place", "positions", "stores", "uses", "versions", "weights", "written")

    def __init__(
        self, weights: Weights, uses: Sequence[int], place: int, leave: Leave, life: Life, stores: int
    ) -> None:
        self.weights = weights
        #: Positions in :attr:`Shard.slices` of the parameters that took a gradient in the forward.
        self.positions = weights.trained
        self.versions = weights.shard.versions()
        self.uses, self.place, self.leave, self.life = uses, place, leave, life
        #: Number of calls that had stored assigned data until the forward; and the last backward that was checked.
        self.stores, self.checked = stores, -1
        #: Weights that blocks have written in this forward: their positions and earlier values.
        self.written: list[tuple[int, Tensor]] = []

    def begin(self, device: torch.device) -> Sequence[Tensor]:
        """The handles. The graph refers to the visit, so the visit does not refer to them."""
        parameters = [self.weights.shard.slices[k].parameter for k in self.positions]
        if not parameters:
            return ()
        handles: tuple[Tensor, ...] = _Visit.apply(self, device, *parameters)  # type: ignore[no-untyped-call]
        return handles

    def restore_written(self, count: int, views: Sequence[Tensor]) -> None:
        """Restores in the slot, and forgets, what was written after the first ``count`` writes."""
        with torch.no_grad():
            for k, before in reversed(self.written[count:]):
                views[k].copy_(before)
        del self.written[count:]


class _Visit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, visit: Visit, device: torch.device, *parameters: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.visit = visit
        types = [visit.weights.summed_in(k) for k in visit.positions]
        return tuple(
            [
                torch.empty_strided(p.shape, (0,) * len(p.shape), dtype=dtype, device=device)
                for p, dtype in zip(parameters, types, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        visit: Visit = ctx.visit
        edges = [edge for edge, _ in ctx.next_functions]
        return (None, None, *visit.leave(visit, edges[-len(gradients) :], gradients))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, views: Sequence[Tensor], *handles: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([view.detach() for view in views])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, *gradients)  # autograd converts them to the types of the handles


def enter(visit: Visit, views: Sequence[Tensor], handles: Sequence[Tensor]) -> list[Tensor]:
    """The weights of a shard for one cell, with their graph; ``views`` are those of the slot."""
    weights = list(views)
    if handles:
        positions = visit.positions
        entered = _Enter.apply([views[k] for k in positions], *handles)  # type: ignore[no-untyped-call]
        for k, weight in zip(positions, entered, strict=True):
            weights[k] = weight
    return weights
