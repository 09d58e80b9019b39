"""A shard of which each rank stores a part: loads gather the whole parameters into the slot.

::

    home of rank 0   rows of p, rows of q  --+
    home of rank 1   rows of p, rows of q  --+--> staging area --> slot: p, q as whole plain tensors
                        read                 gather             copy

piece by piece: the staging area holds a small part of a shard.

Each parameter is two objects. Layers use the whole one, :attr:`Slice.parameter <offload.streaming.slices.Slice>` of
:attr:`Shard.slices`, which has values in a visit only. The stored one, of :attr:`Shard.own`, has the shape of this
rank's part; its ``.data`` is the home and its ``.grad`` the stored gradient all the time, so gradients, optimizers and
files treat it as any other parameter. What users see is a third, see :mod:`offload.mesh.sharded`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.forms.quantised import StoredTensor, stored_tensors
from offload.mesh.parts import Part, WholePart, cuts_between, offsets_of, pieces_of
from offload.mesh.ranks import Ranks
from offload.meta_device.materialize import Materializer, Values
from offload.storage import Tier
from offload.streaming.layer_homes import LayerLayout
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice, layout

if TYPE_CHECKING:
    from offload.streaming.contract import PendingUpdate

__all__ = ["MeshShard", "gather_parts", "make_mesh_shards", "without_memory"]


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

    @property
    def slot_keeps_weights(self) -> bool:
        """Never: an update of this rank's part cannot take it from the slot of the next load."""
        return False

    def versions(self) -> tuple[int, ...]:
        """The version of each parameter: the sum of the counters of all tensors through which it can be written."""
        return tuple(
            here.parameter._version + self._versions_at_home(there.parameter)
            for here, there in zip(self.slices, self.at_home, strict=True)
        )

    def _versions_at_home(self, stored: nn.Parameter) -> int:
        """Fused and foreach operations on DTensors increment no counter."""
        shown: Any = self.shown.get(stored)
        return stored._version + (0 if shown is None else shown._version + shown.to_local()._version)

    def fill(self, slot: Tensor, update: PendingUpdate | None = None) -> None:
        """Reads this rank's part, gathers those of the others, and copies all into ``slot``. On the lane of ranks."""
        for k, here in enumerate(self.slices):
            if isinstance(self.parts[k], WholePart):
                owner, there = self.places[k]
                here.view(slot).copy_(owner.home_view(there))
        slots = zip(self.slices, self.parts, strict=True)
        wholes = [None if isinstance(part, WholePart) else part.flat(here.view(slot)) for here, part in slots]
        gather_parts(self.parts, self.offsets, self.part_bytes, wholes, self._read, self.ranks)

    def _read(self, memory: Tensor, begin: int) -> None:
        """Fills ``memory`` with what this rank sends, from the byte ``begin`` on."""
        rank, own = self.ranks.rank, len(self.own)
        if self.home is not None and begin < self.home.nbytes:
            self.home.read_into(memory[: self.home.nbytes - begin], begin)
        parts, offsets = self.parts[own:], self.offsets[own:]
        for cut in cuts_between(parts, offsets, begin, begin + memory.numel()):
            part, (owner, there) = parts[cut.number], self.borrowed[cut.number]
            cut.sent(part, rank, memory).copy_(cut.at_rank(part, rank, part.flat(owner.home_view(there))))

    def copies(self, position: int) -> bool:
        """Always: what each rank stores whole is copied as well."""
        return True

    def whole_like(self, s: Slice) -> Tensor:
        """See :meth:`.Shard.whole_like`: what is decided by it is decided alike on all ranks."""
        part = next(part for part, each in zip(self.parts, self.own, strict=False) if each.parameter is s.parameter)
        return torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")

    def check_stores(self, positions: Sequence[int]) -> None:
        """Raises RuntimeError: what a layer writes depends on the batch of this rank."""
        if positions:
            names = ", ".join(self.slices[k].name for k in positions)
            raise RuntimeError(
                f"the layers of shard {self.index} wrote their own parameters ({names}) while they ran, each rank from "
                f"its own batch, so ranks would train different weights; this is not supported with mesh="
            )


def gather_parts(
    parts: Sequence[Part],
    offsets: Sequence[int],
    nbytes: int,
    wholes: Sequence[Tensor | None],
    read: Callable[[Tensor, int], None],
    ranks: Ranks,
) -> None:
    """Fills ``wholes`` from the parts that the ranks store. On the lane of ranks.

    Args:
        parts: what each rank sends, at ``offsets`` in ``nbytes``.
        wholes: for each of them, all elements in the order of their memory, of any type; None: sent, and dropped.
        read: fills memory with what this rank sends from an offset on.
        ranks: that call this with the same parts.
    """
    for begin, end in pieces_of(nbytes, ranks.count):
        staging = ranks.staging(ranks.count * (end - begin)).view(ranks.count, end - begin)
        read(staging[ranks.rank], begin)
        ranks.all_gather(staging)
        for cut in cuts_between(parts, offsets, begin, end):
            part, whole = parts[cut.number], wholes[cut.number]
            if whole is not None:
                for rank in range(ranks.count):
                    cut.of_rank(part, rank, whole).copy_(cut.sent(part, rank, staging[rank]))


