"""The training loop that also distributes the sparse features of the next batch while one computes.

Two stages more than :class:`~pipe.train.base.TrainPipelineBase`. With their defaults a call of ``progress`` reads::

    load.i+2  copy.i+2  distribute.i+1  forward.i  exchange.i+1  backward.i

``distribute`` starts the exchange of the features' sizes; ``exchange``, once the forward has been issued, waits for
the sizes and starts the exchange of the features, which then travel beside backward and optimizer. Both run in the
caller's thread (on a stream of their own on CUDA), because collectives must have one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipe.train.base import TrainPipelineBase
from pipe.train.distribute import Distribution
from pipe.train.flight import Flight
from pipe.train.schedule import Stage

__all__ = ["TrainPipelineSparseDist"]


class TrainPipelineSparseDist(TrainPipelineBase):
    """Copies batch i+2 and distributes the sparse features of batch i+1 while batch i computes.

    Modules that speak the protocol of :class:`~pipe.train.distribute.Distributes` take part: torchrec's sharded
    modules inside ``DistributedModelParallel``, or our ``OffloadEmbeddingBag``. Others run as they are.

    Args:
        model: called with one batch, returns ``(losses, output)``.
        optimizer: zeroed and stepped by the pipeline; one or several.
        device: where batches go.
        enable_amp: run forward under autocast to ``amp_dtype``.
        enable_grad_scaling: scale the loss; takes effect for fp16 only.
        grad_accum: batches per optimizer step.
        amp_dtype: bfloat16 (default) or float16.
        **options: as for :class:`~pipe.train.base.TrainPipelineBase`; ``ahead`` knows ``"distribute"`` too.

    Source: torchrec's ``TrainPipelineSparseDist`` (Meta, 2022).
    """

    default_ahead: Mapping[str, int] = {"load": 2, "copy": 2, "distribute": 1}

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        device: torch.device | str,
        enable_amp: bool = False,
        enable_grad_scaling: bool = True,
        grad_accum: int | None = None,
        *,
        amp_dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        if amp_dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"expected amp_dtype torch.bfloat16 or torch.float16, got amp_dtype={amp_dtype}")
        super().__init__(
            model,
            optimizer,
            device,
            grad_accum=grad_accum,
            amp_dtype=amp_dtype if enable_amp else None,
            grad_scaling=enable_grad_scaling,
            **options,
        )
        self._distribution = Distribution(model, self._lanes.distribute)
        for one in self._window.optimizers:
            self._distribution.check_optimizer(one)
        self._undistributed = self._distribution.undistributed

    def stages(self) -> list[Stage]:
        """The stages of the base, with distribution before the forward of the batch ahead, and exchange after it."""
        load, copy, forward, backward = super().stages()
        lane, ahead = self._lanes.distribute, self._ahead["distribute"]
        return [
            load,
            copy,
            Stage("distribute", lane, self._distribute, ahead, after=("copy",)),
            # Not after copy as well: distribute has waited for it, and the order of streams is transitive.
            Stage("forward", forward.lane, forward.work, after=("exchange",)),
            Stage("exchange", lane, self._exchange, ahead, after=("distribute",)),
            backward,
        ]

    def _distribute(self, flight: Flight) -> None:
        with self._autocast():
            flight.requests = self._distribution.start(flight.batch)

    def _exchange(self, flight: Flight) -> None:
        if not flight.requests and self._distribution.observed:
            # While the pipeline fills, distribution comes before the first forward, which shows what to distribute.
            self._distribute(flight)
        self._distribution.exchange(flight.requests)

    def _call_model(self, flight: Flight) -> Any:
        with self._distribution.serving(flight.requests, flight.batch):
            return self._model(flight.batch)

    def detach(self) -> nn.Module:
        """Gives the model back, with nothing of the pipeline in it (there never is any between two calls).

        The batches in flight stay; a later ``progress`` runs them.
        """
        return self._model
