"""Decides which batches may be read ahead: those whose loader shares no random generator with the model.

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

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from pipe.recompute.replay import Replay
from pipe.torch_private.data import DataLoaderIterator

__all__ = ["Draws"]


class Draws:
    """Records which random generators (of ``device`` and the host) the reads of one iterator use, and the caller."""

    def __init__(self, iterator: Iterator[Any], device: torch.device) -> None:
        self._seeds_first = isinstance(iterator, DataLoaderIterator)
        self._devices = (device,)
        self._by_reads: set[str] = set()
        self._by_caller: set[str] | None = None  # None until two reads have been observed
        self._since_read: Replay | None = None

    def shared(self) -> bool:
        """Whether the next read must not run ahead, as far as this process knows."""
        return bool(self._by_reads if self._by_caller is None else self._by_reads & self._by_caller)

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """A context for one read that runs alone; records the draws in it, and those since the read before."""
        if self._since_read is not None:
            self._by_caller = (self._by_caller or set()) | set(self._since_read.record_changes().drawn)
        before = Replay.capture(self._devices)
        try:
            yield
        finally:
            drawn = set(before.record_changes().drawn)
            self._by_reads = drawn if self._seeds_first else self._by_reads | drawn
            self._since_read = Replay.capture(self._devices)
