"""Chooses the size of the blocks in which parameters in files are updated, by the memory for their buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offload.optim.io_buffers import buffer_pool_bytes
from offload.storage.buffer import PAGE_BYTES, whole_pages
from offload.streaming.shard import Shard

__all__ = ["MAX_BLOCK_BYTES", "update_block_bytes", "update_block_bytes_of"]

#: Most bytes of weights of one update block.
MAX_BLOCK_BYTES = 8 << 20
#: With small shards: this fraction of the largest one, since the I/O buffers hold several blocks with their gradients
#: and moments, and must not outgrow the slots. In whole MiB, since a disk transfers whole pages.
BLOCKS_PER_SHARD, BLOCK_GRAIN_BYTES = 6, 1 << 20


def update_block_bytes(shards: Sequence[Shard], limit_bytes: float = math.inf) -> int:
    """Bytes of weights of an update block, if all buffers get ``limit_bytes``. Raises ValueError for too few."""
    return update_block_bytes_of(max((sum(s.nbytes for s in shard.own) for shard in shards), default=0), limit_bytes)


def update_block_bytes_of(largest: int, limit_bytes: float = math.inf) -> int:
    """The same where the largest shard stores so many bytes of parameters."""
    update_block = min(MAX_BLOCK_BYTES, max(1, largest // BLOCKS_PER_SHARD // BLOCK_GRAIN_BYTES) * BLOCK_GRAIN_BYTES)
    update_block = min(update_block, whole_pages(largest) or update_block)
    while buffer_pool_bytes(update_block) > limit_bytes and update_block > PAGE_BYTES:
        update_block = max(PAGE_BYTES, update_block // 2 // PAGE_BYTES * PAGE_BYTES)
    least = buffer_pool_bytes(update_block)
    if least > limit_bytes:
        raise ValueError(
            f"optimizer states are on disk: their buffers take at least {least:,} bytes, but the model's memory leaves "
            f"{max(0, int(limit_bytes)):,} for them; make the model with memory={2 * least} or more, of which they may "
            f"take half, or with a larger memory_budget"
        )
    return update_block
