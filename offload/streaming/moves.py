"""Moves stored shards between their files and host memory: weights, gradients and optimizer states.

::

              allocate, copy           commit
    old home ----------------> both ----------------> new home

Everything is copied first, then each tensor gets its new memory. Parameters, gradients and optimizer states stay the
same objects with the same values.

Guarantees
    * A failure (a full disk, no memory) changes nothing. A commit that is interrupted is completed.
    * Memory that other code refers to is not moved: a view of it would no longer show later changes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.storage import Block, Tier
from offload.storage.contract import bytes_of
from offload.streaming.optimizers import Optimizers
from offload.streaming.shard import Shard
from offload.streaming.stored_gradients import GradientRegion
from pipe.torch_private.autograd import outside_inference_mode
from pipe.torch_private.tensors import storage_uses

__all__ = ["HomeInUseError", "Move", "NewMemory", "home_in_use", "move_homes", "prepare_move"]

#: A tensor and the memory that it will refer to, with the same values.
NewMemory = tuple[Tensor, Tensor]


class HomeInUseError(RuntimeError):
    """Other code refers to the memory of shards that were to be moved."""

    def __init__(self, shards: Sequence[int]) -> None:
        super().__init__(
            f"shards {[*shards]} cannot move between file and memory, nor be cut otherwise: other code holds views of "
            f"their weights or optimizer states (a state_dict(), a NumPy array, a forward whose backward did not run "
            f"yet), which might no longer show later values; nothing was moved. Delete them, or move other shards"
        )
        #: Their indices.
        self.shards = tuple(shards)


@dataclass
class Move:
    """A move of one shard whose bytes are copied already."""

    shard: Shard
    home: Block | None
    tier: Tier
    #: The file of a home that moves to memory.
    file: Block | None
    #: The same of the lower halves of weights.
    lower: Block | None
    lower_file: Block | None
    gradient_regions: list[GradientRegion]
    #: See :attr:`.Shard.own_memory`.
    own_memory: dict[int, Tensor]
    #: The tensors that move.
    tensors: list[NewMemory]
    #: What optimizers do for it.
    commits: list[Callable[[], None]]

    def commit(self) -> None:
        """Ends the move. Idempotent."""
        shard = self.shard
        shard.home, shard.tier, shard.file = self.home, self.tier, self.file
        shard.lower, shard.lower_file = self.lower, self.lower_file
        shard.gradient_regions, shard.own_memory = self.gradient_regions, self.own_memory
        for tensor, memory in self.tensors:
            tensor.data = memory
        for commit in self.commits:
            commit()


def move_homes(
    shards: Sequence[Shard], files: Tier, memory: Tier, wanted: frozenset[int], optimizers: Optimizers
) -> list[Move]:
    """Prepares the moves after which exactly the shards ``wanted`` rest in ``memory``, the others in ``files``.

    No update may be pending, and no shard loaded. Raises OSError or MemoryError without space, HomeInUseError, or
    TypeError for optimizer states that cannot be stored in files; nothing has changed then.
    """
    moving = [shard for shard in shards if shard.home is not None and (shard.index in wanted) == shard.blocking_io]
    if any(_is_in_use(shard, optimizers) for shard in moving):
        gc.collect()  # an optimizer that is garbage still refers to homes
    in_use = [shard.index for shard in moving if _is_in_use(shard, optimizers)]
    if in_use:
        raise HomeInUseError(in_use)
    # First those that leave memory: if the disk is full, no memory was taken yet.
    moving.sort(key=lambda shard: shard.index in wanted)
    with torch.no_grad(), outside_inference_mode():
        return [prepare_move(shard, memory if shard.index in wanted else files, optimizers) for shard in moving]


def home_in_use(shard: Shard, optimizers: Optimizers) -> bool:
    """Whether other code refers to the memory of a shard's weights."""
    if shard.home is None:
        return False
    return shard.count_home_owners() > shard.home_uses + sum(optimizers.home_views(shard))


def _is_in_use(shard: Shard, optimizers: Optimizers) -> bool:
    return home_in_use(shard, optimizers) or any(o.states_in_use(shard) for o in optimizers)


def prepare_move(shard: Shard, tier: Tier, optimizers: Optimizers) -> Move:
    """Copies a shard to another storage."""
    assert shard.home is not None
    home, file = _moved(shard.home, shard.file, tier, f"shard{shard.index}-weights")
    lower = lower_file = None
    if shard.lower is not None:
        lower, lower_file = _moved(shard.lower, shard.lower_file, tier, f"shard{shard.index}-lower-halves")
    views = {s: s.own_view(home.tensor) for s in shard.own}
    tensors: list[NewMemory] = [(t, view) for s, view in views.items() for t in (s.parameter, *s.aliases)]
    regions, moved = _moved_gradients(shard, tier)
    tensors += moved
    commits = []
    for optimizer in optimizers:
        states, commit = optimizer.prepare_move(shard, tier, home)
        tensors += states
        commits.append(commit)
    places = {s.offset: view for s, view in views.items() if s.nbytes}
    return Move(shard, home, tier, file, lower, lower_file, regions, places, tensors, commits)


def _moved(block: Block, file: Block | None, tier: Tier, label: str) -> tuple[Block, Block | None]:
    """Copies a block of weights to a tier; returns its new place, and its file if that is memory."""
    if tier.blocking_io:
        assert file is not None
        file.write(block.tensor, 0)
        return file, None
    memory = tier.allocate(block.nbytes, label)
    block.read_into(memory.tensor)
    return memory, block


def _moved_gradients(shard: Shard, tier: Tier) -> tuple[list[GradientRegion], list[NewMemory]]:
    """Regions and new memory of stored gradients. Those that other code views stay where they are."""
    own = {id(s.parameter) for s in shard.own}
    stay: list[GradientRegion] = []
    moved: list[NewMemory] = []
    if not tier.blocking_io:
        for region in shard.gradient_regions:
            if region.in_use():
                stay.append(region)
                continue
            for s in region.stored():
                if id(s.parameter) in own and (g := s.parameter.grad) is not None:
                    moved.append((g, _copy_of(region.block, region.offsets[id(s.parameter)], g)))
        return stay, moved
    uses: dict[int, int] = {}
    for region in shard.gradient_regions:
        stored = region.stored()
        uses.update((id(s.parameter), 1 + len(stored)) for s in stored)
    grads = {s: s.parameter.grad for s in shard.own if s.parameter.grad is not None}
    movable = {
        s: g
        for s, g in grads.items()
        if not g.is_sparse
        and (g.stride(), g.dtype, g.device.type) == (s.stride, shard.gradient_types.of(s), "cpu")
        and storage_uses(g) <= uses.get(id(s.parameter), 1)
    }
    if not movable:
        return [], []
    placed = [s for s in shard.own if s in movable or s.parameter.requires_grad]
    new = GradientRegion.allocate(tier, f"shard{shard.index}-gradients", placed, shard.gradient_types)
    for s, g in movable.items():
        new.block.write(bytes_of(g), new.offsets[id(s.parameter)])
    return [new], [(g, new.view(s)) for s, g in movable.items()]


def _copy_of(block: Block, offset: int, tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    block.read_into(bytes_of(copy), offset)
    return copy
