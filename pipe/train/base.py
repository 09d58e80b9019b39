"""A training loop that loads the next batches and copies them to the device while one batch computes.

It executes a :class:`~pipe.train.schedule.TrainSchedule`: it submits each stage of each batch to its lane and waits
where the schedule says. The caller sees a plain loop: each call of ``progress`` runs one batch and returns its output,
``StopIteration`` follows the last batch, and an exception of the loader is raised after the batches that the loader
yielded before it.

Invariant: each batch that was read from a loader is trained on exactly once, in order, and the parameters after it are
those of a plain loop.

After an exception in the model, the optimizer or a stage, the failed batch is not run again, the open accumulation
window is discarded (see :mod:`pipe.train.window`), batches in flight are kept, and the next call runs the next batch.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipe.stream import normalize_device
from pipe.train.batch import move, pageable_bytes, record_stream
from pipe.train.lane import InlineLane, Lanes
from pipe.train.reader import PendingBatch, Reader, SkippedStage
from pipe.train.schedule import Stage, StageRun, TrainSchedule
from pipe.train.source import Kind, Read
from pipe.train.statistics import Statistics
from pipe.train.window import Window, checked_pair

__all__ = ["TrainPipelineBase"]


class TrainPipelineBase:
    """Copies the next batches to the device while one computes.

    Usage::

        pipeline = TrainPipelineBase(model, optimizer, device)      # model(batch) returns (losses, output)
        batches = iter(loader)
        while True:
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                break

    Args:
        model: called with one batch, returns ``(losses, output)``. Losses may have any shape; their sum is minimised.
        optimizer: the pipeline calls its ``zero_grad`` and ``step``. Several optimizers are stepped together, such as
            one for an embedding table and one for the other parameters.
        device: the device that batches are copied to. The model must be on it already.
        grad_accum: batches per optimizer step; the gradient is their mean. None: one batch.
        amp_dtype: autocast to this type, or None.
        grad_scaling: scale the loss where ``amp_dtype`` is fp16 (never otherwise: bf16 has the range of fp32).
        ahead: stage names with the number of batches that the stage runs ahead, where it differs from
            :attr:`default_ahead`. 0 everywhere is a plain loop: a batch is read after the batch before it has been
            trained on. With ``grad_accum`` a loader's last window may then step when ``progress`` raises
            ``StopIteration``, and replicas communicate after each batch.
        lanes: the queues that the stages run on; by default the loader and the copies run in threads.
            ``Lanes.serial()`` reads the loader in the caller's thread.
        process_group: before each batch, the ranks of this group (CPU backend, used for nothing else) check that all
            of them have one. None: the first ``progress`` makes a group if the model is replicated or sharded over the
            whole world (for a replicated model: the first ``progress`` that trains; evaluation on one rank alone
            needs no agreement).
        uneven: what ranks do when one loader ends early, ``"raise"`` or ``"stop"``; see
            :class:`~pipe.train.source.Agreement`.
        custom_model_fwd: called with a batch instead of the model, returns ``(losses, output)``.
        execute_all_batches: when the loader ends, run the batches that were read ahead. False: ``progress`` raises
            ``StopIteration`` as soon as a read ahead finds the loader's end. The batches in flight then run before the
            batches of the next iterator, or are dropped by :meth:`reset`.
        enqueue_batch_after_forward: copy a later batch after the forward and not before it, so that the copy does
            not take bus bandwidth from a forward that reads host memory.

    Several batches are in flight, so a loader must allocate new memory for each batch. An iterator is read ahead in
    another thread, under the caller's grad mode and autocast, unless the next epoch may reset it in place (that of a
    ``DataLoader`` with ``persistent_workers``, one with a length or an ``__iter__`` that does more than return it, and
    a ``map``, ``zip`` or ``islice`` over such a one): this is read ahead in the caller's thread, inside ``progress``.
    A generator around a loader that reads slowly, ``(batch for batch in slow())``, is read in the other thread.

    If loader and model draw random numbers from the same generator, batches are read on demand instead, so that a seed
    gives the same result as a plain loop. See :mod:`pipe.train.draws`; a loader with a generator of its own is read
    ahead.

    A model in ``eval`` mode, or under ``no_grad``, only runs forward. Use one pipeline for training and one for
    evaluation: batches in flight belong to the mode in which they were requested.

    Source: torchrec's ``TrainPipelineBase`` (Meta, 2022).
    """

    default_ahead: Mapping[str, int] = {"load": 2, "copy": 2}
    _forward_only = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        device: torch.device | str,
        *,
        grad_accum: int | None = None,
        amp_dtype: torch.dtype | None = None,
        grad_scaling: bool = True,
        ahead: Mapping[str, int] | None = None,
        lanes: Lanes | None = None,
        process_group: dist.ProcessGroup | None = None,
        uneven: str = "raise",
        custom_model_fwd: Callable[[Any], Any] | None = None,
        execute_all_batches: bool = True,
        enqueue_batch_after_forward: bool = False,
    ) -> None:
        self._device = normalize_device(device)
        scaled = amp_dtype is torch.float16 and grad_scaling
        scaler = torch.amp.GradScaler(self._device.type) if scaled else None
        self._window = Window(model, optimizer, grad_accum, scaler, forward_only=self._forward_only)
        if custom_model_fwd is not None and not callable(custom_model_fwd):
            kind = type(custom_model_fwd).__name__
            raise TypeError(f"expected custom_model_fwd to be None or to be called with a batch, got {kind}")
        self._custom_model_fwd = custom_model_fwd
        self._amp_dtype = amp_dtype
        self._execute_all_batches = execute_all_batches
        self._copy_after_forward = enqueue_batch_after_forward
        self._lanes = lanes or Lanes.for_device(self._device)
        unknown = sorted(set(ahead or ()) - set(self.default_ahead))
        if unknown:
            raise ValueError(f"expected stages of {sorted(self.default_ahead)} in ahead, got {unknown} (ahead={ahead})")
        self._caller = InlineLane()  # reads iterators that the caller may reset
        self._ahead = {**self.default_ahead, **(ahead or {})}
        self._schedule = TrainSchedule([stage.of(self) for stage in self.stages()])
        # Reads in the caller's thread are ordered with everything else in it; so are reads that never run ahead.
        beside_compute = not isinstance(self._lanes.load, InlineLane) and any(self._ahead.values())
        self._reader = Reader(self._window, self._device, (process_group, uneven), beside_compute=beside_compute)
        self._pending: dict[int, PendingBatch] = {}
        self._position = 0  # index of the batch that computes next
        self._window_iterator: Iterator[Any] | None = None  # yielded the latest batch of the open window
        self._batches = 0
        self._batches_in_turn = 0
        self._pageable_bytes = 0
        self._wait_seconds = {stage.name: 0.0 for stage in self._schedule.stages}
        self._undistributed: dict[str, str] = {}

    # ---------------------------------------------------------------------------------------------- stages

    def stages(self) -> list[Stage]:
        """The stages, in the order of the schedule. Subclasses add stages."""
        lanes, ahead = self._lanes, self._ahead
        load = Stage("load", lanes.load, self._load, ahead["load"])
        copy = Stage("copy", lanes.copy, self._copy, ahead["copy"], after=("load",))
        forward = Stage("forward", lanes.compute, self._forward, after=("copy",))
        backward = Stage("backward", lanes.compute, self._backward, after=("forward",))
        return [load, forward, copy, backward] if self._copy_after_forward else [load, copy, forward, backward]

    def _load(self, pending: PendingBatch) -> None:
        pending.read = pending.source.read()

    def _copy(self, pending: PendingBatch) -> None:
        assert pending.read is not None
        pageable = pageable_bytes(pending.read.batch, self._device)
        if pageable and not self._pageable_bytes:
            warnings.warn(
                f"batch {pending.index} holds {pageable} bytes of pageable memory: copying them to {self._device} "
                f"cannot overlap with compute; pin them (DataLoader(pin_memory=True))",
                stacklevel=2,
            )
        self._pageable_bytes += pageable
        # The host side of the copy stays referenced by pending.read until the batch has been run.
        pending.batch = move(pending.read.batch, self._device)

    def _forward(self, pending: PendingBatch) -> None:
        self._use(pending.batch)
        pending.computing = True
        if self._window.trains():
            last = self._is_last(pending.index) if self._window.must_know_the_end else None
            pending.micro = self._window.open(last=last)
            self._window_iterator = pending.source.iterator
        micro = pending.micro
        with contextlib.nullcontext() if micro is None else self._window.synchronization(micro), self._autocast():
            returned = self._call_model(pending)
        pending.losses, pending.output = checked_pair(returned)
        pending.computing = False

    def _call_model(self, pending: PendingBatch) -> Any:
        call = self._window.model if self._custom_model_fwd is None else self._custom_model_fwd
        return call(pending.batch)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._amp_dtype)

    def _backward(self, pending: PendingBatch) -> None:
        pending.computing = True
        if pending.micro is not None:
            self._window.backward(pending.micro, pending.losses, self._before_step)
        pending.computing = False

    def _before_step(self) -> None:
        """Called between a window's last backward and the optimizer step; subclasses override it."""

    def _use(self, value: Any) -> None:
        """Records that the current stream uses memory that was allocated on the copy stream."""
        if self._lanes.copy.stream is not None:
            record_stream(value, torch.cuda.current_stream(self._device))

    # ------------------------------------------------------------------------------------------ the runtime

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Runs the next batch and returns the model's output for it.

        Args:
            dataloader_iter: an iterator over batches; up to ``ahead`` batches are read from it in advance. If it is
                another iterator than in the call before, or was reset by ``iter(loader)``, the batches in flight run
                first.

        Raises:
            StopIteration: after the last batch of this iterator has run (or before: ``execute_all_batches``).
            ValueError: if batches in flight were requested in another mode (``train`` or ``eval``).
            Exception: an exception of the loader, after the batches that it yielded before; an exception of the model.
        """
        if self._reader.connect(dataloader_iter, self._pending.values()):
            self._window_iterator = dataloader_iter  # also of a window that was restored
        while True:
            in_turn = self._reader.in_turn
            pending = self._tick()
            if pending is None:  # the end has been read ahead, and execute_all_batches is False
                self._reader.disconnect()
                raise StopIteration
            kind = pending.kind()
            if kind is Kind.BATCH:
                self._batches += 1
                self._batches_in_turn += in_turn
                return pending.output
            if kind is Kind.END and pending.source is self._reader.source:
                self._reader.disconnect()
                ended, self._window_iterator = self._window_iterator, None
                if ended is pending.source.iterator:
                    self._window.finish(self._before_step)
                raise StopIteration
            # The end of an earlier iterator: the caller replaced it, or has seen its end or failure.
            assert pending.source is not self._reader.source

    def _tick(self) -> PendingBatch | None:
        """Runs one tick; returns the batch that it completes. None: the end has been read (``execute_all_batches``)."""
        i = self._position
        try:
            if not self._execute_all_batches and self._end_was_read(i):
                return None
            for action in self._schedule.tick(i, self._may_run_ahead):
                self._run(action)
        except BaseException:
            # An interrupt of this thread: failures of stages are kept in their tickets. The next call repeats the
            # interrupted action, except a forward or backward, whose effects cannot be undone.
            if i in self._pending and self._pending[i].computing:
                self._pop_pending(i)
                self._window.discard()
            # A read may have been interrupted: the next call makes another source of the iterator.
            self._reader.disconnect()
            raise
        pending = self._pop_pending(i)
        try:
            tickets = [pending.tickets[stage.name] for stage in self._schedule.stages]
            # Last stage first, so that this loop does not hide a wait that is missing between two stages.
            if not all(ticket.succeeded() for ticket in reversed(tickets)):
                for ticket in tickets:
                    with contextlib.suppress(SkippedStage):
                        ticket.wait()
        except BaseException as error:
            if pending.computing:
                self._window.discard()
            if pending.read is None and pending.source is self._reader.source:
                self._reader.disconnect()  # this raises the loader's failure; the caller may read the iterator again
            if isinstance(error, StopIteration):
                # Without this, a StopIteration inside the model would look like the end of the loader.
                raise RuntimeError(f"a stage of batch {i} raised StopIteration") from error
            raise
        return pending

    def _pop_pending(self, i: int) -> PendingBatch:
        self._position = i + 1
        return self._pending.pop(i)

    def _run(self, action: StageRun) -> None:
        """Submits one stage of one batch to its lane."""
        stage, k = action
        if k < self._position:
            return  # an interrupt ended this batch
        if k not in self._pending:
            assert self._reader.source is not None
            self._pending[k] = PendingBatch(k, self._reader.source)
        pending = self._pending[k]
        if stage.name in pending.tickets:  # a restored batch has been loaded already
            return
        load = stage.name == "load"
        alone = load and pending.source.reads_alone
        lane = self._caller if load and pending.source.in_caller else stage.lane
        start = time.perf_counter()
        ticket = lane.submit(partial(self._work, stage, pending, threading.get_ident()))
        pending.tickets[stage.name] = ticket
        if alone or lane is self._caller:
            # Without this, random numbers drawn by the read could not be told from those drawn by this thread.
            ticket.succeeded()
            self._wait_seconds[stage.name] += time.perf_counter() - start

    def _end_was_read(self, i: int) -> bool:
        """Whether one of the reads ahead of batch ``i`` has found the end of the present iterator."""
        k, ahead = i, 0
        while ahead <= self._ahead["load"] and (k == i or self._may_run_ahead()):
            for action in self._schedule.reach("load", k):
                self._run(action)
            pending = self._pending[k]
            kind = pending.kind()
            if pending.source is self._reader.source and kind is not Kind.BATCH:  # it has ended or failed
                return kind is Kind.END and self._pending[i].kind() is Kind.BATCH
            # The end of an earlier iterator is pending, but is no batch.
            ahead += k == i or kind is Kind.BATCH
            k += 1
        return False

    def _may_run_ahead(self) -> bool:
        return not self._reader.in_turn

    def _work(self, stage: Stage, pending: PendingBatch, caller: int) -> None:
        for name in stage.after:
            start = time.perf_counter()
            # Without this, the stage would read before stage `name` has written: on the host, or on its stream.
            succeeded = pending.tickets[name].succeeded()
            if threading.get_ident() == caller:
                self._wait_seconds[name] += time.perf_counter() - start
            if not succeeded:
                raise SkippedStage
        if pending.read is None or pending.read.kind is Kind.BATCH:
            stage.work(pending)

    def _is_last(self, i: int) -> bool | None:
        """Whether the loader ends after batch ``i``; waits for the next read. None if that failed or may not begin."""
        if self._ahead["load"] and self._may_run_ahead():
            for action in self._schedule.reach("load", i + 1):
                self._run(action)
        following = self._pending.get(i + 1)
        kind = None if following is None else following.kind()
        return None if kind is None else kind is Kind.END

    def reset(self) -> None:
        """Drops the batches in flight and the open window; parameters and optimizer stay as they are.

        For training that starts again from a checkpoint. The next ``progress`` continues to read its iterator at the
        present position, which is behind the dropped batches. Waits for reads and copies that are under way.
        """
        for pending in self._pending.values():
            for ticket in pending.tickets.values():
                ticket.succeeded()
        self._drop_pending()
        self._window_iterator = None
        self._reader.reset()
        self._window.discard()

    def _drop_pending(self) -> None:
        # Each stage has run for a different number of batches; none of them may run for a dropped one.
        self._position = max([self._position - 1, *self._pending]) + 1
        self._pending.clear()

    # ------------------------------------------------------------------------------- statistics and state

    def statistics(self) -> Statistics:
        """Counts since construction, among them whether and why overlap is missing."""
        return Statistics(
            batches=self._batches,
            steps=self._window.steps,
            wait_seconds=dict(self._wait_seconds),
            pageable_bytes=self._pageable_bytes,
            undistributed=dict(self._undistributed),
            batches_in_turn=self._batches_in_turn,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that a new pipeline needs to continue: the open window, the scaler, and the batches in flight.

        Model, optimizer and loader have states of their own. The loader's position is *behind* the batches in flight:
        this state keeps those as the loader yielded them. Waits for reads that are under way: take it before the
        state of the loader.
        """
        reads = [pending.read for _, pending in sorted(self._pending.items()) if pending.kind() is not None]
        return {
            "window": self._window.state_dict(),
            "batches": self._batches,
            "in_flight": [read.batch for read in reads if read is not None and read.kind is Kind.BATCH],
            "ended": any(read is not None and read.kind is Kind.END for read in reads),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where :meth:`state_dict` was called; the restored batches run before those of the next iterator.

        Raises:
            ValueError: if this pipeline has batches in flight itself, or other settings; nothing is changed then.
        """
        if any(pending.kind() is Kind.BATCH for pending in self._pending.values()):
            raise ValueError("expected a pipeline without batches in flight to load a state into; make a new one")
        self._window.load_state_dict(state["window"])
        self._batches = state["batches"]
        # The batches of the first iterator follow these.
        restored = self._reader.restore(ended=state["ended"])
        self._drop_pending()
        reads = [Read(Kind.BATCH, batch) for batch in state["in_flight"]] + [Read(Kind.END)] * state["ended"]
        for k, read in enumerate(reads, self._position):
            self._pending[k] = PendingBatch.loaded(k, restored, read)
