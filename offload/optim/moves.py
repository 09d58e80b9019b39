"""Moves the optimizer states of a shard between files and host memory: param blocks of the other kind take them over.

In files a shard has several param blocks of a limited size, in memory one for each group. States are handed over
parameter by parameter, as by a checkpoint.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.disk_update import DiskParamBlock
from offload.optim.io_buffers import IOBufferPool
from offload.optim.param_block import HostParamBlock, OptimizerFactory, ParamBlock
from offload.optim.update_blocks import StoredStates, update_block_bytes
from offload.storage import DeviceTier, Tier
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice
from pipe.torch_private.tensors import storage_uses

if TYPE_CHECKING:
    from offload.engine.homes import ModelHomes

__all__ = ["MovableStates"]


def group_slices(slices: Sequence[Slice], max_bytes: int) -> Iterator[list[Slice]]:
    """Groups parameters into param blocks of at most ``max_bytes``; a larger parameter is one of its own.

    In order of size: norms and biases, which are stored between matrices, are then updated together.
    """
    param_block: list[Slice] = []
    for s in sorted(slices, key=lambda s: s.full_nbytes):
        if param_block and sum(member.full_nbytes for member in param_block) + s.full_nbytes > max_bytes:
            yield param_block
            param_block = []
        param_block.append(s)
    if param_block:
        yield param_block


class MovableStates(Optimizer):
    """The part of :class:`~offload.OffloadOptimizer` that knows where states are stored."""

    #: Whether steps write parameters as homes store them.
    updates_homes = True
    homes: ModelHomes
    factory: OptimizerFactory
    buffer_pool: IOBufferPool
    #: Bytes of weights that are updated at a time, where they are in files.
    update_block_bytes: int
    stored: StoredStates
    #: Of each shard, for the parameters of this optimizer.
    param_blocks: dict[Shard, list[ParamBlock]]
    #: Of parameters that stay on the compute device.
    resident_blocks: list[ParamBlock]

    @abstractmethod
    def options(self) -> list[dict[str, Any]]:
        """A copy of the hyperparameters of all groups."""

    def publish(self, param_block: ParamBlock) -> None:
        """Shows the states of a param block in :attr:`state`."""
        public = self.homes.public
        for s, state in zip(param_block.slices, param_block.states(), strict=True):
            if state:
                self.state[public.of(s)] = public.show_state(s, state)

    def load_states(self, param_block: ParamBlock, options: list[dict[str, Any]]) -> None:
        """Takes the states of a param block from :attr:`state`, where they were loaded, and shows them there again."""
        public = self.homes.public
        shown = [(s, public.of(s)) for s in param_block.slices]
        param_block.load_states([public.stored_state(s, self.state.get(p, {})) for s, p in shown], options)
        for _, p in shown:
            self.state.pop(p, None)
        self.publish(param_block)

    def make_param_blocks(self, shard: Shard, slices: Sequence[Slice], group: int, tier: Tier) -> list[ParamBlock]:
        """New param blocks of parameters of one shard and one group, whose states are stored in ``tier``."""
        if not tier.blocking_io:
            device = tier.device if isinstance(tier, DeviceTier) else torch.device("cpu")
            return [HostParamBlock(shard, slices, group, self.factory, device)] if slices else []
        most = self.update_block_bytes
        return [
            DiskParamBlock(shard, part, group, self.factory, tier, self.buffer_pool, most)
            for part in group_slices(slices, most)
        ]

    def reserve_buffers(self) -> None:
        """Frees the buffers of updates in files if no shard needs them."""
        if not any(shard.blocking_io for shard in self.homes.shards):
            self.buffer_pool.free_memory()

    def buffer_bytes(self, spare_bytes: float | None = None) -> int:
        """Bytes of the buffers of updates in files; 0 for homes in memory.

        Those that are reserved, or more if updates have needed more. An update whose gradient is still in memory needs
        fewer, but which one it is depends on how fast the files are. ``spare_bytes``: those that would be reserved if
        so many were left for them.
        """
        if not self.homes.tier.blocking_io:
            return 0
        if spare_bytes is not None:
            return self.stored.buffer_bytes(update_block_bytes(self.homes.shards, spare_bytes, self.stored))
        return max(self.buffer_pool.nbytes, self.stored.buffer_bytes(self.update_block_bytes))

    def state_bytes(self, shard: Shard) -> int:
        """Bytes of the states of a shard; 0 before its first update."""
        return _nbytes(self._state_tensors(self.param_blocks.get(shard, ())))

    def resident_state_bytes(self) -> int:
        """Bytes of the states of parameters that stay on the compute device; 0 before their first update."""
        return _nbytes(self._state_tensors(self.resident_blocks))

    def states_in_use(self, shard: Shard) -> bool:
        """Whether other code has views of the states of a shard, besides the tensors themselves."""
        stored = 1 if shard.blocking_io else 0  # the block itself

        own = [value for value in self._state_tensors(self.param_blocks.get(shard, ())) if not value.is_sparse]
        ours = Counter(value.untyped_storage().data_ptr() for value in own)
        tensors = [value for value in own if value.dim()]
        return any(storage_uses(value) > ours[value.untyped_storage().data_ptr()] + stored for value in tensors)

    @staticmethod
    def _state_tensors(param_blocks: Iterable[ParamBlock]) -> Iterator[Tensor]:
        for param_block in param_blocks:
            for state in param_block.states():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def prepare_move(self, shard: Shard, tier: Tier) -> tuple[list[tuple[Tensor, Tensor]], Callable[[], None]]:
        """Copies the states of a shard to ``tier``.

        Returns the tensors that move, each with its new memory; and what ends the move after they got it (idempotent).
        Between devices states are copied, as by ``load_state_dict()``: which of them are on which device is the class's
        to decide.
        """
        crosses = isinstance(tier, DeviceTier) or isinstance(shard.tier, DeviceTier)
        old, options = self.param_blocks.get(shard, []), self.options()
        new: list[ParamBlock] = []
        moved: list[tuple[Tensor, Tensor]] = []
        if not (tier.blocking_io or crosses):
            moved += [pair for block in old for pair in block.states_in_memory()]
        for group in dict.fromkeys(block.group for block in old):
            members = [block for block in old if block.group == group]
            made = any(member.optimizer is not None for member in members)
            states = {s: state for block in members for s, state in zip(block.slices, block.states(), strict=True)}
            for block in self.make_param_blocks(shard, [s for s in shard.own if s in states], group, tier):
                mine = [states[s] for s in block.slices]
                if made and crosses:
                    block.load_states(mine, options)
                elif made:
                    moved += block.adopt_states(mine, options)
                new.append(block)

        def commit() -> None:
            if shard in self.param_blocks:
                self.param_blocks[shard] = new
            for block in new:
                self.publish(block)

        return moved, commit


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
