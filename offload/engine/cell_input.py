"""The first node of a cell's graph: receives the gradients of the boundary from autograd.

Not a plain leaf, since autograd stores a leaf's gradient in the leaf's own layout: a copy, and the layer before would
sum a gradient of another layout than in the bare model, in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipe.phony import get_phony
from pipe.torch_private.autograd import will_run

__all__ = ["CellInput", "used_outside"]


def used_outside(shard: int) -> RuntimeError:
    """The error for a backward that enters the graph of a cell from outside."""
    return RuntimeError(
        f"a loss depends on an activation inside shard {shard} of an OffloadModel (an attribute that a layer keeps, a "
        f"tensor that a hook took), which is not an output of the model: its graph ends within the shard, so the "
        f"gradients of the layers before it would be missing. Return it as an output, through the layers after it; or "
        f"detach it if it is only read"
    )


class _Arrivals:
    """Receives the gradients of a cell's input from autograd.

    Not the input itself: that refers to the node, and the node refers to this. Such a cycle would live until a garbage
    collection, and a weak reference of a node may be lost in one (:mod:`pipe.freed`).
    """

    __slots__ = ("gradients", "open", "shard")

    def __init__(self, shard: int, count: int) -> None:
        self.shard = shard
        #: Whether the running backward is that of the cell.
        self.open = False
        self.gradients: tuple[Tensor | None, ...] = (None,) * count


class CellInput:
    """The begin of one cell's graph, for a flat boundary of which some leaves require a gradient."""

    def __init__(self, leaves: Sequence[Any], requires: Sequence[bool], shard: int) -> None:
        # A tensor that occurs more than once is one tensor in the cell as well, with one gradient.
        first: dict[int, int] = {}
        same_as = [first.setdefault(id(x), k) if isinstance(x, Tensor) else k for k, x in enumerate(leaves)]
        self._positions = [k for k, wanted in enumerate(requires) if wanted and same_as[k] == k]
        self._arrivals = _Arrivals(shard, len(self._positions))
        #: The boundary, as a part of the cell's graph.
        self.leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        if self._positions:
            tensors = [self.leaves[k] for k in self._positions]
            with torch.enable_grad():
                phony = get_phony(tensors[0].device, requires_grad=True)
                results = _Begin.apply(self._arrivals, phony, *tensors)  # type: ignore[no-untyped-call]
            for k, result in zip(self._positions, results, strict=True):
                self.leaves[k] = result
        self.leaves = [self.leaves[k] for k in same_as]

    @property
    def positions(self) -> list[int]:
        """The positions of the tensors that need a gradient."""
        return self._positions

    @property
    def wanted(self) -> list[Tensor]:
        """The tensors that need a gradient."""
        return [self.leaves[k] for k in self._positions]

    def refuse_other_ways(self, outputs: Sequence[Any]) -> None:
        """Raises RuntimeError if the running backward also enters the kept graph of a cell from outside.

        To be called before the backward of the cell, which frees the graph. ``outputs``: of the cell, flat.
        """
        wanted = self.wanted[:1]  # every path into the graph leads to them
        if any(will_run(tensor.grad_fn) for tensor in wanted) or (not wanted and any(map(will_run, _nodes(outputs)))):
            raise used_outside(self._arrivals.shard)

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """A context for the backward of the cell; outside of it, a gradient that arrives is an error."""
        self._arrivals.open = True
        try:
            yield
        finally:
            self._arrivals.open = False

    def reaches(self, outputs: Sequence[Any], own: Iterable[Tensor]) -> tuple[list[nn.Parameter], bool]:
        """What the graph of a cell's flat ``outputs`` reaches beside this begin and the parameters ``own``.

        Returns:
            Other parameters; and whether it also reaches other graphs, of tensors that code outside has computed.
        """
        begin = self.wanted[0].grad_fn if self._positions else None
        known = {id(p) for p in own}
        left = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
        seen, others = set(left), []
        while left:
            node = left.pop()
            variable = None if node.next_functions else getattr(node, "variable", None)
            if isinstance(variable, nn.Parameter) and id(variable) not in known:
                others.append(variable)
            if node is begin:
                continue
            if type(node).__name__ == "_BeginBackward":
                return others, True
            new = {following for following, _ in node.next_functions if following is not None} - seen
            seen |= new
            left += new
        return others, False

    def take(self, gradients: Sequence[Tensor | None] | None = None) -> list[Tensor | None]:
        """One gradient or None for each leaf: those received here, or ``gradients`` of the ``wanted`` tensors."""
        arrived = self._arrivals.gradients if gradients is None else gradients
        self._arrivals.gradients = (None,) * len(self._positions)
        back: list[Tensor | None] = [None] * len(self.leaves)
        for k, gradient in zip(self._positions, arrived, strict=True):
            back[k] = gradient
        return back


def _nodes(outputs: Sequence[Any]) -> Iterator[Any]:
    """The nodes of a graph, without those of leaves."""
    left = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None and following not in seen}
        seen |= new
        left += [following for following in new if following.next_functions]


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arrivals: _Arrivals, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.arrivals = arrivals
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        arrivals: _Arrivals = ctx.arrivals
        if not arrivals.open:  # nor ever open where the forward kept no graph
            raise used_outside(arrivals.shard)
        arrivals.gradients = gradients
        return (None,) * (2 + len(gradients))
