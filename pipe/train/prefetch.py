"""A training loop for sparse models that also prefetches embedding rows of the next batch while one batch computes.

A sharded table that is too large for its device stores its rows elsewhere and a cache of them on the device (torchrec's
UVM caching; on the CPU a module may do the same with a file). Once the distributed features of a batch are known, the
module can fetch their rows before the forward. With the defaults a call of ``progress`` runs::

    load.i+2  copy.i+2  exchange.i+1  forward.i  prefetch.i+1  distribute.i+2  backward.i

so the features of batch i+1 are exchanged during the forward of batch i, and its rows are fetched during the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from pipe.train.distribute import Distribution
from pipe.train.reader import PendingBatch
from pipe.train.schedule import Stage, StageRun
from pipe.train.sparse import TrainPipelineSparseDist

__all__ = ["PrefetchTrainPipelineSparseDist"]


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist):
    """Copies batch i+2, starts its distribution, and prefetches the rows of batch i+1 while batch i computes.

    If a participating module has ``prefetch(ctx=, dist_input=, forward_stream=)``, it is called with the context and
    the distributed input of the module's next forward, and with the stream that this forward will run on (None on the
    CPU). Other modules are distributed as in :class:`~pipe.train.sparse.TrainPipelineSparseDist`.

    Arguments are those of :class:`~pipe.train.sparse.TrainPipelineSparseDist`; ``ahead`` accepts ``"prefetch"`` too,
    and ``Lanes`` have a lane for it.

    The caches of fbgemm return rows in the order in which they were fetched. Therefore such a model must not be called
    directly between two calls of ``progress`` (to evaluate, run the iterator to its end first), and a module that is
    called with other objects than were prefetched for it raises a ``RuntimeError``.

    Raises:
        ValueError: if a table is cached and was made with ``prefetch_pipeline=False``.

    Source: torchrec's ``PrefetchTrainPipelineSparseDist`` (Meta, 2023).
    """

    default_ahead: Mapping[str, int] = {"load": 2, "copy": 2, "distribute": 2, "prefetch": 1}
    _forward_stream: torch.cuda.Stream | None = None

    def _distribution_of(self, model: torch.nn.Module) -> Distribution:
        distribution = super()._distribution_of(model)
        distribution.check_caches()
        return distribution

    def stages(self) -> list[Stage]:
        """The stages of the sparse pipeline, with prefetch after the forward."""
        stage = {stage.name: stage for stage in super().stages()}
        ahead = self._ahead["prefetch"]
        exchange = replace(stage["exchange"], ahead=ahead)
        # Not after exchange as well: prefetch has waited for it.
        forward = replace(stage["forward"], after=("prefetch",))
        prefetch = Stage("prefetch", self._lanes.prefetch, self._prefetch, ahead, after=("exchange",))
        computing = [exchange, forward, prefetch, stage["distribute"], stage["backward"]]
        if self._copy_after_forward:
            return [stage["load"], *computing[:2], stage["copy"], *computing[2:]]
        return [stage["load"], stage["copy"], *computing]

    def _prefetch(self, pending: PendingBatch) -> None:
        if not pending.requests and self._distribution.observed:
            # While the pipeline fills, the exchange runs before the first forward, which records what to distribute.
            self._lanes.distribute.submit(partial(self._exchange, pending)).wait()
        self._distribution.prefetch(pending.requests, self._forward_stream)

    def _run(self, action: StageRun) -> None:
        if self._device.type == "cuda":
            # Read in the caller's thread and outside of every lane: the stream that the forward will run on.
            self._forward_stream = torch.cuda.current_stream(self._device)
        super()._run(action)
