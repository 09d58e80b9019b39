"""A training loop that loads the next batches and copies them to the device while one batch computes.

The caller sees a plain loop: each call of ``progress`` runs one batch and returns its output, ``StopIteration`` follows
the last batch, and an exception of the loader is raised after the batches that the loader yielded before it.

A batch goes through stages in this order: load, copy, in :mod:`pipe.train.sparse` also distribute, exchange and
prefetch, then forward and backward. Each stage before the forward has a lane (:mod:`pipe.train.lane`) and a number of
batches that it runs *ahead* of the one that computes. A call of ``progress`` submits each stage for the batches up to
that number, waits for the batch that computes, and runs it::

    load  ahead 2    call 0   load.0 load.1 load.2  copy.0 copy.1 copy.2  forward.0 backward.0
    copy  ahead 2    call 1   load.3 copy.3  forward.1 backward.1
                     call 2   load.4 copy.4  forward.2 backward.2

Invariants
    * Each batch that was read from a loader is trained on exactly once, in order, and the parameters after it are
      those of a plain loop.
    * A stage runs once for each batch, in the order of the batches, and after the stages before it.
    * The loader's iterator is used inside ``progress`` alone (after an interrupt: until the next call).

After an exception in the model, the optimizer or a stage, the failed batch is not run again, batches in flight are
kept, and the next call runs the next batch. If its forward had begun, the open accumulation window is discarded (see
:mod:`pipe.train.window`). An interrupt before that loses no batch.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipe.stream import normalize_device
from pipe.train.batch import move, pageable_bytes, record_stream
from pipe.train.lane import InlineLane, Lane, Lanes, Ticket
from pipe.train.source import Agreement, Kind, Source, kind_of
from pipe.train.window import Window, checked_pair

__all__ = ["InFlight", "Statistics", "TrainPipelineBase"]


class _Skipped(Exception):
    """A stage was not run because one before it failed."""


@dataclass(eq=False)
class InFlight:
    """One batch: the tickets of the stages that have begun on it, and their results."""

    source: Source
    tickets: dict[str, Ticket[None]] = field(default_factory=dict)
    host: Any = Kind.UNREAD  # by load
    batch: Any = None  # by copy
    requests: Any = ()  # by distribute
    last: bool = False  # whether its loader is known to have ended after it
    begun: bool = False  # by forward, as are the next
    losses: Any = None
    output: Any = None

    @property
    def kind(self) -> Kind:
        """Of what was read."""
        return kind_of(self.host)


@dataclass(frozen=True)
class Statistics:
    """Counted since construction.

    Attributes:
        batches: batches that were run.
        steps: optimizer steps.
        wait_seconds: for each stage before the forward, how long the caller's thread was blocked waiting for it.
        pageable_bytes: host bytes whose copy could not overlap with compute because their memory was not pinned.
        undistributed: for each module whose input distribution could not start before its forward, the reason.
        batches_in_turn: batches that were read on demand and not ahead, because loader and model draw from the same
            random generator (:mod:`pipe.train.source`).
    """

    batches: int
    steps: int
    wait_seconds: Mapping[str, float]
    pageable_bytes: int
    undistributed: Mapping[str, str]
    batches_in_turn: int = 0


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
        ahead: stages (``"load"``, ``"copy"``) with the number of batches that they run ahead of the one that computes,
            where it differs from :attr:`default_ahead`. 0 everywhere is a plain loop: a batch is read after the batch
            before it has been trained on. With ``grad_accum`` a loader's last window may then step when ``progress``
            raises ``StopIteration``, and replicas communicate after each batch.
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

    Several batches are in flight, so a loader must allocate new memory for each batch. An iterator is read in another
    thread, under the caller's grad mode and autocast, and only inside ``progress``, which returns after the reads that
    it has begun. So a loader may reset its iterator in place for the next epoch, as a ``DataLoader`` with
    ``persistent_workers`` does, also where the end of the epoch before has been read ahead.

    If loader and model draw random numbers from the same generator, batches are read on demand instead, so that a seed
    gives the same result as a plain loop. See :mod:`pipe.train.source`; a loader with a generator of its own is read
    ahead.

    A model in ``eval`` mode, or under ``no_grad``, only runs forward. Use one pipeline for training and one for
    evaluation: batches in flight belong to the mode in which they were requested.

    Source: torchrec's ``TrainPipelineBase`` (Meta, 2022).
    """

    default_ahead: Mapping[str, int] = {"load": 2, "copy": 2}
    #: Stages before the forward, in the order in which one batch goes through them.
    _stages: Sequence[str] = ("load", "copy")
    #: Those that a call of ``progress`` runs ahead before its forward, and between forward and backward.
    _around_forward: tuple[Sequence[str], Sequence[str]] = (("load", "copy"), ())
    _forward_only = False
    _forward_stream: torch.cuda.Stream | None = None  # of the latest call

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
        scaler = torch.amp.GradScaler(self._device.type, enabled=amp_dtype is torch.float16 and grad_scaling)
        self._window = Window(model, optimizer, grad_accum, scaler, forward_only=self._forward_only)
        if custom_model_fwd is not None and not callable(custom_model_fwd):
            kind = type(custom_model_fwd).__name__
            raise TypeError(f"expected custom_model_fwd to be None or to be called with a batch, got {kind}")
        self._custom_model_fwd = custom_model_fwd
        self._amp_dtype = amp_dtype
        self._execute_all_batches = execute_all_batches
        wrong = {name: depth for name, depth in (ahead or {}).items() if name not in self.default_ahead or depth < 0}
        if wrong:
            raise ValueError(f"expected ahead >= 0 for stages of {sorted(self.default_ahead)}, got {wrong}")
        self._ahead = {**self.default_ahead, **(ahead or {})}
        self._lanes = lanes or Lanes.for_device(self._device)
        self._lane: dict[str, Lane] = {**vars(self._lanes), "exchange": self._lanes.distribute}
        #: For each stage, the one that it waits for.
        self._before = dict(zip(self._stages[1:], self._stages, strict=False))
        before, after = self._around_forward
        if enqueue_batch_after_forward:
            before, after = [name for name in before if name != "copy"], ["copy", *after]
        self._before_forward, self._after_forward = before, after
        # Reads in the caller's thread are ordered with everything else in it; so are reads that never run ahead.
        beside_compute = not isinstance(self._lanes.load, InlineLane) and any(self._ahead.values())
        self._device_of_draws = self._device if beside_compute else None
        self._agreement = Agreement(process_group, uneven)
        #: None before the first iterator, and after an iterator's end or failure has been reported.
        self._source: Source | None = None
        self._restored: deque[Any] = deque()
        self._trains = True  # whether the latest call trained
        self._flight: deque[InFlight] = deque()  # the first is the one that computes
        self._batches = self._batches_in_turn = self._pageable_bytes = 0
        self._wait_seconds = dict.fromkeys(self._stages, 0.0)
        self._thread = 0  # of the latest call
        self._undistributed: dict[str, str] = {}

    # ---------------------------------------------------------------------------------------------- stages

    def _load(self, batch: InFlight) -> None:
        batch.host = batch.source.read()

    def _copy(self, batch: InFlight) -> None:
        pageable = pageable_bytes(batch.host, self._device)
        if pageable and not self._pageable_bytes:
            warnings.warn(
                f"a batch holds {pageable} bytes of pageable memory: copying them to {self._device} cannot overlap "
                f"with compute; pin them (DataLoader(pin_memory=True))",
                stacklevel=2,
            )
        self._pageable_bytes += pageable
        # The host side of the copy stays referenced by `host` until the batch has been run.
        batch.batch = move(batch.host, self._device)

    def _forward(self, batch: InFlight) -> None:
        record_stream(batch.batch, self._forward_stream)  # it uses memory that was allocated on the copy stream
        batch.begun = True
        with self._window.forward(self._trains, self._is_last), self._autocast():
            batch.losses, batch.output = checked_pair(self._call_model(batch))

    def _call_model(self, batch: InFlight) -> Any:
        return (self._custom_model_fwd or self._window.model)(batch.batch)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._amp_dtype)

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
        self._thread = threading.get_ident()
        self._forward_stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        source = self._connect(dataloader_iter)
        in_turn = source.in_turn
        try:
            batch = self._run(source)
        except BaseException as error:
            if self._flight and self._flight[0].begun:
                self._flight.popleft()
                self._window.discard()
            if isinstance(error, Exception):
                self._settle()
            if isinstance(error, StopIteration):
                # Without this, a StopIteration inside the model would look like the end of the loader.
                raise RuntimeError("a stage of a batch raised StopIteration") from error
            raise
        self._settle()
        if batch.kind is Kind.END:
            self._source = None
            if self._trains and not self._flight:
                self._window.finish()
            raise StopIteration
        self._batches += 1
        self._batches_in_turn += in_turn
        return batch.output

    def _run(self, source: Source) -> InFlight:
        """Runs the batch that is first in flight, and stages of those behind it.

        Returns that batch, or the end of the iterator, which stays in flight where ``execute_all_batches`` is False.
        """
        if not self._execute_all_batches:
            self._run_ahead("load", source)
            self._settle()
            if len(self._flight) > 1 and self._flight[-1].kind is Kind.END:
                return self._flight[-1]
        for name in self._before_forward:
            self._run_ahead(name, source)
        self._submit(self._stages[-1], 0, source)
        batch = self._arrived()
        if batch.kind is Kind.BATCH:
            self._forward(batch)
            for name in self._after_forward:
                self._run_ahead(name, source)
            if self._trains:
                self._window.backward(batch.losses)
        self._flight.popleft()
        return batch

    def _run_ahead(self, name: str, source: Source) -> None:
        for k in range(self._ahead[name] + 1):
            if k and source.in_turn:
                break
            self._submit(name, k, source)

    def _submit(self, name: str, k: int, source: Source) -> None:
        """Submits the stages up to ``name`` that the ``k``-th batch in flight has not gone through to their lanes."""
        if k == len(self._flight) and not source.stopped:
            self._flight.append(InFlight(source))
        if k >= len(self._flight) or self._flight[k].begun:
            return
        batch = self._flight[k]
        for stage in self._stages[: self._stages.index(name) + 1]:
            if stage in batch.tickets or not self._may_run(stage):
                continue
            alone = stage == "load" and batch.source.reads_alone
            batch.tickets[stage] = self._lane[stage].submit(partial(self._work, stage, batch))
            if alone:
                # Without this, random numbers drawn by the read could not be told from those drawn by this thread.
                self._wait(batch, stage)

    def _may_run(self, stage: str) -> bool:
        """Whether a stage may run already; if not, it does later, or the forward does without it."""
        return True

    def _work(self, stage: str, batch: InFlight) -> None:
        # Without this, the stage would read before the one before it has written: on the host, or on its stream.
        if stage in self._before and not self._wait(batch, self._before[stage]):
            raise _Skipped
        if batch.kind in (Kind.UNREAD, Kind.BATCH):
            getattr(self, f"_{stage}")(batch)

    def _wait(self, batch: InFlight, stage: str) -> bool:
        """Waits for a stage; returns whether it succeeded."""
        start = time.perf_counter()
        succeeded = batch.tickets[stage].succeeded()
        if threading.get_ident() == self._thread:
            self._wait_seconds[stage] += time.perf_counter() - start
        return succeeded

    def _arrived(self) -> InFlight:
        """The first batch in flight, when it has gone through its stages. Raises what they raised, and drops it."""
        batch = self._flight[0]
        # Without this, the forward would begin before the batch is there. The last stage has waited for the others.
        if not self._wait(batch, next(reversed(batch.tickets))):
            self._flight.popleft()
            if batch.kind is Kind.UNREAD and batch.source is self._source:
                self._source = None  # the caller may read the iterator again
            for ticket in batch.tickets.values():
                ticket.wait()
        return batch

    def _is_last(self) -> bool | None:
        """Whether the loader ends after the first batch in flight; None if the next read failed or may not begin."""
        if self._flight[0].last:
            return True
        if self._source is not None and self._ahead["load"] and not self._source.in_turn:
            self._submit("load", 1, self._source)
        if len(self._flight) == 1:
            return None
        self._wait(self._flight[1], "load")
        return {Kind.END: True, Kind.BATCH: False}.get(self._flight[1].kind)

    def _settle(self) -> None:
        """Waits for the reads that have begun, and forgets those behind an end or a failure."""
        for batch in self._flight:
            if "load" in batch.tickets:
                self._wait(batch, "load")
            else:
                self._source = None  # an interrupt ended its read; the next call makes another source
        self._flight = deque(
            batch for batch in self._flight if "load" in batch.tickets and batch.kind is not Kind.NOTHING
        )

    def _connect(self, iterator: Iterator[Any]) -> Source:
        """The source of ``iterator``: the present one, or a new one."""
        self._settle()
        source, trains = self._source, self._window.trains()
        same = source is not None and source.iterator is iterator and not source.was_reset()
        if not same and trains is not self._trains and any(batch.kind is Kind.BATCH for batch in self._flight):
            raise ValueError(
                f"expected the model in {'train' if self._trains else 'eval'} mode for the batches in flight, got "
                f"model.training={self._window.model.training} with another iterator; run the first iterator to its "
                f"end, or use a second pipeline"
            )
        # In another mode the model may use other generators, and ranks may need no agreement.
        if not same or source is None or (trains is not self._trains and not source.stopped):
            if self._flight and self._flight[-1].kind is Kind.END:
                # That of another iterator, or one that has been told already.
                self._flight.pop()
                if self._flight:
                    self._flight[-1].last = True
            agreement = self._agreement if self._agreement.needed(self._window.model, trains) else None
            # One that is read on in another mode is not read ahead before it has been observed.
            in_turn = same and self._device_of_draws is not None
            source = self._source = Source(iterator, self._restored, agreement, self._device_of_draws, in_turn)
        self._trains = trains
        return source

    def reset(self) -> None:
        """Drops the batches in flight and the open window; parameters and optimizer stay as they are.

        For training that starts again from a checkpoint. The next ``progress`` continues to read its iterator at the
        present position, which is behind the dropped batches. Waits for reads and copies that are under way.
        """
        for batch in self._flight:
            for ticket in batch.tickets.values():
                ticket.succeeded()
        self._flight.clear()
        self._restored.clear()
        self._source = None
        self._window.discard()

    # ------------------------------------------------------------------------------- statistics and state

    def statistics(self) -> Statistics:
        """Counts since construction, among them whether and why overlap is missing."""
        waited, reasons = dict(self._wait_seconds), dict(self._undistributed)
        return Statistics(
            self._batches, self._window.steps, waited, self._pageable_bytes, reasons, self._batches_in_turn
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that a new pipeline needs to continue: the open window, the scaler, and the batches in flight.

        Model, optimizer and loader have states of their own. The loader's position is *behind* the batches in flight:
        this state keeps those as the loader yielded them.
        """
        self._settle()
        reads = [*(batch.host for batch in self._flight), *self._restored]
        return {
            "window": self._window.state_dict(),
            "batches": self._batches,
            "in_flight": [read for read in reads if kind_of(read) is Kind.BATCH],
            "ended": Kind.END in map(kind_of, reads),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where :meth:`state_dict` was called; the restored batches run before those of the next iterator.

        Raises:
            ValueError: if this pipeline has batches in flight itself, or other settings; nothing is changed then.
        """
        if self._restored or any(batch.kind is Kind.BATCH for batch in self._flight):
            raise ValueError("expected a pipeline without batches in flight to load a state into; make a new one")
        self._window.load_state_dict(state["window"])
        self._batches = state["batches"]
        self._flight.clear()
        self._source = None
        self._restored.extend([*state["in_flight"], *[Kind.END] * state["ended"]])
