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
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], because: str, *, hooks: bool = True
) -> None:
    """Refuses optimizers that update inside backward, among ``optimizers``, in ``model`` and at its parameters.

    Args:
        model: its parameters and modules are searched.
        optimizers: those of the pipeline that cannot be deferred.
        because: for the error, what makes gradients incomplete: ``f"this pipeline {because}"``.
        hooks: whether hooks at the parameters are called before their gradients are complete.
    """
    eager = [each for each in optimizers if getattr(each, "update_in_backward", False)]
    found = [f"{type(each).__name__}(update_in_backward=True)" for each in eager]
    for name, parameter in model.named_parameters() if hooks else ():
        if getattr(parameter, "_in_backward_optimizers", None):
            found.append(f"parameter {name!r} (apply_optimizer_in_backward)")
        elif any(map(_may_update, (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())):
            found.append(f"parameter {name!r} (register_post_accumulate_grad_hook)")
    for name, module in model.named_modules():
        if getattr(getattr(module, "fused_optimizer", None), "params", None):
            found.append(f"module {name!r} (fused optimizer)")
    if found:
        raise ValueError(
            f"expected no optimizer that updates inside backward, because this pipeline {because} and such an "
            f"optimizer would update before the gradient is complete, got: {', '.join(found[:8])}"
            f"{f' and {len(found) - 8} more' if len(found) > 8 else ''}; step them after backward (for torchrec: "
            f"the dense compute kernel), or train without it"
        )


def refuse_updates_between_micro_batches(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """The same for each :class:`~pipe.pipe.Pipe` in ``model`` that runs several micro-batches in one backward."""
    for module in model.modules():
        if isinstance(module, Pipe) and module.chunks > 1:
            own = set(map(id, module.parameters()))
            inside = [each for each in optimizers if own & {id(p) for g in each.param_groups for p in g["params"]}]
            because = f"runs micro-batches inside each backward (Pipe(chunks={module.chunks}))"
            # Without checkpoints autograd sums over micro-batches before it calls any hook.
            refuse_updates_in_backward(module, inside, because, hooks=module.checkpoint != "never")


def _may_update(hook: Any) -> bool:
    """Whether a hook on an accumulated gradient may be an optimizer: all except those of torch.distributed."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
