"""Lets a training loop or a ``Pipe`` control the slots of a model: share them, keep weights in them, prefetch.

See :mod:`pipe.turn` for stages that share a device whose memory does not hold all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from offload.module import ModuleAtHome
from offload.streaming.slot_pool import share_slots

__all__ = ["SlotSharingModule"]


class SlotSharingModule(ModuleAtHome):
    """The part of :class:`~offload.OffloadModel` that controls its slots."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether the next backward updates parameters: gradients cannot accumulate over micro-batches then."""
        updater = self._executor.streamer.gradient_offload.optimizers.in_backward
        return updater is not None and updater.updates

    def share_slots(self, stages: Sequence[Sequence[object]]) -> None:
        """Shares device memory with models that never compute at the same time.

        Args:
            stages: for each stage of a pipe, in order, the models that it runs.
        """
        models = [m for stage in stages for m in stage if isinstance(m, SlotSharingModule)]
        if any(m._executor.public.sharded for m in models):
            raise ValueError("models with mesh= cannot share slots yet: leave out share_slots, or mesh=")
        share_slots([[m._executor.streamer for m in stage if isinstance(m, SlotSharingModule)] for stage in stages])

    def frozen_weights(self) -> contextlib.AbstractContextManager[None]:
        """A context in which no code changes parameters, so that loaded shards are reused by the next call.

        ``with model.frozen_weights(): ...`` around an evaluation loads each shard once where all shards fit in slots.
        Outside, each forward loads its shards, since their homes may have been written to.
        """
        return self._executor.frozen_weights()

    def prefetch(self, *, backward: bool = False) -> None:
        """Begins to load the first shards of the next pass into free slots."""
        self._executor.prefetch(backward=backward)
