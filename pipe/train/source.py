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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipe.train.draws import Draws
from pipe.train.resets import attributes_at_end, may_be_reset

__all__ = ["Agreement", "Kind", "Read", "Source"]


class Kind(enum.IntEnum):
    """The result of one read, also as sent to other ranks: a batch, the loader's end, or nothing because it failed."""

    END = 0
    BATCH = 1
    NOTHING = 2


@dataclass(frozen=True)
class Read:
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
        training_only: whether agreement is skipped in evaluation, in which ranks do not communicate.
    """

    def __init__(self, group: dist.ProcessGroup | None, uneven: str = "raise", *, training_only: bool = False) -> None:
        self.group = group
        self._uneven = uneven
        self._training_only = training_only
        self._reads = 0

    @classmethod
    def for_model(cls, model: nn.Module, group: dist.ProcessGroup | None, uneven: str) -> Agreement | None:
        """The agreement that a model needs: over ``group``, or over the world if the model spans it, or none.

        Replicas (``DistributedDataParallel``) communicate in training only: one rank may evaluate while others wait.
        """
        if uneven not in ("raise", "stop"):
            raise ValueError(f"expected uneven='raise' or 'stop', got uneven={uneven!r}")
        if group is not None:
            return cls(group, uneven)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        groups = [(module, _group_of(module)) for module in model.modules()]
        spanning = [module for module, of in groups if of is not None and of.size() == dist.get_world_size()]
        if not spanning:
            return None
        return cls(None, uneven, training_only=all(isinstance(m, DistributedDataParallel) for m in spanning))

    def prepare(self, training: bool) -> Agreement | None:
        """This agreement if batches of this mode need one, else None.

        The first call makes the group, which is a collective call: all ranks must begin their pipelines in one order.
        """
        if self._training_only and not training:
            return None
        if self.group is None:
            self.group = dist.new_group(backend="gloo")
        return self

    def agree(self, read: Read | None, in_turn: bool = False) -> tuple[Read, bool]:
        """Exchanges the result of a read (None: it failed) with all ranks. A collective call.

        Returns:
            the read of this rank (``END`` if another rank's loader ended and ``uneven="stop"``), and whether the next
            read must not run ahead because it must not do so on some rank.
        """
        assert self.group is not None
        kind = Kind.NOTHING if read is None else read.kind
        told = [torch.zeros(2, dtype=torch.int64) for _ in range(self.group.size())]
        dist.all_gather(told, torch.tensor([kind, in_turn], dtype=torch.int64), group=self.group)
        in_turn = any(bool(t[1]) for t in told)
        ranks = {kind: [rank for rank, t in enumerate(told) if int(t[0]) == kind] for kind in Kind}
        batches, self._reads = self._reads, self._reads + 1
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
        if read.kind is Kind.END:
            self._reads = 0
        return read, in_turn


def _group_of(module: nn.Module) -> dist.ProcessGroup | None:
    if isinstance(module, DistributedDataParallel):
        return module.process_group
    group = getattr(getattr(module, "_env", None), "process_group", None)  # a sharded module of torchrec
    return group if isinstance(group, dist.ProcessGroup) else None


class Source:
    """The iterator of one loader, whether it may still be read, and whether it may be read ahead.

    ``draws`` decides which reads may run ahead; None where reads never run beside the compute.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        agreement: Agreement | None = None,
        draws: Draws | None = None,
        *,
        stopped: bool = False,
    ) -> None:
        self.iterator = iterator
        self.in_turn = False  # whether no batch may be read before it is needed
        #: Whether it must be read in the caller's thread, whose ``iter(loader)`` may reset it.
        self.in_caller = may_be_reset(iterator)
        self._at_end: list[tuple[Any, ...]] | None = None
        self._agreement = agreement
        self._draws = draws
        self._observed = False
        #: Whether an observed read, on any rank, drew random numbers, so that the generators of the model matter.
        self.drew = False
        self.stopped = stopped

    @property
    def reads_alone(self) -> bool:
        """Whether the next read must run while nothing else does."""
        return self._draws is not None and not self.stopped and (self.in_turn or not self._observed)

    def was_reset(self) -> bool:
        """Whether the iterator began another epoch after its end was read."""
        if self._at_end is None:
            return False
        now = attributes_at_end(self.iterator)
        return len(now) != len(self._at_end) or any(
            name != before or value is not old for (name, value), (before, old) in zip(now, self._at_end, strict=True)
        )

    def change_mode(self) -> None:
        """Observes again which generators the caller's thread uses. Called while no read is under way."""
        if self._draws is not None:
            self._draws.forget_caller()
            self.in_turn, self._observed = self.drew, False

    def read(self) -> Read:
        """Reads the next batch, unless this source has ended or failed. Called by one lane, in order."""
        if self.stopped:
            return Read(Kind.NOTHING)
        draws = self._draws if self.reads_alone else None
        read: Read | None = None
        in_turn = self.in_turn
        try:
            try:
                with contextlib.nullcontext() if draws is None else draws.observing():
                    read = Read(Kind.BATCH, next(self.iterator))
            except StopIteration:
                read = Read(Kind.END)
            finally:
                if draws is not None:
                    in_turn = draws.shared()
                if self._agreement is not None:
                    read, in_turn = self._agreement.agree(read, in_turn)
        except BaseException:
            self.stopped = True
            raise
        self.in_turn, self._observed, self.drew = in_turn, True, self.drew or in_turn
        self.stopped = read.kind is not Kind.BATCH
        if self.stopped:
            self._at_end = attributes_at_end(self.iterator)
        return read
