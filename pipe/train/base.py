"""A training loop that loads and copies the next batches while one computes, and loses none of them.

:class:`TrainPipelineBase` carries out a :class:`~pipe.train.schedule.Schedule`: it hands each stage of each batch to
its lane, waits where the schedule says, and speaks to the caller in the words of a plain loop: one batch, one output;
``StopIteration`` after the last one; the loader's exception in the loader's place.

Invariant: each batch that was read from a loader is trained on exactly once, in order, and the parameters after it are
those of a plain loop.

After an exception of the model, the optimizer or a stage: the batch that it struck is not run again, the open window
is abandoned (see :mod:`pipe.train.window`), batches in flight are kept, and the next call goes on with the next batch.
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

from pipe.train.batch import move, pageable_bytes, record_stream
from pipe.train.compute import Compute
from pipe.train.flight import Flight, SkippedStage
from pipe.train.lane import InlineLane, Lanes
from pipe.train.reader import Reader
from pipe.train.schedule import Action, Schedule, Stage
from pipe.train.source import Kind, Read
from pipe.train.statistics import Statistics
from pipe.train.window import Window

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
        optimizer: zeroed and stepped by the pipeline. Several are stepped together, such as one for an embedding
            table and one for the rest.
        device: where batches go. The model is there already.
        grad_accum: batches per optimizer step; the step sees their mean. None: every batch.
        amp_dtype: autocast to this type, or None.
        grad_scaling: scale the loss where ``amp_dtype`` is fp16 (never otherwise: bf16 has the range of fp32).
        ahead: by stage name, how many batches it runs ahead, where that is to differ from :attr:`default_ahead`.
            0 everywhere is a plain loop: a batch is read after the one before it has been trained on. With
            ``grad_accum`` a loader's last window may then step when ``progress`` raises ``StopIteration``, and
            replicas communicate after each batch.
        lanes: where the stages run; by default the loader and the copies run in threads. ``Lanes.serial()`` reads the
            loader in the caller's thread.
        process_group: ranks of this group (CPU backend, used for nothing else) agree that all of them have another
            batch. None: made when the model is replicated or sharded over the whole world, by the first ``progress``
            (for a replicated model: the first that trains; evaluation on one rank alone needs no agreement).
        uneven: what ranks do when one loader ends early, ``"raise"`` or ``"stop"``; see
            :class:`~pipe.train.source.Agreement`.
        custom_model_fwd: called with a batch in the model's place, returns ``(losses, output)``.
        execute_all_batches: run the batches that were read ahead when the loader ends. False: ``progress`` raises
            ``StopIteration`` as soon as a read ahead finds the loader's end. The batches in flight then wait for the
            next iterator, before whose batches they run, or for :meth:`reset`, which drops them.
        enqueue_batch_after_forward: copy the batch ahead behind the forward and not before it, so that the copy does
            not take the bus from a forward that reads host memory.

    A loader must give each batch memory of its own: several batches are in flight. It is read ahead in another thread,
    under the caller's grad mode and autocast. If it draws random numbers from a generator that the model draws from as
    well, its batches are read in turn instead, so that one seed gives one result: that of a plain loop. See
    :mod:`pipe.train.draws`; a loader with a generator of its own is read ahead.

    The model in ``eval`` mode, or under ``no_grad``, only runs forward. Use one pipeline for training and one for
    evaluation: batches in flight belong to the mode in which they were asked for.

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
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        scaled = amp_dtype is torch.float16 and grad_scaling
        scaler = torch.amp.GradScaler(self._device.type) if scaled else None
        self._window = Window(model, optimizer, grad_accum, scaler, steps_nothing=self._forward_only)
        self._compute = Compute(
            model, self._window, self._device.type, amp_dtype, custom_model_fwd, forward_only=self._forward_only
        )
        self._execute_all_batches = execute_all_batches
        self._copy_after_forward = enqueue_batch_after_forward
        self._lanes = lanes or Lanes.for_device(self._device)
        unknown = sorted(set(ahead or ()) - set(self.default_ahead))
        if unknown:
            raise ValueError(f"expected stages of {sorted(self.default_ahead)} in ahead, got {unknown} (ahead={ahead})")
        self._ahead = {**self.default_ahead, **(ahead or {})}
        self._schedule = Schedule(self.stages())
        # Reads in the caller's thread are in one order with all else; so are those that are never ahead.
        beside_compute = not isinstance(self._lanes.load, InlineLane) and any(self._ahead.values())
        self._reader = Reader(self._compute, self._device, (process_group, uneven), beside_compute=beside_compute)
        self._flights: dict[int, Flight] = {}
        self._position = 0  # index of the flight that computes next
        self._window_iterator: Iterator[Any] | None = None  # that the open window's latest batch came from
        self._batches = 0
        self._batches_in_turn = 0
        self._pageable_bytes = 0
        self._wait_seconds = {stage.name: 0.0 for stage in self._schedule.stages}
        self._undistributed: dict[str, str] = {}

    # ---------------------------------------------------------------------------------------------- stages

    def stages(self) -> list[Stage]:
        """The pipeline as data. A subclass adds its own."""
        lanes, ahead = self._lanes, self._ahead
        load = Stage("load", lanes.load, self._load, ahead["load"])
        copy = Stage("copy", lanes.copy, self._copy, ahead["copy"], after=("load",))
        forward = Stage("forward", lanes.compute, self._forward, after=("copy",))
        backward = Stage("backward", lanes.compute, self._backward, after=("forward",))
        return [load, forward, copy, backward] if self._copy_after_forward else [load, copy, forward, backward]

    def _load(self, flight: Flight) -> None:
        flight.read = flight.source.read()

    def _copy(self, flight: Flight) -> None:
        assert flight.read is not None
        pageable = pageable_bytes(flight.read.batch, self._device)
        if pageable and not self._pageable_bytes:
            warnings.warn(
                f"batch {flight.index} holds {pageable} bytes of pageable memory: copying them to {self._device} "
                f"cannot overlap with compute; pin them (DataLoader(pin_memory=True))",
                stacklevel=2,
            )
        self._pageable_bytes += pageable
        # The host side of the copy stays referenced by flight.read until the batch has been run.
        flight.batch = move(flight.read.batch, self._device)

    def _forward(self, flight: Flight) -> None:
        self._use(flight.batch)
        flight.computing = True
        if self._compute.trains():
            last = self._is_last(flight.index) if self._window.must_know_the_end else None
            flight.micro = self._window.open(last=last)
            self._window_iterator = flight.source.iterator
        flight.losses, flight.output = self._compute.forward(partial(self._call_model, flight), flight.micro)
        flight.computing = False

    def _call_model(self, flight: Flight) -> Any:
        return self._compute.call(flight.batch)

    def _backward(self, flight: Flight) -> None:
        flight.computing = True
        if flight.micro is not None:
            self._window.backward(flight.micro, flight.losses, self._before_step)
        flight.computing = False

    def _before_step(self) -> None:
        """What a subclass does between a window's last backward and the step."""

    def _use(self, value: Any) -> None:
        """Says that the current stream uses memory that the copy stream allocated."""
        if self._lanes.copy.stream is not None:
            record_stream(value, torch.cuda.current_stream(self._device))

    # ------------------------------------------------------------------------------------------ the runtime

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Runs the next batch and returns the model's output for it.

        Args:
            dataloader_iter: an iterator over batches; up to ``ahead`` batches are read from it in advance. With
                another one than before, the batches in flight run first.

        Raises:
            StopIteration: after the last batch of this iterator has run (or before: ``execute_all_batches``).
            ValueError: if batches in flight were asked for in another mode (``train`` or ``eval``).
            Exception: what the loader raised, after the batches that it gave before; what the model raised.
        """
        if self._reader.connect(dataloader_iter, self._flights.values()):
            self._window_iterator = dataloader_iter  # of the window that may have been restored as well
        while True:
            in_turn = self._reader.in_turn
            flight = self._tick()
            if flight is None:  # the end is in sight, and no more is to be run
                self._reader.disconnect()
                raise StopIteration
            if flight.read is not None and flight.read.kind is Kind.BATCH:
                self._batches += 1
                self._batches_in_turn += in_turn
                return flight.output
            if flight.read is not None and flight.read.kind is Kind.END and flight.source is self._reader.source:
                self._reader.disconnect()
                ended, self._window_iterator = self._window_iterator, None
                if ended is flight.source.iterator:
                    self._window.finish(self._before_step)
                raise StopIteration
            # Nothing to run here: an iterator that was left, or told of its end or failure. Never the present one.
            assert flight.source is not self._reader.source

    def _tick(self) -> Flight | None:
        """One tick of the schedule; returns the flight that has now been through all stages.

        None if nothing was run because the end is in sight.
        """
        i = self._position
        try:
            if not self._execute_all_batches and self._end_in_sight(i):
                return None
            for action in self._schedule.tick(i, self._may_run_ahead):
                self._run(action)
        except BaseException:
            # An interrupt of this thread: failures of stages wait in their tickets. Whatever it struck is done again
            # by the next call, save a forward or backward, which cannot be taken back.
            if i in self._flights and self._flights[i].computing:
                self._land(i)
                self._window.abandon()
            # Whose reading may have been interrupted: the next call makes another source of the iterator.
            self._reader.disconnect()
            raise
        flight = self._land(i)
        try:
            tickets = [flight.tickets[stage.name] for stage in self._schedule.stages]
            # Last stage first: a wait that is missing among the stages must not be made up for here.
            if not all(ticket.succeeded() for ticket in reversed(tickets)):
                for ticket in tickets:
                    with contextlib.suppress(SkippedStage):
                        ticket.wait()
        except BaseException as error:
            if flight.computing:
                self._window.abandon()
            if flight.read is None and flight.source is self._reader.source:
                self._reader.disconnect()  # the caller knows of the loader's failure now, and may go on reading
            if isinstance(error, StopIteration):
                # Without this, a StopIteration inside the model would pass for the end of the loader.
                raise RuntimeError(f"a stage of batch {i} raised StopIteration") from error
            raise
        return flight

    def _land(self, i: int) -> Flight:
        self._position = i + 1
        return self._flights.pop(i)

    def _run(self, action: Action) -> None:
        """Hands one stage of one batch to its lane."""
        stage, k = action
        if k < self._position:
            return  # an interrupt struck this batch
        if k not in self._flights:
            assert self._reader.source is not None
            self._flights[k] = Flight(k, self._reader.source)
        flight = self._flights[k]
        if stage.name in flight.tickets:  # a restored batch has been loaded already
            return
        alone = stage.name == "load" and flight.source.reads_alone
        ticket = stage.lane.submit(partial(self._work, stage, flight, threading.get_ident()))
        flight.tickets[stage.name] = ticket
        if alone:
            start = time.perf_counter()
            # Without this, what the read draws and what this thread draws could not be told apart.
            ticket.succeeded()
            self._wait_seconds[stage.name] += time.perf_counter() - start

    def _end_in_sight(self, i: int) -> bool:
        """Whether one of the reads ahead of batch ``i`` has found the end of the present iterator."""
        k, ahead = i, 0
        while ahead <= self._ahead["load"] and (k == i or self._may_run_ahead()):
            for action in self._schedule.reach("load", k):
                self._run(action)
            flight = self._flights[k]
            if flight.source is self._reader.source and not flight.holds_batch():  # it has ended or failed
                return flight.found_end() and self._flights[i].holds_batch()
            # The end of an iterator before takes a place, but is no batch.
            ahead += k == i or flight.holds_batch()
            k += 1
        return False

    def _may_run_ahead(self) -> bool:
        return not self._reader.in_turn

    def _work(self, stage: Stage, flight: Flight, caller: int) -> None:
        for name in stage.after:
            start = time.perf_counter()
            # Without this, the stage would read what stage `name` has yet to write: on the host, or on its stream.
            succeeded = flight.tickets[name].succeeded()
            if threading.get_ident() == caller:
                self._wait_seconds[name] += time.perf_counter() - start
            if not succeeded:
                raise SkippedStage
        if flight.read is None or flight.read.kind is Kind.BATCH:
            stage.work(flight)

    def _is_last(self, i: int) -> bool | None:
        """Whether the loader ends after batch ``i``, if its next read is under way; waits for it then.

        None if nothing has been read beyond ``i``, since the next batch may depend on what becomes of this one; or if
        the next read failed.
        """
        if self._ahead["load"] and self._may_run_ahead():
            for action in self._schedule.reach("load", i + 1):
                self._run(action)
        following = self._flights.get(i + 1)
        if following is None or "load" not in following.tickets:
            return None
        following.tickets["load"].succeeded()
        return None if following.read is None else following.read.kind is Kind.END

    def reset(self) -> None:
        """Drops the batches in flight and the open window; parameters and optimizer stay as they are.

        For training that starts again from a checkpoint. The next ``progress`` reads the iterator that it is given,
        where that stands: behind the batches that were dropped. Waits for reads and copies that are under way.
        """
        for flight in self._flights.values():
            for ticket in flight.tickets.values():
                ticket.succeeded()
        self._drop_flights()
        self._window_iterator = None
        self._reader.reset()
        self._window.abandon()

    def _drop_flights(self) -> None:
        # Stages are behind the flights by different numbers of batches: none of them is to run for what is dropped.
        self._position = max([self._position - 1, *self._flights]) + 1
        self._flights.clear()

    # ----------------------------------------------------------------------------------- what users look at

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
        """All that a new pipeline needs to go on: the open window, the scaler, and the batches in flight.

        Model, optimizer and loader have states of their own. The loader's position is the one *behind* the batches in
        flight: they are kept here as the loader gave them. Waits for reads that are under way.
        """
        flights = [self._flights[k] for k in sorted(self._flights)]
        batches = [flight.read.batch for flight in flights if flight.holds_batch() and flight.read is not None]
        return {
            "window": self._window.state_dict(),
            "batches": self._batches,
            "in_flight": batches,
            "ended": any(flight.read is not None and flight.read.kind is Kind.END for flight in flights),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was taken: the next iterator is read behind the batches in flight.

        Raises:
            ValueError: if this pipeline has batches in flight itself, or other settings; nothing is changed then.
        """
        if any(flight.holds_batch() for flight in self._flights.values()):
            raise ValueError("expected a pipeline without batches in flight to load a state into; make a new one")
        self._window.load_state_dict(state["window"])
        self._batches = state["batches"]
        # The batches of the first iterator come behind these.
        restored = self._reader.restore(ended=state["ended"])
        self._drop_flights()
        reads = [Read(Kind.BATCH, batch) for batch in state["in_flight"]] + [Read(Kind.END)] * state["ended"]
        for k, read in enumerate(reads, self._position):
            self._flights[k] = Flight.loaded(k, restored, read)
