"""The state of one batch in flight: its tickets, and the result of each stage that has run on it."""

from __future__ import annotations

from typing import Any

from pipe.train.lane import Ticket
from pipe.train.source import Kind, Read, Source
from pipe.train.window import MicroStep

__all__ = ["Flight", "SkippedStage"]


class SkippedStage(Exception):
    """A stage was not run because one that it needs failed."""


class Flight:
    """One batch in flight. Each stage writes its result here."""

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
    def loaded(cls, index: int, source: Source, read: Read) -> Flight:
        """A flight whose batch was read in an earlier run and restored from that run's ``state_dict``."""
        flight = cls(index, source)
        flight.read = read
        flight.tickets["load"] = Ticket()
        flight.tickets["load"].run(lambda: None)
        return flight

    def holds_batch(self) -> bool:
        """Whether the loader had a batch for this flight. Waits for the read."""
        if "load" in self.tickets:  # else an interrupt came before the read
            self.tickets["load"].succeeded()
        return self.read is not None and self.read.kind is Kind.BATCH

    def found_end(self) -> bool:
        """Whether the read of this flight found the end of its loader. Waits for the read."""
        return not self.holds_batch() and self.read is not None and self.read.kind is Kind.END
