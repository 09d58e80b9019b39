"""Chooses the size of the blocks in which parameters in files are updated, by the memory for their buffers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from offload.optim.groups import options_of
from offload.optim.io_buffers import IO_BUFFERS, MOST_STATES
from offload.optim.param_block import ELEMENTWISE
from offload.optim.state_forms import StateForm
from offload.storage.buffer import PAGE_BYTES, PIECE, whole_pages
from offload.streaming.shard import Shard
from offload.units import shown_bytes

__all__ = ["MAX_BLOCK_BYTES", "StoredStates", "states_kept"]

#: Most bytes of weights of one update block.
MAX_BLOCK_BYTES = 8 << 20
#: With small shards: this fraction of the largest one, since the I/O buffers hold several blocks with their gradients
#: and moments, and must not outgrow the slots by much. But at least so many bytes: a block costs a millisecond of the
#: interpreter.
BLOCKS_PER_SHARD, SMALL_BLOCK_BYTES = 3, 1 << 20
#: Bytes of the tensors in which a piece of encoded states is decoded, updated and encoded, for each of its elements:
#: three states, and what rounding one of them makes.
PIECE_BYTES = 3 * 4 + 32


@dataclass(frozen=True)
class StoredStates:
    """How many bytes states take in files, and so in buffers."""

    #: Most bytes of parameters of one shard.
    largest: int = 0
    #: Of each state, for each byte of a parameter.
    share: float = 1.0
    #: Most bytes of parameters of one shard whose states are in full all the same.
    in_full: int = 0
    #: Whether weights are decoded, updated and stored piece by piece.
    in_pieces: bool = False
    #: States of a parameter, with its shape.
    count: int = MOST_STATES
    #: Whether gradients are stored in another type than that of their parameters.
    rounded: bool = True
    #: Whether slots keep the weights, so that buffers need not hold them.
    weights_in_slots: bool = True

    @classmethod
    def of(cls, form: StateForm | None, shards: Iterable[Shard], count: int = MOST_STATES) -> StoredStates:
        """The sizes of the ``count`` states of each of the parameters of some shards."""
        shards = list(shards)
        in_pieces = any(shard.formed for shard in shards)
        rounded = any(shard.gradient_types.rounds(s) for shard in shards for s in shard.own)
        in_slots = all(shard.slot_keeps_weights for shard in shards)
        largest = max((sum(s.full_nbytes for s in shard.own) for shard in shards), default=0)
        if form is None:
            return cls(largest, in_pieces=in_pieces, count=count, rounded=rounded, weights_in_slots=in_slots)
        owned = [[(s, form.encodes(shard.whole_like(s))) for s in shard.own] for shard in shards]
        shares = [form.share(s.full_dtype) for own in owned for s, encoded in own if encoded]
        in_full = (sum(s.full_nbytes for s, encoded in own if not encoded) for own in owned)
        return cls(largest, max(shares, default=1.0), max(in_full, default=0), in_pieces, count, rounded, in_slots)

    def update_block_bytes(self, limit_bytes: float = math.inf) -> int:
        """Bytes of weights of an update block, if all buffers get ``limit_bytes``. Raises ValueError for too few."""
        # Weights in buffers take a third more, beside a gradient and two states.
        share = 1.0 if self.weights_in_slots else 3 / 4
        part = whole_pages(math.ceil(self.largest * share / BLOCKS_PER_SHARD))
        update_block = min(int(MAX_BLOCK_BYTES * share), max(part, SMALL_BLOCK_BYTES))
        update_block = min(update_block, whole_pages(self.largest) or update_block)
        if self.buffer_bytes(update_block) > limit_bytes:
            pages = range(1, update_block // PAGE_BYTES)
            fitting = bisect_right(pages, limit_bytes, key=lambda count: self.buffer_bytes(count * PAGE_BYTES))
            update_block = max(1, fitting) * PAGE_BYTES
        least = self.buffer_bytes(update_block)
        if least > limit_bytes:
            raise ValueError(
                f"optimizer states are on disk: their buffers take at least {shown_bytes(least)}, but the model's "
                f"memory leaves {shown_bytes(max(0, int(limit_bytes)))} for them; make the model with "
                f"memory={2 * least} or more, of which they may take half"
            )
        return update_block

    def buffer_bytes(self, update_block: int) -> int:
        """Most bytes that all buffers take, for blocks of so many bytes of weights."""
        pieces = PIECE_BYTES * min(PIECE, update_block // 2)
        if self.share == 1:
            return self._pool_bytes(update_block) + (pieces if self.in_pieces else 0)
        encoded = self._pool_bytes(update_block, self.share)
        return max(encoded, self._pool_bytes(min(self.in_full, update_block))) + pieces

    def _pool_bytes(self, update_block: int, share: float = 1.0) -> int:
        """Those of weights and their gradients, which may be stored in another type as well, and of states."""
        state_bytes = math.ceil(share * update_block) + (1 if share == 1 else 2) * PAGE_BYTES  # codes and scales
        return IO_BUFFERS * ((3 if self.rounded else 2) * (update_block + PAGE_BYTES) + self.count * state_bytes)


def states_kept(kind: type[Optimizer], groups: Iterable[Mapping[str, Any]]) -> int:
    """The most states with the shape of a parameter that a class keeps with the options of some groups.

    It updates two numbers for that. :data:`.MOST_STATES` for a class that may do more than that.
    """
    if kind not in ELEMENTWISE:
        return MOST_STATES
    most = 0
    for group in groups:
        number = torch.nn.Parameter(torch.zeros(2))
        number.grad = torch.zeros(2)
        plain = dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), False)
        optimizer: Any = kind([{**options_of(group), **plain, "params": [number]}])
        optimizer.step()
        kept = optimizer.state[number].values()
        most = max(most, sum(isinstance(value, torch.Tensor) and value.shape == number.shape for value in kept))
    return most
