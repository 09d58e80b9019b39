"""Which batches may be read beside the compute: those that do not compete with it for random numbers.

torch's default generators, Python's and NumPy's belong to the process and not to a thread. Where the loader's thread
draws from one of them (an augmentation, a shuffled sampler) while the model draws from the same one (dropout), timing
decides which of them gets which number, and one seed gives many results. So each generator has one owner at a time:

* A generator that only one side draws from belongs to that side. Batches are read ahead.
* A generator that both sides draw from belongs to the caller's thread. Batches are then read *in turn*: when one is
  needed and not before, while nothing computes. That is the order of draws of ``for batch in loader: step(batch)``,
  and so are the numbers.

What either side draws from is observed on reads that nothing runs beside: the first read of each iterator, and all
reads in turn. A first read that draws nothing makes its iterator one that does not draw. The caller's side is all that
happened between two observed reads: the model, the optimizer, and the code around the pipeline.

An iterator of torch's own ``DataLoader`` draws its seeds with the first batch and is then judged by its latest read;
any other one by all of its observed reads, since an endless loader draws new seeds whenever it starts again.

Assumes
    * An iterator whose first batch needs no random number needs none later. (A loader of which this is not true, and
      a model that draws from the same generator, want ``Lanes.serial()``.)
    * Reads do not rewind a generator and put it back (``torch.random.fork_rng``) beside a model that draws from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from pipe.recompute.replay import Replay

__all__ = ["Draws"]


class Draws:
    """From which generators the reads of one iterator draw, and from which the caller's thread.

    Args:
        iterator: what is read.
        device: whose generator is watched beside those of the host.
    """

    def __init__(self, iterator: Iterator[Any], device: torch.device) -> None:
        self._seeds_first = isinstance(iterator, _BaseDataLoaderIter)
        self._devices = (device,)
        self._by_reads: set[str] = set()
        self._by_caller: set[str] | None = None  # None until two reads have been observed
        self._since_read: Replay | None = None

    def shared(self) -> bool:
        """Whether the next read must wait for its turn, as far as this process knows."""
        return bool(self._by_reads if self._by_caller is None else self._by_reads & self._by_caller)

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Surrounds one read that nothing else runs beside."""
        if self._since_read is not None:
            self._by_caller = (self._by_caller or set()) | set(self._since_read.seal().drawn)
        before = Replay.capture(self._devices)
        try:
            yield
        finally:
            drawn = set(before.seal().drawn)
            self._by_reads = drawn if self._seeds_first else self._by_reads | drawn
            self._since_read = Replay.capture(self._devices)

    def forget_caller(self) -> None:
        """The caller's side is to be observed anew, because the model runs in another mode."""
        self._by_caller, self._since_read = None, None
