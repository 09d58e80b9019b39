"""What planners know of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from offload.planning.peak_memory import OutsideBytes
from offload.planning.step_model import StepModel

if TYPE_CHECKING:
    from offload.engine.plans.row_units import RowUnits
    from offload.mesh.public import PublicParameters
    from offload.planning.explain import Stored
    from offload.storage import Tier
    from offload.streaming.shard import Shard
    from offload.streaming.streamer import Streamer
    from offload.telemetry.statistics import Meter

__all__ = ["PlannedModel", "ShardBytes"]


@dataclass(frozen=True)
class ShardBytes:
    """Memory that a shard takes while it rests there."""

    weights: int
    #: From backward until they are set to None, or a pending update has used them.
    gradients: int
    #: Of all optimizers; 0 before the first update.
    states: int

    @property
    def total(self) -> int:
        """The sum of all three."""
        return self.weights + self.gradients + self.states


class Buffers(Protocol):
    """The buffers of the optimizers of a model."""

    def spare_bytes(self, limit_bytes: int | None = None) -> float:
        """Bytes that they may take."""


class PlannedModel(Protocol):
    """A model whose steps are planned."""

    device: torch.device
    shards: list[Shard]
    layers_apart: bool
    meter: Meter
    public: PublicParameters
    row_units: RowUnits
    streamer: Streamer
    tier: Tier

    @property
    def steps(self) -> Buffers:
        """What its optimizers may take."""

    def outside_bytes(self) -> OutsideBytes:
        """Bytes on the compute device that belong to no shard."""

    def bytes_in_memory(self) -> list[ShardBytes]:
        """For each shard: the host memory that it takes, or would take, while it rests there."""

    def keep_in_memory(self, shards: Iterable[int]) -> None:
        """Makes these shards rest in host memory from now on, and no others."""

    def keep_on_device(self, shards: Iterable[int]) -> None:
        """Makes these shards rest in the memory that layers compute in from now on, and no others."""

    def measured(self, rows: Sequence[float]) -> StepModel:
        """What is known of a step on micro-batches of so many rows."""

    def stored(self) -> Stored | None:
        """How it stores what it trains."""
