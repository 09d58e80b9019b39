"""Where the shards of a model rest between steps, in files or in host memory, and what its parts know of each other.

A model has one of these: the homes of its layers, what moves bytes (the streamer), what is known of its steps, and the
parameters that users see. The engine that runs its blocks is made over it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from offload.engine.sizes import RowUnits
from offload.engine.steps import Steps
from offload.engine.structure import Structure
from offload.engine.weight_writes import AssignedData
from offload.policy import MemoryPolicy
from offload.public_parameters import PublicParameters
from offload.storage import Tier
from offload.storage.buffer import has_own_memory
from offload.storage.host import DeviceTier, HostTier
from offload.streaming.lane import error_context
from offload.streaming.moves import move_homes
from offload.streaming.shard import Shard
from offload.streaming.streamer import Streamer
from pipe.process import check_process
from pipe.torch_private.autograd import outside_inference_mode

__all__ = ["ModelHomes", "ShardBytes"]


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


class ModelHomes:
    """The shards of one model, and what is known of them.

    ``resident`` is the owner of the parameters of layers that stay on the compute device, ``public`` what users see.
    """

    #: Of the layers, once the model is complete.
    structure: Structure | None = None
    #: Whether the model was closed.
    closed = False
    #: Names of the blocks that the model's own forward calls; none for layers that are called in order.
    blocks: Sequence[str] = ()
    #: The parameters outside of the blocks.
    outside: Sequence[nn.Parameter] = ()
    #: The modules outside of the blocks by name. Weak references, since the model refers to this object.
    around: Mapping[str, nn.Module] = MappingProxyType({})

    def __init__(
        self,
        streamer: Streamer,
        resident: Shard | None,
        public: PublicParameters,
        *,
        policy: MemoryPolicy,
        recompute: bool,
        param_dtype: torch.dtype | None,
        layers_apart: bool,
    ) -> None:
        self.streamer, self.resident, self.public = streamer, resident, public
        self.shards, self.device, self.meter = streamer.shards, streamer.device, streamer.meter
        self.tier, self.lanes = streamer.tier, streamer.lanes
        #: Names of the quantised parameters.
        self.quantised = {s.part_of: s.name for shard in self.shards for s in shard.own if s.part_of is not None}
        streamer.gradient_offload.kept_bytes = policy.gradient_bytes or 0
        #: The type of floating-point parameters in slots; None: that in storage.
        self.param_dtype = param_dtype
        own_memory = has_own_memory(self.device)
        #: Where shards rest that are not at home: in host memory, or on a device that has memory of its own.
        self._memory = HostTier(self.device)
        self._on_device = DeviceTier(self.device) if own_memory else None
        #: Bytes of shards that rest on such a device.
        self._device_bytes = 0
        #: What the model may hold, with all bytes decided.
        self.policy = policy
        #: Whether cells are recomputed; whether the model's own code runs between the layers of a shard.
        self.recompute, self.layers_apart = recompute, layers_apart
        #: Makes plans, and keeps those that ran.
        self.steps = Steps(
            self.shards,
            policy=policy,
            recompute=recompute,
            spills=self.tier.scratch() is not None,
            on_host=not own_memory,
            apart=layers_apart,
        )
        self.assigned_data = AssignedData([*self.shards, *([] if self.resident is None else [self.resident])])
        self.row_units = RowUnits()
        #: How often saved tensors were recorded, by shard, rows and whether the graph was kept.
        self.recorded: dict[Any, int] = {}
        #: By ``id`` of a parameter outside: the bytes of its gradient in the last backward, and the pieces of code that
        #: made it or added to it.
        self.leaf_gradients: dict[int, tuple[int, set[int]]] = {}
        self._made_in = os.getpid()
        self._frozen_weights = 0
        self._engine: Any = lambda: None
        self._backward: Any = lambda: None

    def run_by(self, engine: Any) -> None:
        """Notes the engine that runs the blocks."""
        self._engine = self.streamer.engine = weakref.ref(engine)  # it refers to this object
        self._backward = weakref.ref(engine.backward)

    @property
    def busy(self) -> bool:
        """Whether a forward or backward is running."""
        engine, backward = self._engine(), self._backward()  # which goes on after the model was deleted
        in_backward = backward is not None and backward.has_begun and not backward.is_left
        return in_backward or (engine is not None and engine.running)

    @property
    def weights_are_frozen(self) -> bool:
        """Whether it is inside of :meth:`frozen_weights`."""
        return self._frozen_weights > 0

    @contextlib.contextmanager
    def frozen_weights(self) -> Iterator[None]:
        """A context in which parameters do not change: forwards reuse the shards that are in slots."""
        if not self._frozen_weights:
            self.streamer.release()
        self._frozen_weights += 1
        try:
            yield
        finally:
            self._frozen_weights -= 1

    def prefetch(self, *, backward: bool) -> None:
        """Begins to load the first shards of the next pass, unless a pass is running."""
        if not self.busy:
            self.streamer.prefetch(backward=backward)

    # --- what is outside of the shards ------------------------------------------------------------------------------

    def first_trainable(self) -> int:
        """The first shard that a backward has to reach if no input needs a gradient."""
        if any(p.requires_grad for p in self.outside):
            return 0
        return next((shard.index for shard in self.shards if shard.trainable), len(self.shards))

    # --- where shards rest ------------------------------------------------------------------------------------------

    @property
    def plans(self) -> bool:
        """Whether steps are planned by what they measure, or bounded."""
        return self.steps.planner is not None or bool(self.policy.graph_bytes)

    def all_stays(self, leaves: Sequence[Sequence[Any]]) -> bool:
        """Whether it is planned that nothing moves or is recomputed in a step of micro-batches with these leaves."""
        planner = self.steps.planner
        return planner is not None and planner.all_stays([*map(self.row_units.count, leaves)])

    def check_open(self) -> None:
        """Raises RuntimeError after ``close()``, and in a forked child."""
        check_process(self._made_in, "this OffloadModel")
        if self.closed:
            raise RuntimeError("this OffloadModel was closed and cannot run; make a new one")

    def keep_in_memory(self, shards: Iterable[int]) -> None:
        """Makes exactly these shards rest in host memory, the others in their files, between two passes.

        Weights, gradients and optimizer states move; values, parameters and tensors of states stay the same objects.
        Where layers compute in host memory, they use these shards in place: without a slot, a load or a copy, except
        shards that are cast (``param_dtype``) or borrow a tied parameter from another one, which still need slots
        (:attr:`Shard.may_bind_in_place <offload.streaming.shard.Shard.may_bind_in_place>`). Where homes are in host
        memory anyway, only that changes. Beside a device, shards that rest on it stay there.

        Shards that leave memory are written first. A call that moves shards in both directions holds them all for a
        moment; two calls do not.

        Raises:
            ValueError: for an index that is none of a shard.
            RuntimeError: in a forward or backward, or if the model was closed.
            HomeInUseError: if other code holds views of weights or states of a shard that would move.
            OSError, MemoryError: if there is no space, or a pending update fails. After any of these nothing moved.
        """
        there = frozenset(shard.index for shard in self.shards if shard.tier is self._on_device)
        self._rest(frozenset(shards), there)

    def keep_on_device(self, shards: Iterable[int]) -> None:
        """Makes exactly these shards rest in the memory that layers compute in, which use them in place.

        On a device with memory of its own the others stay in host memory or go home, and the tensors of states are
        copies there; elsewhere as :meth:`keep_in_memory`, which says what is raised.
        """
        if self._on_device is None:
            self.keep_in_memory(shards)
            return
        there = frozenset(shard.index for shard in self.shards if shard.tier is self._memory)
        self._rest(there, frozenset(shards))

    def _rest(self, in_host: frozenset[int], on_device: frozenset[int]) -> None:
        self.check_open()
        wanted = in_host | on_device
        if self.public.sharded:
            raise ValueError("shards of a model with mesh= stay at home: their DTensors would not follow a move")
        if not wanted <= {*range(len(self.shards))}:
            raise ValueError(f"expected indices of {len(self.shards)} shards, got {sorted(wanted)} (shards)")
        if self.busy:
            raise RuntimeError("expected no running forward or backward, but shards were to be moved within one")
        in_place = on_device if self._on_device is not None else in_host
        elsewhere: dict[int, Tier] = dict.fromkeys(in_host, self._memory) if self.tier.blocking_io else {}
        if self._on_device is not None:
            elsewhere |= dict.fromkeys(on_device, self._on_device)
        moving = any(s.home is not None and s.tier is not elsewhere.get(s.index, self.tier) for s in self.shards)
        in_place = frozenset(j for j in in_place if self.shards[j].may_bind_in_place)
        if not moving and in_place == self.streamer.in_place():
            return  # updates stay pending
        self.streamer.apply_pending_updates()
        self.assigned_data.store()
        self.streamer.release()
        optimizers = self.streamer.gradient_offload.optimizers
        with error_context("moving shards between file and memory"):
            moves = move_homes(self.shards, self.tier, elsewhere, optimizers)

        @torch.no_grad()
        def commit() -> None:
            with outside_inference_mode():
                for move in moves:
                    move.commit()
            for shard in self.shards:
                shard.in_place = shard.index in in_place
            self.streamer.homes_moved()
            if (engine := self._engine()) is not None:
                engine.observe()
            for optimizer in optimizers:
                optimizer.reserve_buffers()
            there = [each.weights + each.states for each in self.bytes_in_memory()]
            self.meter.resting_bytes = sum(there[s.index] for s in self.shards if s.tier is self._memory)
            before = self._device_bytes
            self._device_bytes = sum(there[s.index] for s in self.shards if s.tier is self._on_device)
            self.meter.hold(self._device_bytes - before)

        try:
            commit()
        except BaseException:
            commit()  # an interrupt: everything is copied, and the rest cannot fail
            raise

    def write_back(self) -> None:
        """Writes the weights of shards that rest in memory to their files."""
        for shard in self.shards:
            if shard.file is not None and shard.home is not None:
                with error_context(f"writing shard {shard.index} to {self.tier.name}"):
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
