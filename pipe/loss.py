"""Computes the weight of each micro-batch's loss, such that the weighted losses add up to the loss of the batch.

A loss divides a sum over rows by a number: of rows, of elements, of tokens without padding, or of class weights. The
loss of the batch divides by that number for the whole batch. So the weight of a micro-batch is its share of the number,
which is known before the first layer runs:

* The losses of ``torch.nn`` and ``torch.nn.functional`` declare their reduction, in an attribute or a keyword
  argument, ``functools.partial`` included. The weight of a sum is 1. The weight of a mean is the share of rows, which
  is also the share of elements.
* Cross entropy and negative log likelihood divide by a number that depends on the targets: the number of targets other
  than ``ignore_index``, or the sum of their class weights. Where the divisor of a micro-batch is 0, its loss counts as
  0 (the mean over no targets is NaN).
* Any other loss declares its reduction by ``reduction=``, or returns a pair ``(sum, count)``: the loss of the batch is
  the sum of the sums over the sum of the counts.

Invariant: the weighted losses of micro-batches add up to the loss of the batch, or :class:`ValueError` names
``reduction=``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, RUF100

__all__ = ["LossFn", "MicroLoss", "micro_losses"]

LossFn = Callable[[Any, Any], Any]

#: Losses of torch whose divisor depends on the targets.
_BY_TARGETS = nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, F.cross_entropy, F.nll_loss
_OF_TORCH = nn.MSELoss.forward.__module__, F.mse_loss.__module__
#: Options of losses that are not torch's, whose mean may not be that over all rows.
_LEAVE_OUT_ROWS = "ignore_index", "padding_idx", "pad_token_id", "weight", "mask"


@dataclass(frozen=True)
class MicroLoss:
    """The loss of one micro-batch."""

    function: LossFn
    weight: float | None
    """Its weight in the loss of the batch; None if it depends on what the function returns."""
    alone: bool = False
    """Whether it is that of the whole batch."""

    def of(self, output: Any, target: Any) -> tuple[Tensor, Tensor | float | None]:
        """The weighted loss, 0-dimensional, and what it is still to be divided by, if it depends on what is returned.

        Raises:
            ValueError: if it is no loss, or does not tell what it divides by.
        """
        returned = self.function(output, target)
        pair = self.weight is None and isinstance(returned, tuple) and len(returned) == 2
        count: Any
        loss, count = returned if pair else (returned, None)
        counted = isinstance(count, (int, float)) or (_is_one_element(count) and not count.requires_grad)
        if not _is_one_element(loss) or (pair and not counted):
            raise ValueError(
                f"expected loss_fn to return a tensor of one element, or, without reduction=, (sum, count) with a "
                f"number or a detached tensor of one element as the count, got {_described(returned)}; reduce the loss"
            )
        if not loss.requires_grad:
            raise ValueError("expected a loss that needs a gradient, got one that does not; is anything trainable?")
        if self.weight is None and count is None and not self.alone:
            name = getattr(self.function, "__qualname__", None) or type(self.function).__name__
            raise ValueError(
                f"expected a loss that tells what it divides by, got {name}, which returns one number for each of "
                f"several micro-batches; pass reduction='mean' if that is the mean over rows, reduction='sum' if it is "
                f"the sum, or return (sum, count)"
            )
        loss = loss.reshape(()) if loss.dim() else loss
        count = count.reshape(()) if isinstance(count, Tensor) else count
        return loss if self.weight in (None, 1.0) else loss * self.weight, count


def micro_losses(
    loss_fn: LossFn, reduction: str | None, targets: Sequence[Any], rows: Sequence[int]
) -> list[MicroLoss]:
    """The loss of each micro-batch, with its weight.

    Args:
        loss_fn: ``loss_fn(output, target)``.
        reduction: ``"mean"`` or ``"sum"`` over rows, or None for the reduction that the loss declares.
        targets: of each micro-batch. Where the divisor depends on them, their values are read; on an accelerator this
            waits until they are computed.
        rows: of each micro-batch.
    """
    if reduction is None and len(rows) == 1:
        return [MicroLoss(loss_fn, None, alone=True)]  # whatever it divides by, its loss is that of the batch
    declared, divided_by, options = _declared(loss_fn)
    kind = _kind(declared if reduction is None else reduction)
    if divided_by is not None and _kind(declared) != kind:
        raise ValueError(
            f"expected reduction={_kind(declared)!r} as the loss itself declares, got reduction={reduction!r}; leave "
            f"out the argument, or change the loss"
        )
    if kind is None:
        return [MicroLoss(loss_fn, None) for _ in rows]
    if kind == "sum" or len(rows) == 1:
        return [MicroLoss(loss_fn, 1.0) for _ in rows]
    suspects = [name for name in _LEAVE_OUT_ROWS if options.get(name) is not None]
    if reduction is None and divided_by is None and suspects:
        raise ValueError(
            f"expected a loss that says what it divides by, got one of reduction='mean' with {', '.join(suspects)}; "
            f"pass reduction='mean' if it is the mean over all rows, reduction='sum' with a sum, or return "
            f"(sum, count)"
        )
    divisors: Sequence[float] = rows
    # Class probabilities are no indices: the mean is over rows.
    if divided_by == "targets" and all(isinstance(x, Tensor) and not x.is_floating_point() for x in targets):
        weight, ignored = options.get("weight"), options.get("ignore_index", -100)
        divisors = torch.stack([_divisor(target, weight, ignored) for target in targets]).tolist()
        if not any(divisors):
            divisors = rows  # all targets are ignored: the loss is NaN, as for the whole batch
    total = sum(divisors) or 1
    return [MicroLoss(loss_fn if d else _nothing, d / total) for d in divisors]


def _nothing(output: Tensor, target: Any) -> Tensor:
    """The loss of a micro-batch without a target: 0, where the mean is NaN."""
    return output.flatten()[:0].sum()


def _is_one_element(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _kind(reduction: str | None) -> str | None:
    """``"mean"`` or ``"sum"``, or None."""
    kind = "mean" if reduction == "batchmean" else reduction
    if kind not in ("mean", "sum", None):
        raise ValueError(
            f"expected a loss that reduces rows by 'mean' or 'sum', got reduction={reduction!r}; reduce the loss"
        )
    return kind


def _divisor(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """The divisor of the mean over ``target`` (class indices of any shape)."""
    kept = target != ignored
    if weight is None:
        return kept.sum().double()
    weights = weight.detach().to(target.device).double()
    return (weights[target.masked_fill(~kept, 0).long()] * kept).sum()


def _declared(loss_fn: Any) -> tuple[str | None, str | None, Mapping[str, Any]]:
    """The reduction that a loss declares; whether the divisor of a loss of torch depends on its ``"targets"`` or
    ``"rows"``, or None if that is not known; its attributes or keyword arguments.
    """
    loss_fn, keywords = _uncompiled(loss_fn), dict[str, Any]()
    if isinstance(loss_fn, functools.partial):
        keywords, given = loss_fn.keywords, loss_fn.args
        loss_fn = _uncompiled(loss_fn.func)
        if given or isinstance(loss_fn, nn.Module) or {"size_average", "reduce"} & keywords.keys():
            return None, None, {}
    if isinstance(loss_fn, nn.Module):
        function = None if "forward" in vars(loss_fn) else type(loss_fn).forward
        options = {**vars(loss_fn), **loss_fn._buffers, **loss_fn._parameters}
    else:
        function, options = loss_fn, {**_defaults(loss_fn), **keywords}
    reduction = options.get("reduction", getattr(loss_fn, "reduction", None))
    wraps = hasattr(function, "__wrapped__") or inspect.ismethod(function)
    of_torch = getattr(function, "__module__", None) in _OF_TORCH and not wraps
    by = "targets" if function in _BY_TARGETS else "rows" if of_torch and "ignore_index" not in options else None
    return reduction if isinstance(reduction, str) else None, by, options


def _uncompiled(loss_fn: Any) -> Any:
    """The loss behind ``torch.compile``."""
    return getattr(loss_fn, "_orig_mod", getattr(loss_fn, "_torchdynamo_orig_callable", loss_fn))


def _defaults(function: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}
