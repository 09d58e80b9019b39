"""Parameters of shards that stay on the compute device, such as adapters over a base that streams.

They belong to a shard without layers, which is never loaded or evicted. The shards whose layers use them borrow them,
as they borrow tied parameters: a copy is in the slot while a shard computes, and gradients are added to the owner's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from offload.forms.quantised import stored_tensors
from offload.storage.buffer import device_buffer
from offload.storage.host import DeviceTier, MemoryBlock
from offload.streaming.shard import Shard
from offload.streaming.slices import layout

__all__ = ["resident_shard"]


def resident_shard(
    layers: Mapping[str, nn.Module], parameters: set[nn.Parameter], index: int, device: torch.device
) -> Shard | None:
    """Moves ``parameters`` of some layers to the compute device: the shard that owns them; None if there are none."""
    if not parameters:
        return None
    shard = Shard(index, 0, [], tier=DeviceTier(device))
    shard.own, nbytes = layout(each for each in stored_tensors(layers.items()) if each.parameter in parameters)
    shard.home = MemoryBlock(device_buffer(nbytes, device))
    for s in shard.own:
        shard.home_view(s).copy_(s.parameter.detach())
        shard.move_home(s)
    return shard
