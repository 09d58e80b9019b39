"""Reading a data loader ahead without losing a batch, its end, or its exception.

The loader is read while earlier batches compute, so what ``next()`` gives must wait for its turn. Each read leaves one
:class:`Read` in flight: a batch, the end, or (as an exception of the read's ticket) the loader's failure.

Guarantees
    * After its end or a failure the loader is not touched again until the caller has been told.
    * The end is reported once; reads that were already under way behind it are ``NOTHING``.
    * A source is recognised by the iterator object it holds, never by its ``id``, which may be used again.

With several processes, ranks whose loaders have different lengths would wait for each other's collectives for ever.
:class:`Agreement` lets them agree about each read before anybody trains on it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Agreement", "Kind", "Read", "Source"]


class Kind(enum.Enum):
    """What one read found."""

    BATCH = "a batch"
    END = "the end of the loader"
    NOTHING = "nothing: the loader had ended or failed before"


@dataclass(frozen=True)
class Read:
    """The result of one read."""

    kind: Kind
    batch: Any = None


class _State(enum.IntEnum):
    """What a rank tells the others about its read."""

    ENDED = 0
    BATCH = 1
    FAILED = 2


class Agreement:
    """Ranks agree, read by read, that all have a batch or all have reached the end.

    Args:
        group: a process group with a CPU backend that is used for nothing else: the agreement runs beside the
            collectives of the model, in another thread.
        uneven: what happens when some loaders end before others. ``"raise"``: a ``ValueError`` on every rank, after
            the last batch that all ranks have. ``"stop"``: every rank ends there, and surplus batches are not run.
    """

    def __init__(self, group: dist.ProcessGroup, uneven: str = "raise") -> None:
        if uneven not in ("raise", "stop"):
            raise ValueError(f"expected uneven='raise' or 'stop', got uneven={uneven!r}")
        self._group = group
        self._uneven = uneven
        self._reads = 0

    @classmethod
    def for_model(cls, model: nn.Module, group: dist.ProcessGroup | None, uneven: str) -> Agreement | None:
        """The agreement that a model needs: over ``group``, or over the world if the model spans it, or none.

        Creating the group is a collective call: all ranks build their pipelines in the same order.
        """
        if group is None and dist.is_available() and dist.is_initialized():
            world = dist.get_world_size()
            if world > 1 and any(g.size() == world for g in map(_group_of, model.modules()) if g is not None):
                group = dist.new_group(backend="gloo")
        if group is None:
            if uneven not in ("raise", "stop"):
                raise ValueError(f"expected uneven='raise' or 'stop', got uneven={uneven!r}")
            return None
        return cls(group, uneven)

    def settle(self, read: Read | None) -> Read:
        """What this rank makes of its read (None: it failed) once it knows the reads of all ranks."""
        state = _State.FAILED if read is None else _State.BATCH if read.kind is Kind.BATCH else _State.ENDED
        told = [torch.zeros(1, dtype=torch.int64) for _ in range(self._group.size())]
        dist.all_gather(told, torch.tensor([int(state)]), group=self._group)
        states = [_State(int(t)) for t in told]
        ranks = {s: [rank for rank, other in enumerate(states) if other is s] for s in _State}
        batches, self._reads = self._reads, self._reads + 1
        if read is None:
            return Read(Kind.NOTHING)  # the loader's own exception is on its way
        if ranks[_State.FAILED]:
            raise RuntimeError(
                f"the data loader of rank(s) {ranks[_State.FAILED]} failed at batch {batches}; see the error there"
            )
        if ranks[_State.ENDED] and ranks[_State.BATCH]:
            if self._uneven == "stop":
                return Read(Kind.END)
            raise ValueError(
                f"expected data loaders of one length on all ranks, got the end after {batches} batches on rank(s) "
                f"{ranks[_State.ENDED]} and another batch on rank(s) {ranks[_State.BATCH]}; make them equally long "
                f"(DistributedSampler with drop_last or padding), or pass uneven='stop' to end with the shortest"
            )
        if read.kind is Kind.END:
            self._reads = 0
        return read


def _group_of(module: nn.Module) -> dist.ProcessGroup | None:
    if isinstance(module, DistributedDataParallel):
        return module.process_group
    group = getattr(getattr(module, "_env", None), "process_group", None)  # a sharded module of torchrec
    return group if isinstance(group, dist.ProcessGroup) else None


class Source:
    """One loader's iterator, and whether it may still be read."""

    def __init__(self, iterator: Iterator[Any], agreement: Agreement | None = None, *, stopped: bool = False) -> None:
        self.iterator = iterator
        self._agreement = agreement
        self._stopped = stopped

    def read(self) -> Read:
        """Reads the next batch, unless this source has ended or failed. Called by one lane, in order."""
        if self._stopped:
            return Read(Kind.NOTHING)
        read: Read | None = None
        try:
            try:
                read = Read(Kind.BATCH, next(self.iterator))
            except StopIteration:
                read = Read(Kind.END)
            finally:
                if self._agreement is not None:
                    read = self._agreement.settle(read)
        except BaseException:
            self._stopped = True
            raise
        self._stopped = read.kind is not Kind.BATCH
        return read
