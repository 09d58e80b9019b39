"""What the engine knows of an optimizer, of its updates in backward, and of a pending update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from offload.storage import Tier
from offload.streaming.lane import Arrival
from offload.streaming.slices import Slice

__all__ = ["ModelOptimizer", "PendingUpdate", "UpdaterInBackward"]


class PendingUpdate(Protocol):
    """The update of a shard that a step has decided, applied before the next load."""

    @property
    def tasks(self) -> Sequence[Any]:
        """Its jobs that are not done."""

    def start(self, slot: Tensor | None = None, after: Sequence[Arrival] = (), *, holds: bool = False) -> Arrival:
        """Starts it, unless it is running or done."""

    def filled(self, slot: Tensor) -> bool:
        """Whether it left the shard's new values in ``slot``."""

    def wait_idle(self) -> None:
        """Waits until no part of it is running."""


class UpdaterInBackward(Protocol):
    """Updates shards during backward."""

    @property
    def updates(self) -> bool:
        """Whether the next backward updates shards."""

    def begin(self, waiting: int, order: Sequence[int] | None = None) -> bool:
        """Begins a backward; returns whether it will update."""

    def keep(self, shard: Any, gradients: list[Tensor | None]) -> dict[Slice, Tensor]:
        """Takes the gradients that are complete and need not be stored."""

    def complete(
        self, shard: Any, kept: dict[Slice, Tensor], slot: Tensor | None, after: Sequence[Arrival]
    ) -> Arrival | None:
        """Starts the update of a shard whose gradients are all computed."""

    def end(self, *, failed: bool = False) -> None:
        """Ends the backward."""


class ModelOptimizer(Protocol):
    """An optimizer that a model knows."""

    param_groups: list[dict[str, Any]]
    max_norm: float | None
    gradient_bytes: int
    #: So far.
    steps: int

    @property
    def state(self) -> Mapping[Any, Any]:
        """Of each parameter."""

    @property
    def in_backward(self) -> UpdaterInBackward | None:
        """What updates during backward."""

    @property
    def param_blocks(self) -> Mapping[Any, Sequence[Any]]:
        """Of each shard."""

    @property
    def updated_shards(self) -> frozenset[int]:
        """Shards that a step updates."""

    @property
    def factory(self) -> Any:
        """The class of optimizers, its arguments, and the form in which states are stored."""

    def options(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group."""

    def update(self, shard: Any, options: list[dict[str, Any]], *, kept: dict[Slice, Tensor]) -> Any:
        """The update of a shard from its stored gradients and the ``kept`` ones; None if it has no gradient."""

    def resident_state_bytes(self) -> int:
        """Bytes of the states of parameters that belong to no shard."""

    def state_bytes(self, shard: Any) -> int:
        """Bytes of the states of a shard."""

    def states_in_use(self, shard: Any) -> bool:
        """Whether other code holds states of a shard."""

    def prepare_move(self, shard: Any, tier: Tier) -> tuple[list[tuple[Tensor, Tensor]], Callable[[], None]]:
        """Copies the states of a shard to where it will rest; returns what makes the copies count."""

    def reserve_buffers(self) -> None:
        """Notes the bytes of buffers that updates in files need now."""

    def buffer_bytes(self, spare_bytes: float | None = None) -> int:
        """Bytes of all buffers of updates in files."""
