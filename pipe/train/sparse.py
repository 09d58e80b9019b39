"""Training and evaluation loops that distribute the sparse features of the next batch over ranks while one computes.

They have two stages more than :class:`~pipe.train.base.TrainPipelineBase`. By default a call of ``progress`` runs::

    load.i+2  copy.i+2  distribute.i+1  forward.i  exchange.i+1  backward.i

``distribute`` starts the exchange of the features' sizes. ``exchange``, once the forward has been issued, waits for
the sizes and starts the exchange of the features, which overlaps with backward and optimizer. Both run in the
caller's thread (on a stream of their own on CUDA), because collectives must have one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipe.train.base import TrainPipelineBase
from pipe.train.distribute import Distribution
from pipe.train.reader import PendingBatch
from pipe.train.schedule import Stage

__all__ = ["EvalPipelineSparseDist", "TrainPipelineSparseDist"]


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
        execute_all_batches: as for :class:`~pipe.train.base.TrainPipelineBase`, as are the next two.
        custom_model_fwd: called with a batch instead of the model.
        enqueue_batch_after_forward: copy a later batch after the forward and not before it.
        dmp_collection_sync_interval_batches: interval, in optimizer steps, at which the tables of a torchrec
            ``DMPCollection`` are averaged over their replicas; the first average is before the first step. None: never.
        apply_jit: must be False; script the modules yourself.
        context_type: must be None; there is one kind of context here.
        pipeline_postproc: accepted and without effect, as are ``enable_inplace_copy_batch``,
            ``free_features_storage_early`` and ``clear_data_dist_inputs``: in torchrec they change speed or memory,
            never the result.
        **options: as for :class:`~pipe.train.base.TrainPipelineBase`; ``ahead`` accepts ``"distribute"`` too.

    Raises:
        TypeError: if ``custom_model_fwd`` cannot be called, or an argument is unknown.
        ValueError: for another ``amp_dtype``, ``apply_jit``, ``context_type``, or an optimizer that updates inside
            backward before gradients are complete (:class:`~pipe.train.window.Window`).

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
        execute_all_batches: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        enqueue_batch_after_forward: bool = False,
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
        if apply_jit:
            raise ValueError(
                f"expected apply_jit=False, got {apply_jit!r}; script modules with torch.jit.script yourself"
            )
        if context_type is not None:
            raise ValueError(f"expected context_type=None, got {context_type!r}: a pipeline has no torchrec context")
        interval = dmp_collection_sync_interval_batches
        if interval is not None and (not isinstance(interval, int) or isinstance(interval, bool)):
            raise TypeError(f"expected dmp_collection_sync_interval_batches to be None or an int, got {interval!r}")
        if interval is not None and interval < 1:
            raise ValueError(f"expected dmp_collection_sync_interval_batches >= 1 or None, got {interval}")
        super().__init__(
            model,
            optimizer,
            device,
            grad_accum=grad_accum,
            amp_dtype=amp_dtype if enable_amp else None,
            grad_scaling=enable_grad_scaling,
            custom_model_fwd=custom_model_fwd,
            execute_all_batches=execute_all_batches,
            enqueue_batch_after_forward=enqueue_batch_after_forward,
            **options,
        )
        self._table_interval = interval
        self._table_steps = 0
        self._distribution = self._distribution_of(model)
        self._undistributed = self._distribution.undistributed

    def _distribution_of(self, model: nn.Module) -> Distribution:
        distribution = Distribution(model, self._lanes.distribute)
        for one in self._window.optimizers:
            distribution.check_optimizer(one)
        return distribution

    def stages(self) -> list[Stage]:
        """The stages of the base class, with ``distribute`` before the forward and ``exchange`` after it."""
        base = {stage.name: stage for stage in super().stages()}
        lane, ahead, forward = self._lanes.distribute, self._ahead["distribute"], base["forward"]
        distribute = Stage("distribute", lane, self._distribute, ahead, after=("copy",))
        # Not after copy as well: distribute has waited for it, and the order of streams is transitive.
        forward = Stage("forward", forward.lane, forward.work, after=("exchange",))
        exchange = Stage("exchange", lane, self._exchange, ahead, after=("distribute",))
        if self._copy_after_forward:
            return [base["load"], distribute, forward, base["copy"], exchange, base["backward"]]
        return [base["load"], base["copy"], distribute, forward, exchange, base["backward"]]

    def _distribute(self, pending: PendingBatch) -> None:
        with self._autocast():
            pending.requests = self._distribution.start(pending.batch)

    def _exchange(self, pending: PendingBatch) -> None:
        if not pending.requests and self._distribution.observed:
            # While the pipeline fills, distribution runs before the first forward, which records what to distribute.
            self._distribute(pending)
        self._distribution.exchange(pending.requests)

    def _call_model(self, pending: PendingBatch) -> Any:
        with self._distribution.serving(pending.requests, pending.batch):
            return super()._call_model(pending)

    def _before_step(self) -> None:
        """Averages the tables of a ``DMPCollection`` over their replicas, if that is due (a collective call)."""
        interval, model = self._table_interval, self._window.model
        due = interval is not None and self._table_steps % interval == 0
        self._table_steps += 1
        # Compared by name, so that torchrec need not be imported (or installed).
        if due and any(kind.__name__ == "DMPCollection" for kind in type(model).__mro__):
            model.sync()  # type: ignore[operator]

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
        self._distribution, self._undistributed = distribution, distribution.undistributed
        self._reader.attach(model)
        for pending in self._pending.values():
            pending.requests = []  # they were for modules of the old model


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
