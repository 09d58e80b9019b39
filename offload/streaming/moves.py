"""Moves stored shards between their homes, host memory and the compute device: weights, gradients, optimizer states.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.storage import Block, DeviceTier, Tier
from offload.storage.contract import bytes_of
from offload.streaming.optimizers import Optimizers
from offload.streaming.shard import Shard
from offload.streaming.stored_gradients import GradientRegion
from pipe.torch_private.autograd import outside_inference_mode
from pipe.torch_private.tensors import storage_uses

__all__ = ["HomeInUseError", "Move", "NewMemory", "move_homes", "prepare_move"]

#: A tensor and the memory that it will refer to, with the same values.
NewMemory = tuple[Tensor, Tensor]


class HomeInUseError(RuntimeError):
    """Other code refers to the memory of shards that were to be moved."""

    def __init__(self, shards: Sequence[int]) -> None:
        super().__init__(
            f"shards {[*shards]} cannot move between file and memory: other code holds views of "
            f"their weights or optimizer states (a state_dict(), a NumPy array, a forward whose backward did not run "
            f"yet), which might no longer show later values; nothing was moved. Delete them, or move other shards"
        )
        #: Their indices.
        self.shards = tuple(shards)


@dataclass
class Move:
    """A move of one shard whose bytes are copied already."""

    shard: Shard
    #: Those of its attributes that change, with their values.
    changes: dict[str, Any]
    #: The tensors that move.
    tensors: list[NewMemory]
    #: What optimizers do for it.
    commits: list[Callable[[], None]]

    def commit(self) -> None:
        """Ends the move. Idempotent."""
        vars(self.shard).update(self.changes)
        for tensor, memory in self.tensors:
            tensor.data = memory
        for commit in self.commits:
            commit()


def move_homes(
    shards: Sequence[Shard], homes: Tier, elsewhere: Mapping[int, Tier], optimizers: Optimizers
) -> list[Move]:
    """Prepares the moves after which these shards rest ``elsewhere``, by index, and the others at ``homes``.

    No update may be pending, and no shard loaded. Raises OSError or MemoryError without space, HomeInUseError, or
    TypeError for optimizer states that cannot be stored in files; nothing has changed then.
    """
    moving = [s for s in shards if s.home is not None and s.tier is not elsewhere.get(s.index, homes)]
    if any(_is_in_use(shard, optimizers) for shard in moving):
        gc.collect()  # an optimizer that is garbage still refers to homes
    in_use = [shard.index for shard in moving if _is_in_use(shard, optimizers)]
    if in_use:
        raise HomeInUseError(in_use)
    # First those that go home: if the disk is full, no memory was taken yet.
    moving.sort(key=lambda shard: shard.index in elsewhere)
    with torch.no_grad(), outside_inference_mode():
        moves = [prepare_move(shard, elsewhere.get(shard.index, homes), homes, optimizers) for shard in moving]
    blocks = (block for move in moves for block in (move.shard.home, move.changes["home"]) if block is not None)
    for device in {block.tensor.device for block in blocks if block.tensor.is_cuda}:
        # Stream -> host. Without this, what went home is read while it is still copied.
        torch.cuda.synchronize(device)
    return moves


def _is_in_use(shard: Shard, optimizers: Optimizers) -> bool:
    """Whether other code refers to the memory of a shard's weights or states."""
    held = shard.home is not None and shard.count_home_owners() > shard.home_uses
    return held or any(o.states_in_use(shard) for o in optimizers)


def prepare_move(shard: Shard, tier: Tier, homes: Tier, optimizers: Optimizers) -> Move:
    """Copies a shard to another storage; ``homes``: that of the model."""
    assert shard.home is not None
    places: dict[str, Any] = {"tier": tier}
    for name, kept in (("home", "file"), ("lower", "lower_file")):
        block = getattr(shard, name)
        if block is not None:
            label = f"shard{shard.index}-{name}"
            places[name], places[kept] = _moved(block, getattr(shard, kept), tier, label, at_home=tier is homes)
    home = places["home"]
    views = {s: s.own_view(home.tensor) for s in shard.own}
    places["own_memory"] = {s.offset: view for s, view in views.items() if s.nbytes}
    tensors: list[NewMemory] = [(t, view) for s, view in views.items() for t in (s.parameter, *s.aliases)]
    places["gradient_regions"], moved = _moved_gradients(shard, tier)
    tensors += moved
    commits = []
    for optimizer in optimizers:
        states, commit = optimizer.prepare_move(shard, tier)
        tensors += states
        commits.append(commit)
    return Move(shard, places, tensors, commits)


def _moved(block: Block, file: Block | None, tier: Tier, label: str, *, at_home: bool) -> tuple[Block, Block | None]:
    """Copies a block of weights to a tier; returns its new place, and its home if that is not it."""
    if at_home:
        assert file is not None
        file.write(block.tensor, 0)
        return file, None
    memory = tier.allocate(block.nbytes, label)
    block.read_into(memory.tensor)
    return memory, file or block


def _moved_gradients(shard: Shard, tier: Tier) -> tuple[list[GradientRegion], list[NewMemory]]:
    """Regions and new memory of stored gradients. Those that other code views stay where they are."""
    uses: dict[int, int] = {}
    for region in shard.gradient_regions:
        stored = region.stored()
        uses.update((id(s.parameter), 1 + len(stored)) for s in stored)
    grads = {s: s.parameter.grad for s in shard.own if s.parameter.grad is not None}
    movable = {
        s: g
        for s, g in grads.items()
        if not g.is_sparse
        and (g.stride(), g.dtype, g.device) == (s.stride, shard.gradient_types.of(s), s.parameter.device)
        and storage_uses(g) <= uses.get(id(s.parameter), 1)
    }
    if len(movable) < len(grads) and any(isinstance(each, DeviceTier) for each in (tier, shard.tier)):
        raise HomeInUseError([shard.index])
    if not movable:
        return [], []
    # In memory, later gradients take the places in which they are computed.
    placed = [s for s in shard.own if s in movable or (s.parameter.requires_grad and tier.blocking_io)]
    new = GradientRegion.allocate(tier, f"shard{shard.index}-gradients", placed, shard.gradient_types)
    for s, g in movable.items():
        new.block.write(bytes_of(g), new.offsets[id(s.parameter)])
    return [new] if tier.blocking_io else [], [(g, new.view(s)) for s, g in movable.items()]
