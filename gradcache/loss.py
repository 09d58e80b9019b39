"""Contrastive losses (InfoNCE) over representations, whole or in tiles, on one or many processes; tiles of any loss.

``x`` holds queries, (queries, width); ``y`` holds targets, (targets, width). With ``tile_rows`` the scores of that many
queries exist at a time; the value and the gradients stay the same. Other losses (supervised, sigmoid) are cut by
:func:`tiled`.

The scores of 65,536 queries against as many targets take 17 GB, and autograd would keep them twice. But the loss is a
sum over queries. So :func:`tiled` computes it for a few queries at a time against all targets, and each tile's gradient
directly after its forward: gradients are as small as the representations, scores exist for one tile only.

Guarantees of tiles
    * Memory is O(tile_rows x targets) for the scores, forward and backward, plus one gradient per argument.
    * Every score is computed once; backward only multiplies by the gradient of the loss.
    * All tensor arguments, and other trainable leaves that the function uses (a temperature), get gradients.
    * Tiles are summed in at least 32 bits, for any type of a tile's loss; the value is rounded to that type once.

Limits of tiles: not differentiable twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from gradcache.autograd_node import Gradients, wide, with_backward
from gradcache.distributed import gather_rows, over_processes, rows_per_rank
from pipe.gradients import leaves_of
from pipe.nested import flatten, map_tensors, unflatten

__all__ = [
    "ContrastiveLossWithQueryClosure",
    "DistributedContrastiveLoss",
    "SimpleContrastiveLoss",
    "sum_by_tiles",
    "tiled",
    "with_known_gradients",
]


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

        def read(name: str | int, value: Any) -> Any:
            if not isinstance(value, Tensor) or (name != 0 and name not in cut):
                return map_tensors(_Argument, value)
            if value.dim() == 0 or value.size(0) != rows:
                raise ValueError(
                    f"expected {rows} rows in argument {name!r}, one for each row of the first, got shape "
                    f"{tuple(value.shape)}; pass equal rows, or remove it from cut=..."
                )
            return _Argument(value, is_cut=True)

        positional = [read(k, value) for k, value in enumerate((x, *others))]
        leaves, spec = flatten((positional, {name: read(name, value) for name, value in kwargs.items()}))
        arguments = [leaf for leaf in leaves if isinstance(leaf, _Argument)]
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


def _add_gradients(
    loss: Tensor, arguments: list[_Argument], captured: dict[int, _Argument], start: int, stop: int
) -> None:
    mine = {id(argument.part): argument for argument in arguments}
    leaves = list(leaves_of(loss))
    others = [leaf for leaf in leaves if id(leaf) not in mine]
    for leaf in others:
        captured.setdefault(id(leaf), _Argument(leaf))
    # Tensors that the function captured may have a graph of their own, which the next tile needs again.
    gradients = torch.autograd.grad(loss, leaves, retain_graph=bool(others), allow_unused=True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        (mine.get(id(leaf)) or captured[id(leaf)]).add(gradient, start, stop)


def sum_by_tiles(
    loss_fn: Callable[..., Tensor], tile_rows: int | None, cut: Collection[str | int], *arguments: Tensor
) -> tuple[Tensor, torch.dtype]:
    """The sum over rows of the losses that ``loss_fn`` returns for each, in at least 32 bits, and the type of these.

    ``tile_rows``, ``cut``: see :func:`tiled`; None: in one piece.
    """
    dtype = arguments[0].dtype

    def tile(*parts: Tensor) -> Tensor:
        nonlocal dtype
        losses = loss_fn(*parts)
        dtype = losses.dtype
        return losses.sum(dtype=wide(dtype))

    by_tiles = tile if tile_rows is None else tiled(tile, tile_rows=tile_rows, cut=cut, reduction="sum")
    return by_tiles(*arguments), dtype


def with_known_gradients(value: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """``value`` with a graph in which each tensor of ``pairs`` gets the gradient paired with it."""
    if not pairs:
        return value
    gradients = [gradient.to(tensor.dtype) for tensor, gradient in pairs]

    def backward(of_value: Gradients) -> Gradients:
        (factor,) = of_value
        assert factor is not None
        return [gradient * factor.to(gradient.dtype) for gradient in gradients]

    return with_backward([value], [tensor for tensor, _ in pairs], backward)[0]


#: Scores from which on a loss is cut into tiles unasked.
LARGE = 1 << 20


def _cross_entropy(x: Tensor, y: Tensor, target: Tensor, scale: float, reduction: str) -> Tensor:
    scores = x @ y.T
    return F.cross_entropy(scores if scale == 1.0 else scores * scale, target, reduction=reduction)


class SimpleContrastiveLoss:
    """Cross entropy of each query's scores against all targets.

    Args:
        n_hard_negatives: targets that follow each query's own one; ``y`` has ``1 + n_hard_negatives`` rows per query.
        tile_rows: queries whose scores exist at a time; None: all, or, of a million scores and more than there are
            representations, as many as take half the memory of these. A loss in parts is not differentiable twice.
        temperature: scores are divided by it.
        symmetric: mean of this loss and the one with queries and targets in exchanged roles.
    """

    def __init__(
        self,
        n_hard_negatives: int = 0,
        *,
        tile_rows: int | None = None,
        temperature: float = 1.0,
        symmetric: bool = False,
    ) -> None:
        if n_hard_negatives < 0:
            raise ValueError(f"expected n_hard_negatives >= 0, got {n_hard_negatives}")
        if tile_rows is not None and tile_rows < 1:
            raise ValueError(f"expected tiles of at least 1 row, got tile_rows={tile_rows}")
        if temperature <= 0:
            raise ValueError(f"expected a positive temperature, got {temperature}")
        if symmetric and n_hard_negatives:
            raise ValueError("expected one target per query for a symmetric loss, got n_hard_negatives > 0; drop one")
        self.target_per_qry = n_hard_negatives + 1
        self.tile_rows = tile_rows
        self.scale = 1.0 / temperature
        self.symmetric = symmetric

    def __call__(self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """The loss; ``target``: (queries,) indices into ``y``, by default each query's own.

        Raises:
            ValueError: if no ``target`` is given and ``y`` does not have ``1 + n_hard_negatives`` rows per query.
        """
        if not self.symmetric:
            return self._one_way(x, y, self._target(x, y, target), reduction)
        if target is not None:
            raise ValueError("expected no target for a symmetric loss: row i of x belongs to row i of y")
        own = self._target(x, y, None)
        return 0.5 * (self._one_way(x, y, own, reduction) + self._one_way(y, x, own, reduction))

    def _one_way(self, x: Tensor, y: Tensor, target: Tensor, reduction: str) -> Tensor:
        if reduction == "none" or self._rows_of_tile(x, y) is None:
            return _cross_entropy(x, y, target, self.scale, reduction)
        total, dtype = self._total(x, y, target)
        return (total / (target >= 0).sum() if reduction == "mean" else total).to(dtype)

    def _total(self, x: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, torch.dtype]:
        """The sum over queries, in at least 32 bits, and the dtype of the loss."""
        # Summed, not averaged, per tile: cross_entropy excludes ignored rows (target -100) from its mean.
        per_query = partial(_cross_entropy, scale=self.scale, reduction="none")
        return sum_by_tiles(per_query, self._rows_of_tile(x, y), (2,), x, y, target)

    def _rows_of_tile(self, x: Tensor, y: Tensor) -> int | None:
        """Queries whose scores exist at a time; None: all."""
        scores, given = x.size(0) * y.size(0), x.numel() + y.numel()
        if self.tile_rows is not None or scores < max(LARGE, given) or torch.compiler.is_compiling():
            return self.tile_rows
        return max(given // (2 * y.size(0)), 1)

    def _target(self, x: Tensor, y: Tensor, target: Tensor | None) -> Tensor:
        if target is not None:
            return target
        if x.size(0) * self.target_per_qry != y.size(0):
            raise ValueError(
                f"expected {self.target_per_qry} targets per query, got {x.size(0)} queries and {y.size(0)} targets; "
                f"pass target=..., or set n_hard_negatives"
            )
        return torch.arange(0, y.size(0), self.target_per_qry, device=x.device)


class ContrastiveLossWithQueryClosure(SimpleContrastiveLoss):
    """The same loss, with queries that a closure may compute inside it, with a graph.

    For a query encoder that fits in memory without chunks: only the targets use the gradient cache.
    """

    def __call__(  # type: ignore[override]
        self,
        *reps: Tensor,
        query_closure: Callable[[], Tensor] | None = None,
        target: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Takes queries and targets, or targets and ``query_closure``.

        Raises:
            ValueError: for another number of representations, or if queries are given twice or not at all.
        """
        if len(reps) == 2 and query_closure is None:
            return super().__call__(reps[0], reps[1], target=target, reduction=reduction)
        if len(reps) == 1 and query_closure is not None:
            return super().__call__(query_closure(), reps[0], target=target, reduction=reduction)
        raise ValueError(
            f"expected 2 representations, or 1 and a query_closure, got {len(reps)} and "
            f"query_closure={'None' if query_closure is None else 'a function'}"
        )