def without_memory(parameter: Tensor) -> Tensor:
    """Values of the same shape and type, all in one element: NaN where the type has it."""
    value = torch.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    return torch.full((), value, dtype=parameter.dtype).expand(parameter.shape)


def _layout_of_parts(ranks: Ranks, elsewhere: Iterable[nn.Parameter] = ()) -> LayerLayout:
    """Places this rank's rows of all parameters but those ``elsewhere``, each at the same offset on every rank.

    What ranks send of a shard is a copy of its home, so layers do not begin on pages: the padding would be sent.
    """

    def pack(stored: Iterable[StoredTensor]) -> tuple[list[Slice], int]:
        cut = [(each, Part.of(each.name, each.parameter, ranks.count)) for each in stored]
        offsets, end = offsets_of(part for _, part in cut)
        return [
            Slice(each.name, each.parameter, offset, part.stored_bytes(ranks.rank), part.stride, part.dtype)
            for (each, part), offset in zip(cut, offsets, strict=True)
        ], end

    return LayerLayout(elsewhere, pack=pack, paged=False)


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
    whole_layout, places = (_layout_of_parts(ranks, whole_parts) for _ in range(2))
    for name, layer in layers:
        whole_layout.add(name, layer)
    weights = tier.weights(whole_layout.nbytes) if whole_layout.nbytes else None
    shards: list[MeshShard] = []
    # Of each whole parameter, where it is stored, and its cut.
    stored = dict(whole_parts)
    first = 0
    for index, count in enumerate(cuts):
        named = layers[first : first + count]
        used = _materialized(index, named, materializer, stored)
        new, borrowed = [p for p in used if p not in stored], [p for p in used if p in stored]
        shard = MeshShard(index, first, [layer for _, layer in named], tier=tier, ranks=ranks)
        # Again, since parameters on the meta device were replaced.
        own = [s for name, layer in named for s in places.add(name, layer)]
        shard.borrowed = [stored[p][:2] for p in borrowed]
        shard.parts = [Part.of(s.name, s.parameter, ranks.count) for s in own] + [stored[p][2] for p in borrowed]
        shard.offsets, shard.part_bytes = offsets_of(shard.parts)
        nbytes = offsets_of(shard.parts[: len(own)])[1]
        if nbytes and weights is not None:
            shard.home = weights.part(own[0].offset, nbytes)
        slices, shard.slot_bytes = layout([used[p] for p in (*new, *borrowed)], dtype=dtype)
        shard.slices = [replace(s, stride=part.stride) for s, part in zip(slices, shard.parts, strict=True)]
        for s, whole, part in zip(own, new, shard.parts, strict=False):
            place = replace(s, offset=s.offset - own[0].offset)
            stored[whole] = shard, _move_part(shard, whole, part, place), part
        if shard.home is not None:
            ranks.copy_first_replica(shard.home.tensor)
        shards.append(shard)
        first += count
    if weights is not None:
        tier.weights_are_written(weights)
    return shards


def _materialized(
    index: int,
    layers: Sequence[tuple[str, nn.Module]],
    materializer: Materializer,
    stored: Container[nn.Parameter],
) -> dict[nn.Parameter, StoredTensor]:
    """The parameters of the layers of one shard, with whole values; ``stored`` are those of earlier shards.

    Raises ValueError if one of these was on the meta device.
    """
    bare = {p for _, layer in layers for p in layer.parameters() if p.is_meta}
    for name, layer in layers:
        materializer.allocate(name, layer)
    used = {each.parameter: each for each in stored_tensors(layers)}
    new = [p for p in used if p not in stored]
    if len(bare) > len(new):
        raise ValueError(
            f"shard {index} uses parameters on the meta device that an earlier shard stores (tied layers): with "
            f"mesh= they would be initialised twice; build these layers on the CPU"
        )
    for p in new:
        if not materializer.has_values(p):
            p.data = torch.empty_like(p)  # what a file replaces is still needed if the construction fails
    materializer.fill()
    return used


def _move_part(shard: MeshShard, whole: nn.Parameter, part: Part, place: Slice) -> Slice:
    """Moves this rank's part of a parameter, and of its gradient, to its ``place`` at home; returns its slice there."""
    begin, end = part.span(shard.ranks.rank)
    own = nn.Parameter(whole.detach()[begin:end], whole.requires_grad)
    s = replace(place, parameter=own)
    shard.own.append(s)
    home = shard.home_view(s)
    home.copy_(own.detach())
    own.data = home
    if whole.grad is not None:
        own.grad, whole.grad = whole.grad[begin:end].clone(), None
    whole.data = without_memory(whole)
    return s
