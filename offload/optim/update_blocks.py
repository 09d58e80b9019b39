"""Chooses the size of the blocks in which parameters in files are updated, by the memory for their buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offload.mesh.shard import MeshShard
from offload.optim.io_buffers import buffer_pool_bytes
from offload.optim.state_forms import StateForm
from offload.storage.buffer import PAGE_BYTES, whole_pages
from offload.storage.thread_memory import PIECE
from offload.streaming.shard import Shard

__all__ = ["MAX_BLOCK_BYTES", "StoredStates", "update_block_bytes", "update_block_bytes_of"]

#: Most bytes of weights of one update block.
MAX_BLOCK_BYTES = 8 << 20
#: With small shards: this fraction of the largest one, since the I/O buffers hold several blocks with their gradients
#: and moments, and must not outgrow the slots. In whole MiB, since a disk transfers whole pages.
BLOCKS_PER_SHARD, BLOCK_GRAIN_BYTES = 6, 1 << 20
#: Bytes of the tensors in which a piece of encoded states is decoded, updated and encoded, for each of its elements:
#: three states, and what rounding one of them makes.
PIECE_BYTES = 3 * 4 + 32


@dataclass(frozen=True)
class StoredStates:
    """How many bytes states take in files, and so in buffers."""

    #: Of each state, for each byte of a parameter.
    share: float = 1.0
    #: Most bytes of parameters of one shard whose states are in full all the same.
    in_full: int = 0
    #: Whether weights are decoded, updated and stored piece by piece.
    in_pieces: bool = False

    @classmethod
    def of(cls, form: StateForm | None, shards: Iterable[Shard]) -> StoredStates:
        """The sizes of the states of all parameters of some shards."""
        shards = list(shards)
        in_pieces = any(shard.formed for shard in shards)
        if form is None:
            return cls(in_pieces=in_pieces)
        owned = [[(s, form.encodes(shard.whole_like(s))) for s in shard.own] for shard in shards]
        shares = [form.share(s.full_dtype) for own in owned for s, encoded in own if encoded]
        in_full = (sum(s.full_nbytes for s, encoded in own if not encoded) for own in owned)
        return cls(max(shares, default=1.0), max(in_full, default=0), in_pieces)

    def buffer_bytes(self, update_block: int) -> int:
        """Most bytes that all buffers take, for blocks of so many bytes of weights."""
        pieces = PIECE_BYTES * min(PIECE, update_block // 2)
        if self.share == 1:
            return buffer_pool_bytes(update_block) + (pieces if self.in_pieces else 0)
        encoded = buffer_pool_bytes(update_block, self.share)
        return max(encoded, buffer_pool_bytes(min(self.in_full, update_block))) + pieces


def update_block_bytes(
    shards: Sequence[Shard], limit_bytes: float = math.inf, stored: StoredStates = StoredStates()
) -> int:
    """Bytes of weights of an update block, if all buffers get ``limit_bytes``. Raises ValueError for too few."""
    largest = max((sum(s.full_nbytes for s in shard.own) for shard in shards), default=0)
    found = update_block_bytes_of(largest, limit_bytes, stored)
    if not any(isinstance(shard, MeshShard) for shard in shards):
        return found
    # Slots hold no part by itself, so weights take a buffer, too: beside the gradient and two states a third more.
    return max(PAGE_BYTES, found * 3 // 4 // PAGE_BYTES * PAGE_BYTES)


def update_block_bytes_of(largest: int, limit_bytes: float = math.inf, stored: StoredStates = StoredStates()) -> int:
    """As :func:`update_block_bytes`, where the largest shard stores so many bytes of parameters."""
    update_block = min(MAX_BLOCK_BYTES, max(1, largest // BLOCKS_PER_SHARD // BLOCK_GRAIN_BYTES) * BLOCK_GRAIN_BYTES)
    update_block = min(update_block, whole_pages(largest) or update_block)
    while stored.buffer_bytes(update_block) > limit_bytes and update_block > PAGE_BYTES:
        update_block = max(PAGE_BYTES, update_block // 2 // PAGE_BYTES * PAGE_BYTES)
    least = stored.buffer_bytes(update_block)
    if least > limit_bytes:
        raise ValueError(
            f"optimizer states are on disk: their buffers take at least {least:,} bytes, but the model's memory leaves "
            f"{max(0, int(limit_bytes)):,} for them; make the model with memory={2 * least} or more, of which they may "
            f"take half, or with a larger memory_budget"
        )
    return update_block
