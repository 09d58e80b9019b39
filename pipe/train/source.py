"""Reads a data loader ahead of training, keeping the order of its batches, its end and its exceptions.

Guarantees
    * After its end or a failure the loader is not read again until this has been reported to the caller.
    * The end is reported once; reads that were already queued behind it, or behind a failure, are ``NOTHING``.

With several processes, ranks whose loaders have different lengths would wait for each other's collectives for ever.
With an :class:`Agreement`, all ranks exchange the result of each read before any of them trains on it. They also agree
whether batches are read ahead at all (:mod:`pipe.train.draws`), because that decides the order of their collectives.
"""

from __future__ import annotations

import contextlib
import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipe.nested import attributes_of
from pipe.train.draws import Draws

__all__ = ["Agreement", "Kind", "Read", "Source"]


class Kind(enum.IntEnum):
    """The result of one read, also as sent to other ranks: a batch, the loader's end, or nothing because it failed."""

    END = 0
    BATCH = 1
    NOTHING = 2


class Read(NamedTuple):
    """The result of one read."""

    kind: Kind
    batch: Any = None


class Agreement:
    """Checks over all ranks, for each read, that all have a batch or all have reached the end.

    Args:
        group: a process group with a CPU backend, used for nothing else, since the agreement runs in another thread
            than the model's collectives. None: a group over the world, made when it is first needed.
        uneven: what ranks do when some loaders end before others. ``"raise"``: a ``ValueError`` on every rank, after
            the last batch that all ranks have. ``"stop"``: every rank ends there, and surplus batches are not run.
    """

    def __init__(self, group: dist.ProcessGroup | None, uneven: str = "raise") -> None:
        if uneven not in ("raise", "stop"):
            raise ValueError(f"expected uneven='raise' or 'stop', got uneven={uneven!r}")
        self._group = group
        self._always = group is not None
        self._uneven = uneven

    def needed(self, model: nn.Module, trains: bool) -> bool:
        """Whether ranks must agree on the batches of ``model``: given a group, or if the model spans the world.

        Replicas (``DistributedDataParallel``) communicate in training only: one rank may evaluate while others wait.
        The first call that returns True makes the group, which is a collective call: all ranks must begin their
        pipelines in one order.
        """
        if self._always:
            return True
        if not (dist.is_available() and dist.is_initialized()) or (world := dist.get_world_size()) == 1:
            return False
        groups = [(module, _group_of(module)) for module in model.modules()]
        spanning = [module for module, group in groups if group is not None and group.size() == world]
        if all(isinstance(module, DistributedDataParallel) and not trains for module in spanning):
            return False
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return True

    def agree(self, read: Read | None, in_turn: bool, batches: int) -> tuple[Read, bool]:
        """Exchanges the result of a read (None: it failed) after ``batches`` others with all ranks. A collective call.

        Returns:
            the read of this rank (``END`` if another rank's loader ended and ``uneven="stop"``), and whether the next
            read must not run ahead because it must not do so on some rank.
        """
        assert self._group is not None
        kind = Kind.NOTHING if read is None else read.kind
        told = [torch.zeros(2, dtype=torch.int64) for _ in range(self._group.size())]
        dist.all_gather(told, torch.tensor([kind, in_turn], dtype=torch.int64), group=self._group)
        in_turn = any(bool(t[1]) for t in told)
        ranks = {kind: [rank for rank, t in enumerate(told) if int(t[0]) == kind] for kind in Kind}
        if read is None:
            return Read(Kind.NOTHING), in_turn  # the loader's own exception is being raised
        if ranks[Kind.NOTHING]:
            raise RuntimeError(
                f"the data loader of rank(s) {ranks[Kind.NOTHING]} failed at batch {batches}; see the error there"
            )
        if ranks[Kind.END] and ranks[Kind.BATCH]:
            if self._uneven == "stop":
                return Read(Kind.END), in_turn
            raise ValueError(
                f"expected data loaders of one length on all ranks, got the end after {batches} batches on rank(s) "
                f"{ranks[Kind.END]} and another batch on rank(s) {ranks[Kind.BATCH]}; make them equally long "
                f"(DistributedSampler with drop_last or padding), or pass uneven='stop' to end with the shortest"
            )
        return read, in_turn


def _group_of(module: nn.Module) -> dist.ProcessGroup | None:
    if isinstance(module, DistributedDataParallel):
        return module.process_group
    group = getattr(getattr(module, "_env", None), "process_group", None)  # a sharded module of torchrec
    return group if isinstance(group, dist.ProcessGroup) else None


@dataclass(eq=False)
class Source:
    """The iterator of one loader, whether it may still be read, and whether it may be read ahead."""

    iterator: Iterator[Any]
    #: Reads of an earlier run, which come before those of the iterator, and are taken from here.
    restored: deque[Read]
    agreement: Agreement | None
    #: Decides which reads may run ahead; None where reads never run beside the compute.
    draws: Draws | None
    #: Whether no batch may be read before it is needed.
    in_turn: bool
    #: Whether it has ended or failed.
    stopped: bool = False
    _observed: bool = False
    _reads: int = 0
    _at_end: dict[str, Any] | None = None

    @property
    def reads_alone(self) -> bool:
        """Whether the next read must run while nothing else does."""
        return self.draws is not None and not self.stopped and (self.in_turn or not self._observed)

    def was_reset(self) -> bool:
        """Whether the iterator began another epoch after its end was read.

        ``iter(loader)`` usually makes a new iterator. A ``DataLoader`` with ``persistent_workers=True`` resets the one
        that it has, and an object that is loader and iterator in one resets itself.
        """
        now, old = dict(attributes_of(self.iterator)), self._at_end
        return old is not None and (now.keys() != old.keys() or any(now[name] is not old[name] for name in now))

    def read(self) -> Read:
        """Reads the next batch, unless this source has ended or failed. Called by one lane, in order."""
        if self.stopped:
            return Read(Kind.NOTHING)
        read: Read | None = None
        try:
            try:
                read = self.restored.popleft() if self.restored else self._next()
            finally:
                if self.agreement is not None:
                    read, self.in_turn = self.agreement.agree(read, self.in_turn, self._reads)
        except BaseException:
            self.stopped = True
            raise
        self._reads += 1
        if read.kind is not Kind.BATCH:
            self.stopped, self._at_end = True, dict(attributes_of(self.iterator))
        return read

    def _next(self) -> Read:
        draws = self.draws if self.reads_alone else None
        with contextlib.nullcontext() if draws is None else draws.observing():
            try:
                read = Read(Kind.BATCH, next(self.iterator))
            except StopIteration:
                read = Read(Kind.END)
        if draws is not None:
            self._observed, self.in_turn = True, draws.shared()
        return read
