"""Random numbers of stages on several devices: who draws when.

Stages on several devices run in threads, at the same time. Generators of the process (torch's for the CPU, Python's,
NumPy's) and generators that layers on two devices share have one order of draws, and threads have none: the same seed
would give another result in every run, and a recomputation would draw what another stage drew.

So the order is that of one device: the cells of a clock run one after another, in the direction of flow. That gives up
what threads are for, so it is done only where it must be. The first mini-batch runs in order and shows whether any of
these generators moved; if none did, later mini-batches of the same kind run at the same time.

Guarantees
    * The draws of a mini-batch in which the cells ran in order are those of stages on a single device.
    * Cells run at the same time only if no such generator moved in an earlier mini-batch of the same kind.
    * A generator that moves all the same (a layer that began to draw later) is a :class:`RuntimeWarning`, and the cells
      run in order from then on.
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
    """What is known about the draws of some stages from generators that they share."""

    def __init__(self) -> None:
        #: For each kind of mini-batch that has run, whether shared generators moved.
        self._moved: dict[Hashable, bool] = {}

    @contextlib.contextmanager
    def ordered(self, kind: Hashable, stages: Sequence[Stage]) -> Iterator[bool]:
        """To be put around a mini-batch; yields whether its cells must run in order.

        Args:
            kind: mini-batches that run the same code have the same.
            stages: the stages that it runs.
        """
        if len({stage.device for stage in stages}) == 1:
            yield False  # one thread
            return
        in_order = self._moved.get(kind, True)
        replay = Replay.capture((), _shared(stages))
        yield in_order
        drawn = replay.seal().drawn
        if drawn and not in_order:
            warnings.warn(
                f"stages on several devices began to draw from generators that they share ({', '.join(drawn)}), while "
                f"they ran at the same time: the numbers of this mini-batch depend on the order of threads. From now "
                f"on the stages run in order",
                RuntimeWarning,
                stacklevel=4,
            )
        self._moved[kind] = self._moved.get(kind, False) or bool(drawn)


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
