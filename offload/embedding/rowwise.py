"""Adagrad with one state value per row, for embedding tables larger than memory.

Adagrad and Adam store one or two more tables of the size of the table. Here the squared gradients of a row are averaged
before they are summed, so the state has ``num_embeddings`` values, and a step reads and writes only rows with a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["RowWiseAdagrad"]


class RowWiseAdagrad(torch.optim.Optimizer):
    """For parameters ``(rows, columns)`` with sparse gradients.

    ``sum[r] += mean(grad[r] ** 2);  weight[r] -= lr * grad[r] / (sqrt(sum[r]) + eps)``

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        eps: keeps the first step of a row finite.

    Raises:
        ValueError: for a learning rate or eps below 0.
        TypeError: in ``step``, for a gradient that is not sparse; nothing was changed then.

    Source: rowwise Adagrad of fbgemm (Meta), after Duchi et al., 2011.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 0.01, eps: float = 1e-8
    ) -> None:
        if lr < 0 or eps < 0:
            raise ValueError(f"expected lr and eps of at least 0, got lr={lr}, eps={eps}")
        super().__init__(params, {"lr": lr, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with states of zeros: a checkpoint can be loaded before the first step."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter] = {"sum": torch.zeros(len(parameter), dtype=torch.float32, device=parameter.device)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the rows that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, parameter in pairs:
            if not parameter.grad.is_sparse:
                raise TypeError(
                    f"expected a sparse gradient, got a dense one for a parameter of shape {tuple(parameter.shape)}; "
                    f"give dense parameters an optimizer of their own"
                )
        for group, parameter in pairs:
            grad = parameter.grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            sums = self.state[parameter]["sum"].index_add_(0, rows, values.float().square().flatten(1).mean(1))
            scale = sums[rows].sqrt_().add_(group["eps"]).reciprocal_().mul_(-group["lr"])
            parameter.index_add_(0, rows, (values * scale.to(values.dtype).unsqueeze(1)))
        return loss
