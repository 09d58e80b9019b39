"""Pipe: an ``nn.Sequential`` split into pipeline stages on several devices, run by micro-batches.

This module checks arguments and delegates to :mod:`pipe.pipeline` (forward) and :mod:`pipe.step` (training step).

Invariant: outputs, gradients, buffers and generator states are those of the bare module on the same micro-batches, and
names in ``state_dict()`` are those of the bare module.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipe import microbatch
from pipe.batchnorm import DeferredBatchNorm, mini_batch
from pipe.gradients import parameters_of, step_gradients
from pipe.loss import LossFn, micro_losses
from pipe.pipeline import Pipeline
from pipe.placement import (
    BalanceError,
    Device,
    assigned_devices,
    balance_of,
    devices_of,
    partitions_of,
    stages_of,
    updated_stages,
)
from pipe.recompute.thread_state import restores_thread_state
from pipe.refusals import check_plain, check_reduced, check_rows_first, check_updates
from pipe.schedule import Clocks, StageAction, fill_drain, one_forward_one_backward
from pipe.skip.skippable import verify_skippables
from pipe.stage import Values
from pipe.step import PipelineStep, split_target, step_of_one_cell
from pipe.stream import use_device
from pipe.torch_private.tracing import breaks_compiled_graphs
from pipe.turn import TakesTurns, frozen_weights, share_places, takers_in

__all__ = ["BalanceError", "Pipe"]

CHECKPOINT_MODES = ("always", "except_last", "never")
SCHEDULES: dict[str, Callable[[int, int, bool], Clocks]] = {"1f1b": one_forward_one_backward, "fill_drain": fill_drain}


class Pipe(nn.Module):
    """Splits an ``nn.Sequential`` into stages on several devices and runs them by micro-batches::

        model = Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], devices=[0, 1], chunks=8)
        output = model(input)
        loss_fn(output, target).backward()

    Args:
        module: the layers. They are moved to their devices and shared with the Pipe.
        balance: number of layers of each stage. By default parameters are spread over ``devices`` as evenly in bytes
            as possible.
        devices: device of each stage, repeated ones allowed. By default all CUDA devices; without any, the CPU. With
            fewer devices than stages, stage ``j`` gets device ``j % len(devices)``; its layers must be able to take
            turns there (see :mod:`pipe.turn`), as an ``OffloadModel`` does.
        chunks: number of micro-batches of a mini-batch.
        checkpoint: which micro-batches are checkpointed (keep only stage boundaries): ``"always"``, ``"except_last"``
            or ``"never"``. The last micro-batch runs backward first, so recomputing it saves no memory.
        deferred_batch_norm: whether BatchNorm updates its statistics per mini-batch: see :mod:`pipe.batchnorm`.

    If a layer, or a module inside a layer, is replaced after wrapping (by ``setattr``, or by a conversion of the whole
    module), the new one runs from the next forward on: the modules that ``print`` and ``parameters()`` show are those
    that run. ``chunks`` can be changed between calls.

    Raises:
        TypeError: if ``module`` is not a plain ``nn.Sequential``, or skip connections do not match.
        ValueError: if another argument is invalid (:class:`BalanceError` for the balance).
        IndexError: if there are fewer devices than stages, and the stages cannot take turns.

    Source: GPipe (Huang et al., 2019), and the interface of torchgpipe.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_plain(module)
        if int(chunks) < 1:
            raise ValueError(f"number of chunks must be a positive integer, got chunks={chunks}")
        checkpoint = str(checkpoint)
        if checkpoint not in CHECKPOINT_MODES:
            raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never', got {checkpoint!r}")
        if isinstance(balance, int):
            raise TypeError(f"expected the layers of each stage, got balance={balance}; pass chunks={balance}?")
        balance = None if balance is None else list(balance)
        verify_skippables(module)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, int(chunks))

        found = devices_of(devices, balance)
        self.balance = balance_of(module, balance, len(found))
        self.devices = assigned_devices(module, self.balance, found)
        self.chunks = int(chunks)
        self.checkpoint = checkpoint
        # The children of the module become those of the Pipe, so that names in the state_dict stay the same.
        self._modules = dict(module._modules)
        self.training = module.training
        self._wrapped: dict[str, Any] = dict(module._modules)
        self._stages = stages_of(partitions_of(module, self.balance), self.devices)
        self._turns = len(found) if len(found) < len(self.balance) else 0
        self._takers: list[TakesTurns] | None = None
        self._ensure_turns()
        #: Numbers of outputs whose rows depend on values.
        self._selected: set[int] = set()
        self._trace: list[StageAction] | None = None

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The layers of each stage."""
        return [stage.layers for stage in self._stages]

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> Any:
        return list(self._modules.values())[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __getstate__(self) -> dict[str, Any]:
        # Shared slots belong to the modules of this Pipe: a copy makes its own.
        return {**self.__dict__, "_takers": None, "_trace": None, "_selected": set()}

    def _denied(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the Pipe sets the device of each layer."""
        raise TypeError(
            "denied to move parameters and buffers, because Pipe should manage device placement; pass devices=[...] to "
            "Pipe"
        )

    cuda = cpu = _denied

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Changes the type of parameters and buffers, as ``nn.Module.to`` does.

        Raises:
            TypeError: if a device is given, or a tensor that has one.
        """
        # The arguments are checked as given, before torch checks that such a device exists.
        given = [a for a in (*args, *kwargs.values()) if not isinstance(a, bool)]
        if any(isinstance(a, (torch.device, int, str, Tensor)) for a in given):
            self._denied()
        return super().to(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        # torchgpipe and fairscale name a parameter by its partition and by the layer's name in the whole module.
        old = re.compile(re.escape(prefix) + r"partitions\.\d+\.(?P<name>(?P<layer>[^.]+)\..+)")
        matches = [] if "partitions" in self._modules else [*filter(None, map(old.fullmatch, state_dict))]
        for match in matches:
            name = prefix + match["name"]
            if name in state_dict:
                lists[-1].append(
                    f"expected names of torchgpipe with the layer's name in the whole module, got several for one "
                    f"parameter, {name}, one of them {match.string}; rename them to those of state_dict()"
                )
            elif match["layer"] in self._modules:
                state_dict[name] = state_dict.pop(match.string)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    @breaks_compiled_graphs
    @restores_thread_state
    def forward(self, input: Any = None, *others: Any, **named: Any) -> Any:
        """Runs the mini-batch, micro-batch by micro-batch.

        Args:
            input: a tensor or nested value; tensors are split along dimension 0, which must be the same for all, except
                in :class:`~pipe.microbatch.NoChunk`. It is moved to the first device.
            others: refused, as are ``named``: layers of an ``nn.Sequential`` take one argument, such as a tuple.

        Returns:
            The output of the whole mini-batch, on the last device. The outputs of several micro-batches are joined
            along dimension 0, which must be the rows or a multiple of them; the hidden state of a recurrent layer that
            is the last layer is joined along dimension 1.

        Raises:
            TypeError: if there is no tensor in ``input``, or a tensor in an object that is no pytree node.
            ValueError: if tensors differ in dimension 0, or outputs cannot be concatenated.
            RuntimeError: if layers were added or removed since wrapping; if a stage is updated in backward.
        """
        if others or named:
            raise TypeError("expected one input, got several; pass a tuple that the first layer unpacks: pipe((a, b))")
        microbatch.check(input)
        self._follow()
        if not self._stages:
            return input
        batches = microbatch.split_nested(input, self.chunks, self.devices[0])
        count, takers = len(batches), self._ensure_turns()
        if count > 1:
            check_rows_first(self[0], input)
            if torch.is_grad_enabled():
                check_updates(takers)
        checkpoint_stop = self._checkpoint_stop(count)
        if count == len(self._stages) == 1 and self._trace is None and not (checkpoint_stop or takers):
            with mini_batch(1), use_device(self.devices[0]):
                return self._stages[0](batches)[0]
        values: list[Values] = [{None: batch} for batch in batches]
        del batches
        with mini_batch(count), frozen_weights(takers):
            Pipeline(values, self._stages, turns=self._turns, checkpoint_stop=checkpoint_stop, trace=self._trace).run()
        outputs = [value[None] for value in values]
        if count == 1:
            return outputs[0]
        rows = microbatch.rows_of_micro_batches(input, count)
        return microbatch.gather_nested(outputs, microbatch.RowsOfOutputs(self, rows, self._selected))

    @breaks_compiled_graphs
    @restores_thread_state
    def train_step(
        self, input: Any, target: Any, loss_fn: LossFn, *, schedule: str = "1f1b", reduction: str | None = None
    ) -> Tensor:
        """Forward and backward of a mini-batch in the order of a schedule; gradients are added to ``.grad``.

        Args:
            input: as for :meth:`forward`.
            target: nested value with as many rows; it is moved to the last device. For a loss with ``ignore_index`` or
                class weights, targets are counted before the step: if they are on an accelerator, the host waits for
                that; if they are in host memory, it does not.
            loss_fn: ``loss_fn(output, target)`` of a micro-batch: a tensor of one element, or ``(sum, count)``, where
                the loss of the mini-batch is the sum of the sums over the sum of the counts. The counts are known after
                the last forward, so that the schedule of such a loss is fill-drain.
            schedule: ``"1f1b"`` or ``"fill_drain"`` (:mod:`pipe.schedule`).
            reduction: whether the loss is the ``"mean"`` or the ``"sum"`` over rows, if the loss does not declare it:
                losses of torch do, class weights and ``ignore_index`` included, and so do a ``functools.partial`` with
                ``reduction=`` and a module with an attribute ``reduction``. See :mod:`pipe.loss`.

        Returns:
            The loss of the mini-batch, detached, on the last device.

        Raises:
            TypeError: if there is no tensor in ``input``.
            ValueError: if rows, schedule, or loss do not match; if there are several micro-batches and the divisor of
                the loss is unknown.
            RuntimeError: if a ``DistributedDataParallel`` should have reduced the gradients, a stage is updated in
                backward, or layers were added or removed since wrapping.

        An exception restores the gradients from before the step, except those of stages that take turns: gradients
        that were already offloaded stay added. Hooks of parameters, and optimizers that step in such a hook, run once,
        at the end of the step. Parameters of a loss that is an ``nn.Module`` count as the Pipe's.
        """
        microbatch.check(input)
        self._follow()
        if not self._stages:
            raise ValueError("expected a Pipe with layers to train, got an empty one")
        check_reduced(self)
        inputs = microbatch.split_nested(input, self.chunks, self.devices[0])
        rows = microbatch.rows_of_micro_batches(input, self.chunks)
        targets = split_target(target, rows, self.devices[-1])
        # Targets are counted where the user has them.
        losses = micro_losses(loss_fn, reduction, split_target(target, rows) if len(rows) > 1 else (), rows)
        if schedule not in SCHEDULES:
            raise ValueError(f"expected a schedule among {sorted(SCHEDULES)}, got {schedule!r}")
        # What a (sum, count) divides by is known after the last forward.
        make = fill_drain if losses[0].weight is None else SCHEDULES[schedule]
        takers = self._ensure_turns()
        trained: list[nn.Module] = [self]
        if isinstance(loss_fn, nn.Module) and (loss_fn._parameters or loss_fn._modules):
            trained.append(loss_fn)
        parameters = parameters_of(*trained, without=(*takers, *takers_in(trained[1:])))
        if len(rows) == len(self._stages) == 1 and self._trace is None and not takers:
            with step_gradients(parameters), mini_batch(1), use_device(self.devices[0]):
                return step_of_one_cell(self._stages[0], inputs[0], targets[0], losses[0])
        if len(rows) > 1:
            check_rows_first(self[0], input)
            check_updates(takers, parameters)
        with step_gradients(parameters), mini_batch(len(rows)), frozen_weights(takers):
            return PipelineStep(
                self._stages,
                make(len(rows), len(self._stages), self._turns > 0),
                inputs,
                targets,
                losses,
                turns=self._turns,
                checkpoint_stop=self._checkpoint_stop(len(rows)),
                trace=self._trace,
            ).run()

    @contextlib.contextmanager
    def recording(self, trace: list[StageAction] | None = None) -> Iterator[list[StageAction]]:
        """Appends the actions of forwards and steps in it, and their backwards, to a list as they begin; yields it.

        Args:
            trace: the list, by default a new one. A list whose ``append`` reads a clock measures the actions.
        """
        before, self._trace = self._trace, [] if trace is None else trace
        try:
            yield self._trace
        finally:
            self._trace = before

    def _follow(self) -> None:
        """Updates the stages with layers that were replaced."""
        stages = updated_stages(self._stages, self._wrapped, self._modules)
        if stages is not None:
            self._stages, self._wrapped = stages, dict(self._modules)
        for stage in self._stages:
            stage.follow()

    def _checkpoint_stop(self, count: int) -> int:
        if not self.training:
            return 0
        # Relative to the actual number of micro-batches, which may be less than chunks.
        return {"always": count, "except_last": count - 1, "never": 0}[self.checkpoint]

    def _ensure_turns(self) -> list[TakesTurns]:
        # None in a copy of the Pipe, whose modules are other ones.
        if self._takers is None:
            share_places(self.partitions, self.devices, self._turns or len(self._stages))
            self._takers = takers_in(self.partitions)
        return self._takers
