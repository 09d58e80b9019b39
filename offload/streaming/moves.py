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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offload.planning.partition import aligned
from offload.storage import Block, Tier
from offload.storage.contract import bytes_of
from offload.streaming.optimizers import Optimizers
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice
from pipe.torch_private import outside_inference_mode, storage_uses

__all__ = ["HomeInUseError", "Move", "NewMemory", "move_homes", "prepare_move"]

#: A tensor and the memory that it will refer to, with the same values.
NewMemory = tuple[Tensor, Tensor]


class HomeInUseError(RuntimeError):
    """Other code refers to the memory of shards that were to be moved."""

    def __init__(self, shards: Sequence[int]) -> None:
        super().__init__(
            f"shards {[*shards]} cannot move between file and memory: other code holds views of their weights or "
            f"optimizer states (a state_dict(), a NumPy array, a forward whose backward did not run yet), which would "
            f"no longer show later values; nothing was moved. Delete them, or move other shards"
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
    gradients: Block | None
    gradient_offsets: dict[Slice, int]
    #: The tensors that move.
    tensors: list[NewMemory]
    #: What optimizers do for it.
    commits: list[Callable[[], None]]

    def commit(self) -> None:
        """Ends the move. Idempotent."""
        shard = self.shard
        shard.home, shard.tier, shard.file = self.home, self.tier, self.file
        shard.gradients, shard.gradient_offsets = self.gradients, self.gradient_offsets
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


def _is_in_use(shard: Shard, optimizers: Optimizers) -> bool:
    assert shard.home is not None
    uses = shard.home_uses + sum(optimizers.home_views(shard))
    return storage_uses(shard.home.tensor) > uses or any(o.states_in_use(shard) for o in optimizers)


def prepare_move(shard: Shard, tier: Tier, optimizers: Optimizers) -> Move:
    """Copies a shard to another storage."""
    assert shard.home is not None
    if tier.blocking_io:
        assert shard.file is not None
        home, file = shard.file, None
        home.write(shard.home.tensor, 0)
    else:
        home, file = tier.allocate(shard.home.nbytes, f"shard{shard.index}-weights"), shard.home
        file.read_into(home.tensor)
    tensors: list[NewMemory] = [(t, s.view(home.tensor)) for s in shard.own for t in (s.parameter, *s.aliases)]
    gradients, offsets, moved = _moved_gradients(shard, tier)
    tensors += moved
    commits = []
    for optimizer in optimizers:
        states, commit = optimizer.prepare_move(shard, tier, home)
        tensors += states
        commits.append(commit)
    return Move(shard, home, tier, file, gradients, offsets, tensors, commits)


def _moved_gradients(shard: Shard, tier: Tier) -> tuple[Block | None, dict[Slice, int], list[NewMemory]]:
    """Block, offsets and new memory of stored gradients. Those that other code views stay where they are."""
    block = shard.gradients
    grads = {s: s.parameter.grad for s in shard.own if s.parameter.grad is not None}
    stored = {s: g for s, g in grads.items() if block is not None and s in shard.gradient_offsets and _shares(g, block)}
    if not tier.blocking_io:
        if block is None or storage_uses(block.tensor) > 1 + len(stored):
            return block, shard.gradient_offsets, []
        return None, {}, [(g, _copy_of(block, shard.gradient_offsets[s], g)) for s, g in stored.items()]
    uses = 1 + len(stored)
    movable = {
        s: g
        for s, g in grads.items()
        if not g.is_sparse
        and (g.stride(), g.dtype, g.device.type) == (s.stride, s.dtype, "cpu")
        and storage_uses(g) <= (uses if s in stored else 1)
    }
    if not movable:
        return None, {}, []
    offsets, end = {}, 0
    for s in shard.own:
        if s in movable or s.parameter.requires_grad:
            offsets[s] = end
            end += aligned(s.nbytes)
    new = tier.allocate(end, f"shard{shard.index}-gradients")
    for s, g in movable.items():
        new.write(bytes_of(g), offsets[s])
    return new, offsets, [(g, replace(s, offset=offsets[s]).view(new.tensor)) for s, g in movable.items()]


def _shares(tensor: Tensor, block: Block) -> bool:
    strided: Any = tensor.layout is torch.strided
    return bool(strided) and tensor.untyped_storage().data_ptr() == block.tensor.untyped_storage().data_ptr()


def _copy_of(block: Block, offset: int, tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    block.read_into(bytes_of(copy), offset)
    return copy
