"""Lays out the parameters of all layers in one block, layer after layer, and makes shards: ranges of that block.

::

    layer        0      1             2      3
    block    |------|-------------|------|--------|
    cuts     [2, 2]: shard 0                shard 1      each one range, read by one request
    cuts     [1, 3]: 0     shard 1                       the same bytes at the same places

A parameter that several layers use is stored with the first of them.

Guarantees
    * Where a parameter is does not depend on the cuts, so other cuts neither move nor copy any byte.
    * A shard that begins with a large layer, or after many small ones, begins on a page: direct I/O needs no copy. The
      padding is at most an eighth of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from offload.planning.partition import aligned
from offload.progress import progress
from offload.storage import Block, Tier
from offload.storage.buffer import PAGE_BYTES, empty_on_host, whole_pages
from offload.streaming.materialize import Materializer, Values
from offload.streaming.quantised import StoredTensor, stored_tensors
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice, layout
from offload.streaming.stored_gradients import GradientTypes, set_gradient
from offload.streaming.stored_values import StoredValues, note_owner, seal
from offload.streaming.weight_forms import WeightForm

__all__ = ["LayerHomes", "LayerLayout", "make_shards"]

#: A layer of at least so many bytes begins on a page, as does one after as many bytes of smaller layers.
PAGED_BYTES = 16 * PAGE_BYTES


class LayerLayout:
    """Places the parameters of layers that are added in order, whatever the cuts. Part of the format of kept homes.

    Args:
        elsewhere: parameters that are stored elsewhere.
        pack: places the parameters of one layer from 0 on; returns their slices and the bytes that they take.
        paged: whether layers begin on pages, as above.
    """

    def __init__(
        self,
        elsewhere: Iterable[nn.Parameter] = (),
        pack: Callable[[Iterable[StoredTensor]], tuple[list[Slice], int]] = layout,
        *,
        paged: bool = True,
    ) -> None:
        #: Bytes of the layers so far.
        self.nbytes = 0
        self._page = 0
        self._placed = set(elsewhere)
        self._pack = pack
        self._paged = paged

    def add(self, name: str, layer: nn.Module) -> list[Slice]:
        """The places of the parameters that no layer before has."""
        new = [each for each in stored_tensors([(name, layer)]) if each.parameter not in self._placed]
        self._placed.update(each.parameter for each in new)
        slices, nbytes = self._pack(new)
        if self._paged and max(nbytes, self.nbytes - self._page) >= PAGED_BYTES:
            self.nbytes = self._page = whole_pages(self.nbytes)
        begin = self.nbytes
        self.nbytes += nbytes
        return [replace(s, offset=begin + s.offset) for s in slices]


@dataclass
class LayerHomes:
    """The layers of a model and the block that stores their parameters."""

    layers: Sequence[tuple[str, nn.Module]]
    #: The storage of shards that are made from now on, and their type in slots; None: that in storage.
    tier: Tier
    dtype: torch.dtype | None
    #: None if there are no parameters.
    weights: Block | None
    #: The owner of parameters that all shards borrow.
    resident: Shard | None = None
    #: The lower halves of all weights, at the offsets of the upper ones, if the form of the weights has them.
    lower: Block | None = None
    #: The places in :attr:`weights` of the parameters of each layer that the layers before it do not have.
    places: list[list[Slice]] = field(default_factory=list)
    #: In which types gradients are stored.
    gradient_types: GradientTypes = field(default_factory=GradientTypes)

    def shard(self, index: int, first: int, count: int, stored: dict[nn.Parameter, tuple[Shard, Slice]]) -> Shard:
        """A shard of ``count`` layers from ``first`` on. Its parameters are not moved there.

        ``stored``: parameters of the shards before; those of this shard are added.
        """
        part = self.layers[first : first + count]
        modules = [module for _, module in part]
        shard = Shard(index, first, modules, tier=self.tier, gradient_types=self.gradient_types)
        places = [s for layer in self.places[first : first + count] for s in layer]
        if places:
            assert self.weights is not None
            begin, end = places[0].offset, places[-1].offset + aligned(places[-1].nbytes)
            shard.home = self.weights.part(begin, end - begin)
            shard.lower = None if self.lower is None else self.lower.part(begin, end - begin)
            shard.own = [replace(s, offset=s.offset - begin) for s in places]
        stored.update((s.parameter, (shard, s)) for s in shard.own)
        used = [each.parameter for each in stored_tensors(part)]
        shard.loans = [stored[p] for p in used if stored[p][0] is not shard]
        shard.slices, shard.slot_bytes = self._in_slot(shard)
        note_owner(shard)
        return shard

    def round_gradients(self, shards: Iterable[Shard], dtype: torch.dtype, *, accumulates: bool) -> None:
        """Stores gradients of these shards, and of those that are made later, as :class:`.GradientTypes` says."""
        shards = list(shards)
        own = (pair for shard in shards for pair in zip(shard.own, shard.slices, strict=False))
        self.gradient_types = GradientTypes.of_layers(self.layers, own, dtype, accumulates=accumulates)
        for shard in shards:
            shard.gradient_types = self.gradient_types

    def _in_slot(self, shard: Shard) -> tuple[list[Slice], int]:
        """A slot is a copy of the home, followed by what is borrowed; or packed, if types differ."""
        there = shard.at_home
        packed, nbytes = layout(there, self.dtype)
        if any(s.dtype != here.dtype for s, here in zip(there, packed, strict=True)):
            return packed, nbytes
        end = 0 if shard.home is None else shard.home.nbytes
        borrowed, more = layout(s for _, s in shard.loans)
        return [*shard.own, *(replace(s, offset=end + s.offset) for s in borrowed)], end + more

    def lent(self) -> dict[nn.Parameter, tuple[Shard, Slice]]:
        """Parameters of these layers that the shard of resident parameters stores, with their owner and place."""
        return {} if self.resident is None else {s.parameter: (self.resident, s) for s in self.resident.own}


class FormedWeights:
    """The parameters of a new shard that are stored in a form: initialised in memory of their own, then stored."""

    def __init__(self, shard: Shard, materializer: Materializer) -> None:
        self._stored = [(shard, s) for s in shard.formed if not materializer.is_in_place(s.parameter)]
        for _, s in self._stored:
            p = s.parameter
            if not (materializer.has_values(p) or materializer.is_empty(p)):
                p.data = empty_on_host(p)  # what a file replaces is still needed if the construction fails
        for owner, s in shard.loans:
            if s.form is not None and not materializer.idle:  # a module may initialise a tied parameter again
                s.point_to(StoredValues(owner, s).in_full())
                self._stored.append((owner, s))
        for s in shard.formed:
            if materializer.is_in_place(s.parameter):
                shard.point_home(s)

    def store(self) -> None:
        """Stores the values that the parameters have now."""
        for owner, s in self._stored:
            StoredValues(owner, s).store(s.parameter.detach())
            gradient, s.parameter.grad = s.parameter.grad, None
            owner.point_home(s)
            set_gradient(s.parameter, None if gradient is None else gradient.to(s.parameter.device))
        for owner in dict.fromkeys(owner for owner, _ in self._stored):
            seal(owner)


def make_shards(
    layers: Sequence[tuple[str, nn.Module]],
    cuts: Sequence[int],
    tier: Tier,
    dtype: torch.dtype | None = None,
    values: Mapping[Tensor, Values] | None = None,
    resident: Shard | None = None,
    form: WeightForm | None = None,
) -> tuple[list[Shard], LayerHomes]:
    """Moves the parameters of layers to storage, in shards of ``cuts`` layers, one shard after the other.

    Layers on the meta device are materialized. ``values`` are sources of parameters and buffers, if not the layers
    themselves. ``dtype`` is that of floating-point parameters in slots; storage keeps the parameter's own, or has those
    of ``form``. ``resident`` owns parameters that all shards borrow.
    """
    materializer = Materializer(values)
    elsewhere = [] if resident is None else [s.parameter for s in resident.own]
    pack = partial(layout, form=form)
    whole = LayerLayout(elsewhere, pack)
    for name, layer in layers:
        whole.add(name, layer)
    homes = LayerHomes(layers, tier, dtype, tier.weights(whole.nbytes) if whole.nbytes else None, resident)
    if form is not None and form.exact and whole.nbytes:
        homes.lower = tier.allocate(whole.nbytes, "lower-halves")
    shards: list[Shard] = []
    stored = homes.lent()
    first, places = 0, LayerLayout(elsewhere, pack)  # again, since parameters on the meta device are replaced
    for index, count in enumerate(progress(cuts, "reading weights", "shard") if values else cuts):
        part = layers[first : first + count]
        for name, layer in part:
            materializer.allocate(name, layer)
        homes.places += [places.add(name, layer) for name, layer in part]
        shard = homes.shard(index, first, count, stored)
        formed = FormedWeights(shard, materializer)
        for s in shard.own:
            if s.form is not None:
                continue
            if materializer.has_values(s.parameter):
                shard.home_view(s).copy_(s.parameter.detach())
            shard.point_home(s)
            if s.parameter.grad is not None:
                s.parameter.grad = s.parameter.grad.to(s.parameter.device)
        materializer.fill()
        formed.store()
        shards.append(shard)
        first += count
    if homes.weights is not None:
        tier.weights_are_written(homes.weights)
    return shards, homes
