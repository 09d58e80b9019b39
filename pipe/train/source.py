"""Reads a data loader ahead of training, keeping the order of its batches, its end, its exceptions and its draws.

Guarantees
    * After its end or a failure the loader is not read again until this has been reported to the caller.
    * The end is reported once; reads that were already queued behind it, or behind a failure, are ``NOTHING``.

With several processes, ranks whose loaders have different lengths would wait for each other's collectives for ever.
With an :class:`Agreement`, all ranks exchange the result of each read before any of them trains on it. They also agree
whether batches are read ahead at all, because that decides the order of their collectives.

torch's default generators, Python's and NumPy's belong to the process and not to a thread. If the loader's thread
draws from one of them (an augmentation, a shuffled sampler) while the model draws from the same one (dropout), timing
decides which of them gets which number, and one seed gives different results. Therefore:

* If no generator is used by both the loader and the caller's thread, batches are read ahead.
* If both draw from one generator, batches are read *in turn*: on demand, while nothing computes. The order of draws,
  and therefore the numbers, are those of ``for batch in loader: step(batch)``.

Which generators are used is observed on reads that run alone: the first read of each iterator, and all reads in turn.
An iterator whose first read draws nothing counts as one that does not draw. The caller's draws are all those between
two observed reads: by the model, the optimizer, and the code around the pipeline.

An iterator of torch's own ``DataLoader`` draws its seeds with the first batch, so only its latest read counts; for
any other iterator all observed reads count, since an endless loader draws new seeds whenever it starts again.

Assumes
    * An iterator whose first batch needs no random number needs none later. (Otherwise, with a model that draws from
      the same generator, use ``Lanes.serial()``.)
    * Reads do not rewind a generator and restore it (``torch.random.fork_rng``) beside a model that draws from it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipe.nested import attributes_of
from pipe.recompute.replay import Replay
from pipe.torch_private.data import DataLoaderIterator

__all__ = ["Agreement", "Kind", "Source", "kind_of"]


class Kind(enum.IntEnum):
    """The result of one read, also as sent to other ranks. Those that are no batch stand in its place."""

    END = 0
    BATCH = 1
    UNREAD = 2  # it has not been read, or that failed
    NOTHING = 3  # read behind an end or a failure


def kind_of(read: Any) -> Kind:
    """Whether a read gave a batch, or which stand-in."""
    return read if isinstance(read, Kind) else Kind.BATCH


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
        spanning = [m for m in model.modules() if (group := _group_of(m)) is not None and group.size() == world]
        if all(isinstance(module, DistributedDataParallel) and not trains for module in spanning):
            return False
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return True

    def agree(self, read: Any, in_turn: bool, batches: int) -> tuple[Any, bool]:
        """Exchanges the result of a read after ``batches`` others with all ranks. A collective call.

        Returns:
            the read of this rank (``END`` if another rank's loader ended and ``uneven="stop"``), and whether the next
            read must not run ahead because it must not do so on some rank.
        """
        assert self._group is not None
        told = [torch.zeros(2, dtype=torch.int64) for _ in range(self._group.size())]
        dist.all_gather(told, torch.tensor([kind_of(read), in_turn], dtype=torch.int64), group=self._group)
        in_turn = any(bool(t[1]) for t in told)
        ranks = {kind: [rank for rank, t in enumerate(told) if int(t[0]) == kind] for kind in Kind}
        if read is Kind.UNREAD:
            return read, in_turn  # the loader's own exception is being raised
        if ranks[Kind.UNREAD]:
            raise RuntimeError(
                f"the data loader of rank(s) {ranks[Kind.UNREAD]} failed at batch {batches}; see the error there"
            )
        if ranks[Kind.END] and ranks[Kind.BATCH]:
            if self._uneven == "stop":
                return Kind.END, in_turn
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
    restored: deque[Any]
    agreement: Agreement | None
    #: Whose generators are observed, and those of the host; None where reads never run beside the compute.
    device: torch.device | None
    #: Whether no batch may be read before it is needed.
    in_turn: bool
    #: Whether it has ended or failed.
    stopped: bool = False
    _reads: int = 0
    _at_end: dict[str, Any] | None = None
    #: Generators that observed reads have drawn from; and the caller, once two reads have been observed.
    _drawn: set[str] = field(default_factory=set)
    _drawn_by_caller: set[str] | None = None
    _since_read: Replay | None = None

    @property
    def reads_alone(self) -> bool:
        """Whether the next read must run while nothing else does."""
        return self.device is not None and not self.stopped and (self.in_turn or self._since_read is None)

    def was_reset(self) -> bool:
        """Whether the iterator began another epoch after its end was read.

        ``iter(loader)`` usually makes a new iterator. A ``DataLoader`` with ``persistent_workers=True`` resets the one
        that it has, and an object that is loader and iterator in one resets itself.
        """
        now, old = attributes_of(self.iterator), self._at_end
        return old is not None and (now.keys() != old.keys() or any(now[name] is not old[name] for name in now))

    def read(self) -> Any:
        """Reads the next batch, unless this source has ended or failed. Called by one lane, in order."""
        if self.stopped:
            return Kind.NOTHING
        read: Any = Kind.UNREAD
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
        if read is Kind.END:
            self.stopped, self._at_end = True, attributes_of(self.iterator)
        return read

    def _next(self) -> Any:
        if self.device is None or not self.reads_alone:
            return next(self.iterator, Kind.END)
        if self._since_read is not None:
            since = set(self._since_read.record_changes().drawn)
            self._drawn_by_caller = since | (self._drawn_by_caller or set())
        before = Replay.capture([self.device])
        try:
            return next(self.iterator, Kind.END)
        finally:
            drawn = set(before.record_changes().drawn)
            self._drawn = drawn if isinstance(self.iterator, DataLoaderIterator) else self._drawn | drawn
            self._since_read = Replay.capture([self.device])
            # Until the caller has been observed, it may draw from any.
            others = self._drawn if self._drawn_by_caller is None else self._drawn_by_caller
            self.in_turn = bool(self._drawn & others)
