"""Refuses optimizers that update inside backward where they would update with an incomplete gradient.

Such an optimizer steps as soon as a gradient has been accumulated. That is too early in three cases: the gradient is
one part of an accumulation window (``grad_accum``), it is scaled (fp16), or it is that of one micro-batch of several.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipe.pipe import Pipe

__all__ = ["refuse_updates_between_micro_batches", "refuse_updates_in_backward"]


def refuse_updates_in_backward(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], because: str, *, deferred: bool = False
) -> None:
    """Refuses optimizers that update inside backward, among ``optimizers`` and in parameter hooks of ``model``.

    Args:
        model: its parameters and modules are searched.
        optimizers: those of the pipeline.
        because: for the error, what makes gradients incomplete: ``f"this pipeline {because}"``.
        deferred: whether optimizers with an ``accumulate()`` context are allowed, because the caller enters it.
    """
    reasons = [
        f"{type(optimizer).__name__}(update_in_backward=True)"
        for optimizer in optimizers
        if getattr(optimizer, "update_in_backward", False) and not (deferred and hasattr(optimizer, "accumulate"))
    ]
    reasons += _at_parameters(model)
    for name, module in model.named_modules():
        fused = getattr(module, "fused_optimizer", None)
        if fused is not None and len(getattr(fused, "params", ())):
            reasons.append(f"module {name!r} (fused optimizer)")
    _refuse(reasons, because)


def refuse_updates_between_micro_batches(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """The same for each :class:`~pipe.pipe.Pipe` in ``model`` that runs several micro-batches in one backward."""
    for module in model.modules():
        if isinstance(module, Pipe) and module.chunks > 1:
            own = {id(parameter) for parameter in module.parameters()}
            reasons = [
                f"{type(optimizer).__name__}(update_in_backward=True)"
                for optimizer in optimizers
                if getattr(optimizer, "update_in_backward", False)
                and any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
            ]
            if module.checkpoint != "never":  # else autograd sums over micro-batches before it calls any hook
                reasons += _at_parameters(module)
            _refuse(reasons, f"runs micro-batches inside each backward (Pipe(chunks={module.chunks}))")


def _at_parameters(model: nn.Module) -> list[str]:
    found = []
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_in_backward_optimizers", None):
            found.append(f"parameter {name!r} (apply_optimizer_in_backward)")
        elif any(map(_may_update, (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())):
            found.append(f"parameter {name!r} (register_post_accumulate_grad_hook)")
    return found


def _may_update(hook: Any) -> bool:
    """Whether a hook on an accumulated gradient may be an optimizer: all except those of torch.distributed."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _refuse(reasons: list[str], because: str) -> None:
    if reasons:
        raise ValueError(
            f"expected no optimizer that updates inside backward, because this pipeline {because} and such an "
            f"optimizer would update before the gradient is complete, got: {', '.join(reasons[:8])}"
            f"{f' and {len(reasons) - 8} more' if len(reasons) > 8 else ''}; step them after backward (for torchrec: "
            f"the dense compute kernel), or train without it"
        )
