"""One shard in one pass as a node of the user's graph: its backward is the end of the shard's visit.

::

    parameters (homes)  --  Visit  --  tokens  --  Enter (one a cell)  --  weights on the slot  --  block

``Enter`` makes views of the slot for one cell. The tokens have shapes of weights, so autograd sums their gradients over
the cells on the compute device. When all cells have run backward, it runs the backward of ``Visit`` with the sums: at
that moment they leave and the slot is free.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.engine.weights import Weights
from pipe.freed import Life

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
        "casts", "checked", "leave", "life", "place", "positions", "rewritten", "runs", "step", "stores", "uses",
        "versions", "views", "weights", "written", "wrote",
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

    def begin(self, *, once: int, cells: int) -> Sequence[Tensor]:
        """A token for each trained parameter; ``once``, ``cells``: see :meth:`Weights.tokens`.

        The graph refers to the visit, so this does not refer to it.
        """
        if not self.positions:
            return ()
        leaves = self.weights.leaves
        tokens = self.weights.tokens(self.positions, once=once, cells=cells)
        made: Sequence[Tensor] = _Visit.apply(self, tokens, *[leaves[k] for k in self.positions])  # type: ignore[no-untyped-call]
        return made

    def restore_written(self, count: int, views: Sequence[Tensor]) -> None:
        """Restores at home and in the slot, and forgets, what was written after the first ``count`` writes."""
        with torch.no_grad():
            for k, before in reversed(self.written[count:]):
                owner, s = self.weights.owners[k]
                for place in (owner.home_view(s), views[k]):
                    place.copy_(before)
        del self.written[count:]


class _Visit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, visit: Visit, tokens: Sequence[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.visit = visit
        return tuple(map(Tensor.detach, tokens))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        visit: Visit = ctx.visit
        edges = [edge for edge, _ in ctx.next_functions]
        return (None, None, *visit.leave(visit, edges[-len(gradients) :], [*gradients]))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, visit: Visit, views: Sequence[Tensor], *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.visit = visit
        return tuple(map(Tensor.detach, [views[k] for k in visit.positions]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *gradients)


def enter(visit: Visit, views: Sequence[Tensor], tokens: Sequence[Tensor]) -> list[Tensor]:
    """The weights of a shard for one cell, with their graph; ``views`` are those of the slot."""
    weights = list(views)
    if tokens:
        visit.weights.cells += 1
        entered = _Enter.apply(visit, views, *tokens)  # type: ignore[no-untyped-call]
        for k, weight in zip(visit.positions, entered, strict=True):
            weights[k] = weight
    return weights
