"""A shard of which each rank stores a part: loads gather the whole parameters into the slot.

::

    home of rank 0   rows of p, rows of q  --+
    home of rank 1   rows of p, rows of q  --+--> staging area --> slot: p, q as whole plain tensors
                        read                 gather             copy

Each parameter is two objects. Layers use the whole one, :attr:`Slice.parameter <offload.streaming.slices.Slice>` of
:attr:`Shard.slices`, which has values in a visit only. The stored one, of :attr:`Shard.own`, has the shape of this
rank's part; its ``.data`` is the home and its ``.grad`` the stored gradient all the time, so gradients, optimizers and
files treat it as any other parameter. What users see is a third, see :mod:`offload.mesh.public`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.mesh.parts import Part, WholePart, offsets_of
from offload.mesh.ranks import Ranks
from offload.storage import Tier
from offload.streaming.materialize import Materializer, Values
from offload.streaming.quantised import stored_tensors
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice, layout
from pipe.torch_private import set_versions

if TYPE_CHECKING:
    from offload.optim.update import Update

__all__ = ["MeshShard", "make_mesh_shards", "without_memory"]


@dataclass(eq=False, kw_only=True)
class MeshShard(Shard):
    """A shard whose home is this rank's part of its parameters."""

    ranks: Ranks
    #: The cut of each parameter of :attr:`Shard.slices`, and its offset in what one rank sends.
    parts: list[Part] = field(default_factory=list)
    offsets: Sequence[int] = ()
    #: For each stored parameter, the one that users see.
    shown: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    #: Bytes that each rank sends.
    part_bytes: int = 0

    @property
    def casts(self) -> bool:
        """Always: slots hold other bytes than storage, which has only a part of them."""
        return True

    def versions(self) -> tuple[int, ...]:
        """Of each parameter, the sum of the counters of all tensors through which it can be written."""
        return tuple(
            here.parameter._version + self._versions_at_home(there.parameter)
            for here, there in zip(self.slices, self.at_home, strict=True)
        )

    def set_versions(self, versions: tuple[int, ...]) -> None:
        """Declares that the parameters hold the same values as when their counters were ``versions``."""
        if versions != self.versions():
            stored = [self._versions_at_home(there.parameter) for there in self.at_home]
            set_versions(self.parameters, [v - n for v, n in zip(versions, stored, strict=True)])

    def _versions_at_home(self, stored: nn.Parameter) -> int:
        """Fused and foreach operations on DTensors increment no counter."""
        shown: Any = self.shown.get(stored)
        return stored._version + (0 if shown is None else shown._version + shown.to_local()._version)

    def fill(self, slot: Tensor, update: Update | None = None) -> None:
        """Reads this rank's part, gathers those of the others, and copies all into ``slot``. On the lane of ranks."""
        for k, here in enumerate(self.slices):
            if isinstance(self.parts[k], WholePart):
                owner, there = self.owner_of(k)
                here.view(slot).copy_(owner.home_view(there))
        if not self.part_bytes:
            return
        ranks = self.ranks
        staging = ranks.buffer("staging", ranks.count * self.part_bytes).view(ranks.count, self.part_bytes)
        mine = staging[ranks.rank]
        if self.home is not None:
            self.home.read_into(mine[: self.home.nbytes])
        for k, (owner, there) in enumerate(self.loans, len(self.own)):
            if isinstance(self.parts[k], WholePart):
                continue
            self.parts[k].view(mine, self.offsets[k], ranks.rank).copy_(owner.home_view(there))
        ranks.all_gather(staging)
        for here, part, offset in zip(self.slices, self.parts, self.offsets, strict=True):
            if isinstance(part, WholePart):
                continue
            whole = here.view(slot)
            for rank in range(ranks.count):
                begin, end = part.span(rank)
                if begin < end:
                    whole[begin:end].copy_(part.view(staging[rank], offset, rank))

    def part_at_home(self, position: int, whole: Tensor) -> Tensor:
        """The rows of a whole parameter that this rank stores."""
        begin, end = self.parts[position].span(self.ranks.rank)
        return whole if isinstance(self.parts[position], WholePart) else whole[begin:end]

    def check_stores(self, positions: Sequence[int]) -> None:
        """Raises RuntimeError: what a layer writes depends on the batch of this rank."""
        if positions:
            names = ", ".join(self.slices[k].name for k in positions)
            raise RuntimeError(
                f"the layers of shard {self.index} wrote their own parameters ({names}) while they ran, each rank from "
                f"its own batch, so ranks would train different weights; this is not supported with mesh="
            )

    def _restore(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
            parameter.data = without_memory(parameter)


def without_memory(parameter: Tensor) -> Tensor:
    """Values of the same shape and type, all in one element: NaN where the type has it."""
    value = torch.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    return torch.full((), value, dtype=parameter.dtype).expand(parameter.shape)


def make_mesh_shards(
    layers: Sequence[tuple[str, nn.Module]],
    cuts: Sequence[int],
    tier: Tier,
    dtype: torch.dtype | None = None,
    values: Mapping[Tensor, Values] | None = None,
    *,
    ranks: Ranks,
    whole_parts: Mapping[nn.Parameter, tuple[Shard, Slice, Part]],
) -> list[MeshShard]:
    """As :func:`offload.streaming.layer_homes.make_shards`: moves this rank's part of the parameters to storage.

    The whole parameters lose their memory, shard by shard; a shard on the meta device is initialised as a whole.
    ``whole_parts``: where parameters are stored that each rank stores whole.
    """
    materializer = Materializer(values)
    shards: list[MeshShard] = []
    stored: dict[nn.Parameter, tuple[Shard, Slice, Part]] = {**whole_parts}
    first = 0
    for index, count in enumerate(cuts):
        part_of_layers = layers[first : first + count]
        bare = {p for _, module in part_of_layers for p in module.parameters() if p.is_meta}
        for name, module in part_of_layers:
            materializer.allocate(name, module)
        used = stored_tensors(part_of_layers)
        new = [each for each in used if each.parameter not in stored]
        if len(bare) > len(new):
            raise ValueError(
                f"shard {index} uses parameters on the meta device that an earlier shard stores (tied layers): with "
                f"mesh= they would be initialised twice; build these layers on the CPU"
            )
        for each in new:
            if not materializer.has_values(each.parameter):
                each.parameter.data = torch.empty_like(
                    each.parameter
                )  # what a file replaces is still needed if the construction fails
        materializer.fill()
        shard = MeshShard(index, first, [module for _, module in part_of_layers], tier=tier, ranks=ranks)
        parts = [Part.of(each.name, each.parameter, ranks.count) for each in new]
        offsets, home_bytes = offsets_of(parts)
        if home_bytes:
            shard.home = tier.allocate(home_bytes, f"shard{index}-weights")
        for each, part, offset in zip(new, parts, offsets, strict=True):
            whole = each.parameter
            begin, end = part.span(ranks.rank)
            rows = whole.detach()[begin:end]
            one = nn.Parameter(rows, whole.requires_grad)
            s = Slice(each.name, one, offset, rows.numel() * rows.element_size(), part.stride, part.dtype)
            shard.own.append(s)
            home = shard.home_view(s)
            home.copy_(rows)
            one.data = home
            stored[whole] = shard, s, part
            if whole.grad is not None:
                one.grad, whole.grad = whole.grad[begin:end].clone(), None
            whole.data = without_memory(whole)
        if shard.home is not None:
            ranks.copy_first_replica(shard.home.tensor)
        borrowed = [each for each in used if stored[each.parameter][0] is not shard]
        shard.loans = [stored[each.parameter][:2] for each in borrowed]
        shard.parts = [stored[each.parameter][2] for each in (*new, *borrowed)]
        shard.offsets, shard.part_bytes = offsets_of(shard.parts)
        slices, shard.slot_bytes = layout([*new, *borrowed], dtype=dtype)
        shard.slices = [replace(s, stride=part.stride) for s, part in zip(slices, shard.parts, strict=True)]
        shards.append(shard)
        first += count
    return shards
