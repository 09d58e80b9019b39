"""Where the shards of a model rest between steps, in files or in host memory; changed between steps, for a planner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offload.engine.cell import ShardRunner
from offload.engine.cell_executor import CellExecutor
from offload.engine.exclusive import ExclusivePasses
from offload.engine.measured import step_model
from offload.engine.mesh_planner import planner_for
from offload.engine.references import References
from offload.engine.regroup import looks_across_rows
from offload.engine.row_units import RowUnits
from offload.engine.shard_parts import ShardParts
from offload.engine.steps import Steps
from offload.engine.stored_form import stored_form
from offload.engine.weight_writes import AssignedData
from offload.limits import MemoryLimits
from offload.planning.explain import Stored
from offload.planning.peak_memory import OutsideBytes
from offload.planning.plan import Plan
from offload.planning.step_model import StepModel
from offload.policy import MemoryPolicy
from offload.storage import Tier
from offload.storage.host import HostTier
from offload.streaming.current_values import read_current_values
from offload.streaming.lane import error_context
from offload.streaming.layer_homes import LayerHomes
from offload.streaming.moves import Move, move_homes
from offload.streaming.shard import Shard
from offload.streaming.stored_gradients import regions_of
from offload.telemetry.memory_report import MemoryReport
from offload.telemetry.statistics import Meter
from pipe.process import check_process
from pipe.torch_private.autograd import outside_inference_mode

__all__ = ["MovableHomes", "ShardBytes"]


#: Of a limit of memory, staging buffers of transfers take at most one part in so many.
STAGING_SHARE = 16


@dataclass(frozen=True)
class ShardBytes:
    """Host memory that a shard takes while it rests there."""

    weights: int
    #: From backward until they are set to None, or a pending update has used them.
    gradients: int
    #: Of all optimizers; 0 before the first update.
    states: int

    @property
    def total(self) -> int:
        """The sum of all three."""
        return self.weights + self.gradients + self.states


class MovableHomes(ExclusivePasses):
    """The part of an executor that knows where shards rest."""

    shards: list[Shard]
    layer_homes: LayerHomes
    #: The owner of the parameters of layers that stay on the compute device.
    resident: Shard | None
    outside_bytes: Callable[[], OutsideBytes]
    policy: MemoryPolicy
    recompute: bool
    runners: list[ShardRunner]
    steps: Steps
    row_units: RowUnits
    _cell_executor: CellExecutor
    _references: References
    assigned_data: AssignedData
    _tier: Tier
    _meter: Meter
    #: Whether code of the model runs between the layers of a shard, which run one by one then.
    layers_apart = False
    #: Whether the model was closed.
    closed = False
    #: The arguments of :meth:`plan_memory`, if plans are chosen.
    planned: tuple[MemoryLimits, MemoryPolicy] | None = None

    @property
    def staging_bytes(self) -> int:
        """See :attr:`.Tier.staging_bytes`."""
        return self._tier.staging_bytes

    @property
    def meter(self) -> Meter:
        """The counters of the model."""
        return self._meter

    def held_by_engine(self) -> list[nn.Parameter]:
        """Parameters that the engine which runs in place of this object holds, once for each reference."""
        native = self.native()
        return [] if native is None else native.held()

    def parts_over(self, shards: list[Shard]) -> ShardParts:
        """See :meth:`.ShardParts.make`."""
        return ShardParts.make(self, shards, self._tier)

    def use(self, parts: ShardParts) -> None:
        """Replaces the parts of the engine that depend on how the model is cut into shards. Idempotent."""
        # One list for streamer, gradient offload, assigned data and optimizers.
        self.shards[:] = parts.shards
        read_current_values(parts.shards, self.streamer)
        self.runners, self._cell_executor = parts.runners, parts.cell_executor
        self.steps, self._references = parts.steps, parts.references

    @property
    def plans(self) -> bool:
        """Whether steps are planned by what they measure, or bounded."""
        return self.steps.planner is not None or bool(self.policy.graph_bytes)

    def check_open(self) -> None:
        """Raises RuntimeError after ``close()``."""
        if self.closed:
            raise RuntimeError("this OffloadModel was closed and cannot run; make a new one")

    def keep_in_memory(self, shards: Iterable[int]) -> None:
        """Makes exactly these shards rest in host memory, the others in their files, between two passes.

        Weights, gradients and optimizer states move; values, parameters and tensors of states stay the same objects.
        Where layers compute in host memory, they use these shards in place: without a slot, a load or a copy, except
        shards that are cast (``param_dtype``) or borrow a tied parameter from another one, which still need slots
        (:attr:`Shard.may_bind_in_place <offload.streaming.shard.Shard.may_bind_in_place>`). Where homes are in host
        memory anyway, only that changes. Forwards that look for writes of layers into their weights (the first ones
        of each mode) take a temporary copy of a shard.

        Shards that leave memory are written first. A call that moves shards in both directions holds them all for a
        moment; two calls do not.

        Raises:
            ValueError: for an index that is none of a shard.
            RuntimeError: in a forward or backward, or if the model was closed.
            HomeInUseError: if other code holds views of weights or states of a shard that would move.
            OSError, MemoryError: if there is no space, or a pending update fails. After any of these nothing moved.
        """
        self.check_open()
        check_process(self.made_in, "this OffloadModel")
        wanted = frozenset(shards)
        if self.public.sharded:
            raise ValueError("shards of a model with mesh= stay at home: their DTensors would not follow a move")
        if not wanted <= {*range(len(self.shards))}:
            raise ValueError(f"expected indices of {len(self.shards)} shards, got {sorted(wanted)} (shards)")
        if self.busy:
            raise RuntimeError("expected no running forward or backward, but shards were to be moved within one")
        if all(self._is_where(shard, wanted) for shard in self.shards):
            return  # updates stay pending
        self.streamer.apply_pending_updates()
        self.assigned_data.store()
        self.streamer.release()
        optimizers = self.streamer.gradient_offload.optimizers
        moves: list[Move] = []
        if self._tier.blocking_io:
            with error_context("moving shards between file and memory"):
                moves = move_homes(self.shards, self._tier, HostTier(self.device), wanted, optimizers)

        @torch.no_grad()
        def commit() -> None:
            with outside_inference_mode():
                for move in moves:
                    move.commit()
            for shard in self.shards:
                shard.in_place = self._in_place(shard, wanted)
            self.streamer.homes_moved()
            if (native := self.native()) is not None:
                native.observe()
            for optimizer in optimizers:
                optimizer.reserve_buffers()
            there = zip(self.shards, self.bytes_in_memory(), strict=True)
            self._meter.resting_bytes = sum(each.weights + each.states for shard, each in there if shard.file)

        try:
            commit()
        except BaseException:
            commit()  # an interrupt: everything is copied, and the rest cannot fail
            raise

    def _in_place(self, shard: Shard, wanted: Collection[int]) -> bool:
        return self.device.type == "cpu" and shard.index in wanted and shard.may_bind_in_place

    def _is_where(self, shard: Shard, wanted: Collection[int]) -> bool:
        """Whether a shard need not move if exactly the shards ``wanted`` are to be stored in memory."""
        moves = self._tier.blocking_io and shard.home is not None and (shard.index in wanted) == shard.blocking_io
        return not moves and shard.in_place == self._in_place(shard, wanted)

    def write_back(self) -> None:
        """Writes the weights of shards that rest in memory to their files."""
        for shard in self.shards:
            if shard.file is not None and shard.home is not None:
                with error_context(f"writing shard {shard.index} to {self._tier.name}"):
                    shard.file.write(shard.home.tensor, 0)

    def bytes_in_memory(self) -> list[ShardBytes]:
        """For each shard: the host memory that it takes, or would take, while it rests there."""
        optimizers = self.streamer.gradient_offload.optimizers
        return [
            ShardBytes(
                weights=sum(block.nbytes for block in (shard.home, shard.lower) if block is not None),
                gradients=sum(shard.gradient_types.nbytes(s) for s in shard.own if s.parameter.requires_grad),
                states=sum(optimizer.state_bytes(shard) for optimizer in optimizers),
            )
            for shard in self.shards
        ]

    def plan_memory(self, limits: MemoryLimits, policy: MemoryPolicy) -> None:
        """Chooses the plans of steps by what they measure, within the limits, if the policy leaves anything open."""
        if not policy.plans:
            return
        for runner in self.runners:
            runner.measures_graphs = True
        if self.device.type == "cpu":
            self._tier.limit_staging(limits.device_bytes // STAGING_SHARE)
        self.steps.reserve(self.public, self.public.buffer_bytes)
        self.planned = limits, policy
        self.steps.planner = planner_for(limits, policy, self)

    def microbatches(self, rows: int, units: float | None = None) -> int:
        """Micro-batches of a training batch of so many rows: as few as fit; 1 where the result would be another.

        ``units``: as how many these rows count, if they are not as long as those of the first batch.
        """
        planner = self.steps.planner
        if planner is None or not torch.is_grad_enabled():
            return 1
        native = self.native()
        draws = any(r.draws is not False for r in self.runners) if native is None else native.draws
        layers = [layer for shard in self.shards for layer in shard.layers]
        if (draws and not planner.may_draw_otherwise) or looks_across_rows(layers):
            return 1
        return planner.microbatches(rows, rows if units is None else units)

    def memory_report(self) -> MemoryReport:
        """See :meth:`OffloadModel.memory_report <offload.OffloadModel.memory_report>`."""
        if self.steps.planner is None:
            raise RuntimeError("expected a model with memory=..., whose plan is chosen; this one has no limit")
        return self.steps.planner.report()

    def measured(self, rows: Sequence[float]) -> StepModel:
        """What is known of a step on micro-batches of so many rows."""
        resting = {j: each.weights + each.states for j, each in enumerate(self.bytes_in_memory())}
        exchange = self.public.exchange_bytes()
        reducing = 0 if exchange is None else exchange.outside
        outside = replace(self.outside_bytes(), activations=self.steps.around_bytes(rows), reducing=reducing)
        known: dict[str, Any] = {"meter": self._meter, "tier": self._tier, "device": self.device}
        known |= {"slots": self.streamer.slots, "own_slots": self.streamer.own_slots}
        known["buffer_bytes"] = self.streamer.gradient_offload.optimizers.buffer_bytes()
        return step_model(self.shards, self.steps, rows, resting, outside=outside, exchange=exchange, **known)

    def stored(self) -> Stored | None:
        """How it stores what it trains; None where no form of fewer bytes is known to work."""
        return stored_form(self.shards, self.streamer.gradient_offload.optimizers, self._tier)

    def bytes_at_home(self) -> int:
        """Bytes of stored parameters and gradients."""
        blocks = (block for shard in self.shards for block in (shard.home, shard.lower))
        homes = [block for block in blocks if block is not None]
        return sum(block.nbytes for block in (*homes, *(region.block for region in regions_of(self.shards))))

    def next_plan(self, rows: Sequence[float], *, training: bool) -> Plan:
        """The plan of the next step from empty slots, on micro-batches of so many rows."""
        streamer = self.streamer
        updates = streamer.gradient_offload.optimizers.planned()
        if streamer.updates_at_once:
            updates["pending"] = frozenset()
        in_memory: Collection[int] = streamer.in_place()
        return self.steps.plan(rows, updates, slots=streamer.slots, training=training, in_memory=in_memory)
