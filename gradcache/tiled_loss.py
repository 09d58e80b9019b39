"""Computes a loss over all pairs of rows in tiles, so that the matrix of all scores is never in memory.

The scores of 65,536 queries against as many targets take 17 GB, and autograd would keep them twice. But the loss is a
sum over queries. So it is computed for a few queries at a time against all targets, and each tile's gradient is
computed directly after its forward: gradients are as small as the representations, scores exist for one tile only.

Guarantees
    * Memory is O(tile_rows x targets) for the scores, forward and backward, plus one gradient per argument.
    * Every score is computed once; backward only multiplies by the gradient of the loss.
    * All tensor arguments, and other trainable leaves that the function uses (a temperature), get gradients.
    * Tiles are summed in at least 32 bits, for any type of a tile's loss; the value is rounded to that type once.

Limits: not differentiable twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gradcache.autograd_node import Gradients, with_backward
from gradcache.used_modules import leaves_of
from pipe.nested import flatten, map_tensors, unflatten

__all__ = ["tiled", "wide", "with_known_gradients"]


def tiled(
    loss_fn: Callable[..., Tensor], *, tile_rows: int, cut: Collection[str | int] = (), reduction: str = "mean"
) -> Callable[..., Tensor]:
    """The same loss, computed for ``tile_rows`` rows of its first argument at a time.

    Args:
        loss_fn: ``loss_fn(x, *others, **kwargs)``; its value is the mean (or the sum) over the rows of ``x`` of terms
            that depend on that row, and on all of the other arguments.
        tile_rows: rows of ``x`` in a tile.
        cut: further arguments that have one row per row of ``x``, such as ``"target"``, by name or by position.
        reduction: the reduction of ``loss_fn`` over rows, ``"mean"`` or ``"sum"``.

    Raises:
        ValueError: if an argument that is cut has another number of rows than ``x``, or a tile's loss is no scalar.
    """
    if tile_rows < 1:
        raise ValueError(f"expected tiles of at least 1 row, got tile_rows={tile_rows}")
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"expected reduction 'mean' or 'sum', got {reduction!r}; weight rows inside loss_fn and sum them"
        )

    @wraps(loss_fn, updated=())
    def by_tiles(x: Tensor, *others: Any, **kwargs: Any) -> Tensor:
        rows = x.size(0)
        arguments: list[_Argument] = []

        def argument(tensor: Tensor, is_cut: bool = False) -> _Argument:
            arguments.append(_Argument(tensor, is_cut))
            return arguments[-1]

        def read(name: str | int, value: Any) -> Any:
            if not isinstance(value, Tensor) or (name != 0 and name not in cut):
                return map_tensors(argument, value)
            if value.dim() == 0 or value.size(0) != rows:
                raise ValueError(
                    f"expected {rows} rows in argument {name!r}, one for each row of the first, got shape "
                    f"{tuple(value.shape)}; pass equal rows, or remove it from cut=..."
                )
            return argument(value, is_cut=True)

        positional = [read(k, value) for k, value in enumerate((x, *others))]
        leaves, spec = flatten((positional, {name: read(name, value) for name, value in kwargs.items()}))
        total: Tensor | None = None
        captured: dict[int, _Argument] = {}
        for start in range(0, max(rows, 1), tile_rows):
            stop = min(start + tile_rows, rows)
            parts = [leaf.cut_to(start, stop) if isinstance(leaf, _Argument) else leaf for leaf in leaves]
            args, keywords = unflatten(parts, spec)
            loss = loss_fn(*args, **keywords)
            if loss.numel() != 1:
                raise ValueError(f"expected a scalar loss of a tile, got shape {tuple(loss.shape)}; reduce it")
            value = loss.detach().to(wide(loss.dtype))
            if reduction == "mean":
                share = (stop - start) / max(rows, 1)
                value, loss = value * share, loss * share
            total = value if total is None else total + value
            if loss.requires_grad:
                _add_gradients(loss, arguments, captured, start, stop)
        assert total is not None
        found = [*arguments, *captured.values()]
        return with_known_gradients(
            total.to(loss.dtype), [(each.tensor, each.gradient) for each in found if each.gradient is not None]
        )

    return by_tiles


class _Argument:
    """A tensor that the loss reads, the part of it in the current tile, and its gradient so far."""

    def __init__(self, tensor: Tensor, is_cut: bool = False) -> None:
        self.tensor = tensor
        self.is_cut = is_cut
        self.part = tensor
        self.gradient: Tensor | None = None

    def cut_to(self, start: int, stop: int) -> Tensor:
        """A leaf with the rows of a tile (all rows, if the argument is not cut)."""
        part = self.tensor.detach()
        part = part[start:stop] if self.is_cut else part
        self.part = part.requires_grad_(torch.is_grad_enabled() and self.tensor.requires_grad)
        return self.part

    def add(self, gradient: Tensor | None, start: int, stop: int) -> None:
        """Adds the gradient of a tile. Sums over tiles are kept in at least 32 bits."""
        if gradient is None:
            return
        if self.is_cut:
            if self.gradient is None:
                self.gradient = torch.zeros_like(self.tensor)
            self.gradient[start:stop] = gradient
        elif self.gradient is None:
            self.gradient = gradient.to(wide(gradient.dtype))
        else:
            self.gradient += gradient


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a type are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _add_gradients(
    loss: Tensor, arguments: list[_Argument], captured: dict[int, _Argument], start: int, stop: int
) -> None:
    wanted = [argument for argument in arguments if argument.part.requires_grad]
    known = {id(argument.part) for argument in wanted}
    others = [leaf for leaf in leaves_of(loss) if id(leaf) not in known]
    for leaf in others:
        captured.setdefault(id(leaf), _Argument(leaf))
    wanted += [captured[id(leaf)] for leaf in others]
    # Tensors that the function captured may have a graph of their own, which the next tile needs again.
    gradients = torch.autograd.grad(
        loss, [argument.part for argument in wanted], retain_graph=bool(others), allow_unused=True
    )
    for argument, gradient in zip(wanted, gradients, strict=True):
        argument.add(gradient, start, stop)


def with_known_gradients(value: Tensor, known: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """``value`` with a graph in which each tensor of ``known`` gets the gradient paired with it."""
    if not known:
        return value
    gradients = [gradient.to(tensor.dtype) for tensor, gradient in known]

    def backward(of_value: Gradients) -> Gradients:
        (factor,) = of_value
        assert factor is not None
        return [gradient * factor.to(gradient.dtype) for gradient in gradients]

    return with_backward([value], [tensor for tensor, _ in known], backward)[0]