class DistributedContrastiveLoss(SimpleContrastiveLoss):
    """The loss over the rows of all processes; each process computes the rows of its own queries.

    Targets are gathered once. Every process returns the value of the big batch. The gradient is scaled so that
    *averaging* parameter gradients over processes, as DistributedDataParallel and :class:`gradcache.GradCache` do,
    gives the big batch's gradient; without this scale, each process's own part of a full matrix would give 1/world of
    it.

    Processes may have different numbers of rows.
    """

    def __init__(
        self,
        n_hard_negatives: int = 0,
        *,
        tile_rows: int | None = None,
        temperature: float = 1.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("expected an initialised process group; call torch.distributed.init_process_group() first")
        super().__init__(n_hard_negatives, tile_rows=tile_rows, temperature=temperature)
        self.group = group

    def __call__(self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """The big batch's loss, from this process's queries and targets.

        Args:
            x: this process's queries.
            y: this process's targets.
            target: indices into this process's ``y``; or, with one entry for every query of all processes, into the
                targets of all processes in rank order.
            reduction: ``"mean"``, ``"sum"``, or ``"none"`` for this process's queries one by one, not scaled.
        """
        if target is None:
            target = self._target(x, y, None)
        rank = dist.get_rank(self.group)
        counted = int((target >= 0).sum())
        sizes = rows_per_rank(x.size(0), y.size(0), counted, target.size(0), device=x.device, group=self.group)
        local = all(queries == entries for queries, _, _, entries in sizes)  # one process may have all queries
        if local:
            target = torch.where(target >= 0, target + sum(rows for _, rows, *_ in sizes[:rank]), target)
        else:
            start = sum(rows for rows, *_ in sizes[:rank])
            target = target[start : start + x.size(0)]
        gathered = gather_rows(y, [rows for _, rows, *_ in sizes], self.group)
        if reduction == "none":
            return self._one_way(x, gathered, target, "none")
        mine, dtype = self._total(x, gathered, target)
        total = sum(n for _, _, n, _ in sizes) if local else counted
        return over_processes(mine, total if reduction == "mean" else 1, dtype, self.group)
