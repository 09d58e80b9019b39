"""Keeps the order of random draws when stages on several devices share a random generator.

Stages on several devices run in parallel threads. If they share a generator (torch's for the CPU, Python's, NumPy's,
or one that layers on two devices hold), the order of their draws depends on timing: the same seed would give another
result in every run, and a recomputation would draw the numbers of another stage.

Where stages share a generator, the cells of a clock therefore run one after another, in the direction of data flow, as
on one device. This loses parallelism, so it is done only where needed. The first mini-batch runs in order and shows
whether the state of any such generator changed; if none did, later mini-batches of the same kind run in parallel.

If a shared generator changes in a parallel mini-batch (a layer that began to draw later), a :class:`RuntimeWarning` is
issued, and the cells run in order from then on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from pipe.recompute.generators import held_generators
from pipe.recompute.replay import Replay
from pipe.stage import Stage

__all__ = ["SharedDraws"]


class SharedDraws:
    """Records whether stages draw from generators that they share."""

    def __init__(self) -> None:
        #: For each kind of mini-batch that has run, whether the state of a shared generator changed.
        self._drew: dict[Hashable, bool] = {}

    @contextlib.contextmanager
    def ordered(self, kind: Hashable, stages: Sequence[Stage]) -> Iterator[bool]:
        """A context for one mini-batch; yields whether its cells must run in order.

        ``kind`` is equal for mini-batches that run the same code.
        """
        if len({stage.device for stage in stages}) == 1:
            yield False  # one thread
            return
        in_order = self._drew.get(kind, True)
        replay = Replay.capture((), _shared(stages))
        yield in_order
        drawn = replay.record_changes().drawn
        if drawn and not in_order:
            warnings.warn(
                f"stages on several devices began to draw from generators that they share ({', '.join(drawn)}), while "
                f"they ran in parallel: the random numbers of this mini-batch depend on the order of threads. From now "
                f"on the stages run in order",
                RuntimeWarning,
                stacklevel=4,
            )
        self._drew[kind] = self._drew.get(kind, False) or bool(drawn)


def _shared(stages: Sequence[Stage]) -> list[Any]:
    """Generators that layers of stages on two devices hold."""
    holders: dict[int, tuple[Any, torch.device]] = {}
    found: dict[int, Any] = {}
    for stage in stages:
        for generator in held_generators(stage.layers.modules()):
            _, first = holders.setdefault(id(generator), (generator, stage.device))
            if first != stage.device:
                found[id(generator)] = generator
    return list(found.values())
