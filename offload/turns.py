"""A module whose weights stay in slots, or share them with other modules: what a training loop or a ``Pipe`` tells it.

See :mod:`pipe.turn` for stages that share a device without fitting on it together.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

from offload.module import ModuleAtHome
from offload.streaming.streamer import Streamer

__all__ = ["ModuleInTurn"]


class ModuleInTurn(ModuleAtHome):
    """The part of :class:`~offload.OffloadModel` that is told who uses the device next."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether the next backward updates parameters, so that gradients cannot accumulate over micro-batches."""
        updater = self._executor.streamer.gradient_offload.optimizers.in_backward
        return updater is not None and updater.updates

    def share_slots(self, stages: Sequence[Sequence[object]]) -> None:
        """Shares device memory with models that never compute at the same time.

        Args:
            stages: for each stage of a pipe, in order, the models that it runs.
        """
        Streamer.share_slots([[m._executor.streamer for m in stage if isinstance(m, ModuleInTurn)] for stage in stages])

    def frozen_weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside, no code changes parameters: what one call loaded serves the next as well.

        ``with model.frozen_weights(): ...`` around an evaluation loads nothing after the first call where all shards
        fit in slots. Outside, each forward loads its shards, since their homes may have been written to.
        """
        return self._executor.held_still()

    def prefetch(self, *, backward: bool = False) -> None:
        """Begins to load what the next pass uses first, into memory that is free."""
        self._executor.expect(backward=backward)

    # --- spellings of earlier versions ----------------------------------------------------------------------------

    def take_turns(self, stages: Sequence[Sequence[object]]) -> None:
        """Deprecated: :meth:`share_slots`."""
        _renamed("take_turns", "share_slots")
        self.share_slots(stages)

    def held_still(self) -> contextlib.AbstractContextManager[None]:
        """Deprecated: :meth:`frozen_weights`."""
        _renamed("held_still", "frozen_weights")
        return self.frozen_weights()

    def expect(self, *, backward: bool = False) -> None:
        """Deprecated: :meth:`prefetch`."""
        _renamed("expect", "prefetch")
        self.prefetch(backward=backward)


def _renamed(old: str, new: str) -> None:
    warnings.warn(
        f"OffloadModel.{old} is now called {new}, and goes in the next version; call {new} instead",
        DeprecationWarning,
        stacklevel=3,
    )
