"""Training and evaluation loops that distribute the sparse features of the next batch over ranks while one computes.

They have stages more than :class:`~pipe.train.base.TrainPipelineBase`. By default a call of ``progress`` runs::

    load.i+2  copy.i+2  distribute.i+1  forward.i  exchange.i+1  backward.i

``distribute`` starts the exchange of the features' sizes. ``exchange``, once the forward has been issued, waits for
the sizes and starts the exchange of the features, which overlaps with backward and optimizer. Both run in the
caller's thread (on a stream of their own on CUDA), because collectives must have one order on all ranks.

A sharded table that is too large for its device stores its rows elsewhere and a cache of them on the device (torchrec's
UVM caching; on the CPU a module may do the same with a file). Once the distributed features of a batch are known, the
module can fetch their rows before the forward. :class:`PrefetchTrainPipelineSparseDist` runs::

    load.i+2  copy.i+2  exchange.i+1  forward.i  prefetch.i+1  distribute.i+2  backward.i

so the features of batch i+1 are exchanged during the forward of batch i, and its rows are fetched during the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipe.train.base import InFlight, TrainPipelineBase
from pipe.train.distribute import Distribution
from pipe.train.window import check_count

__all__ = ["EvalPipelineSparseDist", "PrefetchTrainPipelineSparseDist", "TrainPipelineSparseDist"]


class TrainPipelineSparseDist(TrainPipelineBase):
    """Copies batch i+2 and distributes the sparse features of batch i+1 while batch i computes.

    Modules that implement the protocol :class:`~pipe.train.distribute.Distributes` take part: torchrec's sharded
    modules inside ``DistributedModelParallel``, or our ``OffloadEmbeddingBag``. Other modules run as usual.

    The positional arguments are those of torchrec 0.3.2. Arguments that later releases put in their positions (the
    fourth is ``execute_all_batches`` today) are passed by keyword.

    Args:
        model: called with one batch, returns ``(losses, output)``.
        optimizer: one or several; the pipeline calls their ``zero_grad`` and ``step``.
        device: the device that batches are copied to.
        enable_amp: run forward under autocast to ``amp_dtype``.
        enable_grad_scaling: scale the loss; takes effect for fp16 only.
        grad_accum: batches per optimizer step.
        amp_dtype: bfloat16 (default) or float16.
        dmp_collection_sync_interval_batches: interval, in optimizer steps, at which the tables of a torchrec
            ``DMPCollection`` are averaged over their replicas; the first average is before the first step. None: never.
        apply_jit: must be False; script the modules yourself.
        context_type: must be None; there is one kind of context here.
        pipeline_postproc: accepted and without effect, as are ``enable_inplace_copy_batch``,
            ``free_features_storage_early`` and ``clear_data_dist_inputs``: in torchrec they change speed or memory,
            never the result.
        **options: as for :class:`~pipe.train.base.TrainPipelineBase`, such as ``execute_all_batches``,
            ``custom_model_fwd`` and ``enqueue_batch_after_forward``; ``ahead`` accepts ``"distribute"`` too.

    Raises:
        TypeError: if ``custom_model_fwd`` cannot be called, or an argument is unknown.
        ValueError: for another ``amp_dtype``, ``apply_jit``, ``context_type``, or an optimizer that updates inside
            backward before gradients are complete (:class:`~pipe.train.window.Window`).

    Source: torchrec's ``TrainPipelineSparseDist`` (Meta, 2022).
    """

    default_ahead: Mapping[str, int] = {"load": 2, "copy": 2, "distribute": 1}
    _stages: Sequence[str] = ("load", "copy", "distribute", "exchange")
    _around_forward: tuple[Sequence[str], Sequence[str]] = (("load", "copy", "distribute"), ("exchange",))

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
        dmp_collection_sync_interval_batches: int | None = 1,
        apply_jit: bool = False,
        context_type: type | None = None,
        pipeline_postproc: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        **options: Any,
    ) -> None:
        if amp_dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"expected amp_dtype torch.bfloat16 or torch.float16, got amp_dtype={amp_dtype}")
        if apply_jit or context_type is not None:
            raise ValueError(
                f"expected apply_jit=False and context_type=None, got {apply_jit=}, {context_type=}; script modules "
                f"with torch.jit.script yourself, and leave the context to the pipeline"
            )
        check_count("dmp_collection_sync_interval_batches", dmp_collection_sync_interval_batches)
        amp = amp_dtype if enable_amp else None
        super().__init__(
            model, optimizer, device, grad_accum=grad_accum, amp_dtype=amp, grad_scaling=enable_grad_scaling, **options
        )
        self._ahead.setdefault("prefetch", self._ahead["distribute"])
        self._ahead["exchange"] = self._ahead["prefetch"]
        self._window.table_interval = dmp_collection_sync_interval_batches
        self._use(self._distribution_of(model))

    def _distribution_of(self, model: nn.Module) -> Distribution:
        lane, prefetches = self._lanes.distribute, "prefetch" in self._stages
        return Distribution(model, lane, self._window.optimizers, prefetches=prefetches)

    def _use(self, distribution: Distribution) -> None:
        self._distribution, self._undistributed = distribution, distribution.undistributed

    def _may_run(self, stage: str) -> bool:
        # The first forward records what is to be distributed.
        return self._distribution.calls is not None or stage in ("load", "copy")

    def _distribute(self, batch: InFlight) -> None:
        with self._autocast():
            batch.requests = self._distribution.start(batch.batch)

    def _exchange(self, batch: InFlight) -> None:
        self._distribution.exchange(batch.requests)

    def _call_model(self, batch: InFlight) -> Any:
        with self._distribution.serving(batch.requests, batch.batch):
            return super()._call_model(batch)

    def detach(self) -> nn.Module:
        """Returns the model, unmodified (the pipeline changes it only inside ``progress``).

        The batches in flight are kept; a later ``progress`` runs them, on this model or on the one that is attached.
        """
        return self._window.model

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Continues with ``model``, also for the batches in flight, which are distributed in its own forward.

        The optimizer remains the one that the pipeline was made with.

        Args:
            model: in the mode (``train`` or ``eval``) that it is to run in. None: the model that was detached.
            sparse_dist: without effect; accepted because torchrec has it. No module is called before the model
                itself calls it.

        Raises:
            TypeError: if it is no module.
            ValueError: if it holds an optimizer that updates inside backward before gradients are complete. The
                pipeline keeps the model that it had.
        """
        model = self._window.model if model is None else model
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module or None, got {type(model).__name__} (model={model!r})")
        if model is self._window.model and self._distribution.serves(model):
            return
        distribution = self._distribution_of(model)
        self._window.attach(model)
        self._use(distribution)
        for batch in self._flight:  # what was distributed was for modules of the old model
            batch.requests = ()
            for stage in self._stages[2:]:
                if stage in batch.tickets:
                    batch.tickets.pop(stage).succeeded()


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
    _stages = ("load", "copy", "distribute", "exchange", "prefetch")
    _around_forward = (("load", "copy", "exchange"), ("prefetch", "distribute"))

    def _prefetch(self, batch: InFlight) -> None:
        self._distribution.prefetch(batch.requests, self._forward_stream)


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
        **options: as for :class:`~pipe.train.sparse.TrainPipelineSparseDist`, such as ``enable_amp``, except
            ``grad_accum`` and gradient scaling.

    Source: torchrec's ``EvalPipelineSparseDist`` (Meta, 2022).
    """

    _forward_only = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        device: torch.device | str,
        **options: Any,
    ) -> None:
        unwanted = sorted({"grad_accum", "enable_grad_scaling", "execute_all_batches"} & options.keys())
        if unwanted:
            raise TypeError(f"EvalPipelineSparseDist trains nothing and runs every batch: it takes no {unwanted}")
        super().__init__(model, (), device, enable_grad_scaling=False, **options)
