"""Tracks the iterator that a train pipeline reads and its batches in flight; handles a change of iterator or mode."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipe.train.draws import Draws
from pipe.train.lane import Ticket
from pipe.train.source import Agreement, Kind, Read, Source
from pipe.train.window import MicroStep, Window

__all__ = ["PendingBatch", "Reader", "SkippedStage"]


class SkippedStage(Exception):
    """A stage was not run because one that it needs failed."""


class PendingBatch:
    """One batch in flight: its tickets, and the result of each stage that has run on it."""

    __slots__ = ("batch", "computing", "index", "losses", "micro", "output", "read", "requests", "source", "tickets")

    def __init__(self, index: int, source: Source) -> None:
        self.index = index
        self.source = source
        self.tickets: dict[str, Ticket[None]] = {}
        self.read: Read | None = None  # by load
        self.batch: Any = None  # by copy: the batch on the device
        self.requests: Any = None  # by distribute
        self.micro: MicroStep | None = None  # by forward, as are losses and output
        self.losses: Any = None
        self.output: Any = None
        self.computing = False  # inside a forward or backward, which cannot be run again once it has begun

    @classmethod
    def loaded(cls, index: int, source: Source, read: Read) -> PendingBatch:
        """A batch that was read in an earlier run and restored from that run's ``state_dict``."""
        pending = cls(index, source)
        pending.read = read
        pending.tickets["load"] = Ticket()
        pending.tickets["load"].run(lambda: None)
        return pending

    def kind(self) -> Kind | None:
        """What its read has found; waits for the read. None if that has not begun or has failed."""
        if "load" in self.tickets:  # else an interrupt came before the read
            self.tickets["load"].succeeded()
        return None if self.read is None else self.read.kind


class Reader:
    """Makes a :class:`~pipe.train.source.Source` of each iterator that ``progress`` is called with.

    Args:
        window: holds the model; batches are read for the mode that it is in.
        device: the device whose generator loaders may draw from.
        ranks: ``group`` and ``uneven`` of :class:`~pipe.train.source.Agreement`.
        beside_compute: whether reads may run while the model computes.
    """

    def __init__(
        self,
        window: Window,
        device: torch.device,
        ranks: tuple[dist.ProcessGroup | None, str] = (None, "raise"),
        *,
        beside_compute: bool,
    ) -> None:
        #: None before the first iterator, and after an iterator's end has been reported.
        self.source: Source | None = None
        self._window = window
        self._ranks = ranks
        self._agreement = Agreement.for_model(window.model, *ranks)
        self._device = device
        self._beside_compute = beside_compute
        self._restored: Source | None = None  # of a loaded state; replaced by the source of the first iterator
        self._training = True  # the mode in which the batches of the present source were requested
        self._trained = True  # whether the latest call trained

    @property
    def in_turn(self) -> bool:
        """Whether batches are read on demand only (:mod:`pipe.train.draws`)."""
        return self.source is not None and self.source.in_turn

    def connect(self, iterator: Iterator[Any], pending: Collection[PendingBatch]) -> bool:
        """Makes ``iterator`` the present source; returns whether it continues a loaded state."""
        trains, training = self._window.trains(), self._window.model.training
        restored, self._restored = self._restored, None
        if restored is not None:
            self.source = self._new_source(iterator, stopped=restored.stopped)
            for each in pending:
                each.source = self.source
            self._training = training
        elif self.source is None or self.source.iterator is not iterator or self.source.was_reset():
            if training is not self._training and any(each.kind() is Kind.BATCH for each in pending):
                raise ValueError(
                    f"expected the model in {'train' if self._training else 'eval'} mode for the batches in flight, "
                    f"got model.training={training} with another iterator; run the first iterator to its end, or use "
                    f"a second pipeline"
                )
            self.source = self._new_source(iterator)
            self._training = training
        elif trains is not self._trained and self.source.drew:
            # The model may use other generators in this mode: wait for the reads ahead, then observe again.
            for each in pending:
                each.kind()
            self.source.change_mode()
        self._trained = trains
        return restored is not None

    def attach(self, model: nn.Module) -> None:
        """Reads the next sources for this model."""
        agreement = Agreement.for_model(model, *self._ranks)
        if agreement is not None and self._agreement is not None:
            agreement.group = self._agreement.group
        self._agreement = agreement

    def _new_source(self, iterator: Iterator[Any], *, stopped: bool = False) -> Source:
        agreement = None if self._agreement is None else self._agreement.prepare(self._window.trains())
        draws = Draws(iterator, self._device) if self._beside_compute else None
        return Source(iterator, agreement, draws, stopped=stopped)

    def disconnect(self) -> None:
        """Forgets the present source: the next call makes a new one of its iterator, even if it is the same."""
        self.source = None

    def restore(self, *, ended: bool) -> Source:
        """A source for batches of a loaded state, to be continued by the first iterator unless ``ended``."""
        self._restored = Source(iter(()), stopped=ended)
        return self._restored

    def reset(self) -> None:
        """Forgets the present source and a restored one."""
        self.source = self._restored = None
