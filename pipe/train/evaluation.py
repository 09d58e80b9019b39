"""An evaluation loop (forward only) that distributes the sparse features of the next batch while one computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipe.train.sparse import TrainPipelineSparseDist

__all__ = ["EvalPipelineSparseDist"]


class EvalPipelineSparseDist(TrainPipelineSparseDist):
    """Runs forward alone: no gradient is zeroed or computed, and the optimizer never steps, whatever the model's mode.

    Grad mode, ``train`` or ``eval``, and inference mode are the caller's::

        pipeline = EvalPipelineSparseDist(model.eval(), optimizer, device)
        with torch.no_grad():
            output = pipeline.progress(batches)

    Args:
        model: called with one batch, returns ``(losses, output)``; the losses are dropped.
        optimizer: unused; accepted because torchrec has it. May be None.
        device: the device that batches are copied to.
        enable_amp: run forward under autocast to ``amp_dtype``.
        **options: as for :class:`~pipe.train.sparse.TrainPipelineSparseDist`, except ``grad_accum`` and gradient
            scaling.

    Source: torchrec's ``EvalPipelineSparseDist`` (Meta, 2022).
    """

    _forward_only = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        device: torch.device | str,
        *,
        enable_amp: bool = False,
        amp_dtype: torch.dtype = torch.bfloat16,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        unwanted = sorted({"grad_accum", "enable_grad_scaling", "execute_all_batches"} & options.keys())
        if unwanted:
            raise TypeError(f"EvalPipelineSparseDist trains nothing and runs every batch: it takes no {unwanted}")
        super().__init__(
            model,
            (),
            device,
            enable_amp,
            False,
            amp_dtype=amp_dtype,
            custom_model_fwd=custom_model_fwd,
            **options,
        )
