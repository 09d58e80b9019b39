"""Contrastive losses over representations of all rows: query i belongs to the target that stands for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ContrastiveLossWithQueryClosure", "SimpleContrastiveLoss"]


class SimpleContrastiveLoss:
    """Cross entropy of each query's scores against all targets.

    Args:
        n_hard_negatives: targets that follow each query's own one; ``y`` has ``1 + n_hard_negatives`` rows per query.
    """

    def __init__(self, n_hard_negatives: int = 0) -> None:
        if n_hard_negatives < 0:
            raise ValueError(f"expected n_hard_negatives >= 0, got {n_hard_negatives}")
        self.target_per_qry = n_hard_negatives + 1

    def __call__(self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """``x``: (queries, width), ``y``: (targets, width), ``target``: (queries,) indices into ``y``.

        Raises:
            ValueError: if no ``target`` is given and ``y`` does not have ``1 + n_hard_negatives`` rows per query.
        """
        return F.cross_entropy(x @ y.T, self._target(x, y, target), reduction=reduction)

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
    """The same loss where the queries may be computed inside it, by a closure, with their graph.

    For a query encoder that fits in memory as it is: only the targets go through the cache.
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
            ValueError: for another number of representations, or if queries come from both or from nowhere.
        """
        if len(reps) == 2 and query_closure is None:
            return super().__call__(reps[0], reps[1], target=target, reduction=reduction)
        if len(reps) == 1 and query_closure is not None:
            return super().__call__(query_closure(), reps[0], target=target, reduction=reduction)
        raise ValueError(
            f"expected 2 representations, or 1 and a query_closure, got {len(reps)} and "
            f"query_closure={'None' if query_closure is None else 'a function'}"
        )
