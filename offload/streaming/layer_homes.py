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
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from offload.forms.quantised import StoredTensor, stored_tensors
from offload.forms.weight_forms import WeightForm
from offload.meta_device.materialize import Materializer, Values
from offload.partition import aligned
from offload.progress import progress
from offload.storage import Tier
from offload.storage.buffer import PAGE_BYTES, whole_pages
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice, layout
from offload.streaming.stored_values import StoredValues, note_owner

__all__ = ["LayerLayout", "make_shards"]

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


def make_shards(
    layers: Sequence[tuple[str, nn.Module]],
    cuts: Sequence[int],
    tier: Tier,
    dtype: torch.dtype | None = None,
    values: Mapping[Tensor, Values] | None = None,
    resident: Shard | None = None,
    form: WeightForm | None = None,
) -> list[Shard]:
    """Moves the parameters of layers to storage, in shards of ``cuts`` layers, one shard after the other.

    Layers on the meta device are materialized. ``values`` are sources of parameters and buffers, if not the layers
    themselves. ``dtype`` is that of floating-point parameters in slots; storage keeps the parameter's own, or has those
    of ``form``. ``resident`` owns parameters that all shards borrow.
    """
    materializer = Materializer(values)
    stored = {} if resident is None else {s.parameter: (resident, s) for s in resident.own}
    whole, places = (LayerLayout(stored, partial(layout, form=form)) for _ in range(2))
    for name, layer in layers:
        whole.add(name, layer)
    weights = tier.weights(whole.nbytes) if whole.nbytes else None
    splits = form is not None and form.exact and whole.nbytes
    lower = tier.allocate(whole.nbytes, "lower-halves") if splits else None
    shards: list[Shard] = []
    first = 0
    for index, count in enumerate(progress(cuts, "reading weights", "shard") if values else cuts):
        part = layers[first : first + count]
        for name, layer in part:
            materializer.allocate(name, layer)
        shard = Shard(index, first, [layer for _, layer in part], tier=tier)
        # Again, since parameters on the meta device were replaced.
        own = [s for name, layer in part for s in places.add(name, layer)]
        if own and weights is not None:
            begin, end = own[0].offset, own[-1].offset + aligned(own[-1].nbytes)
            shard.home = weights.part(begin, end - begin)
            shard.lower = None if lower is None else lower.part(begin, end - begin)
            shard.own = [replace(s, offset=s.offset - begin) for s in own]
        stored.update((s.parameter, (shard, s)) for s in shard.own)
        owners = [stored[each.parameter] for each in stored_tensors(part)]
        shard.borrowed = [(owner, s) for owner, s in owners if owner is not shard]
        shard.slices, shard.slot_bytes = _in_slot(shard, dtype)
        note_owner(shard)
        _fill(shard, materializer)
        shards.append(shard)
        first += count
    if weights is not None:
        tier.weights_are_written(weights)
    return shards


def _in_slot(shard: Shard, dtype: torch.dtype | None) -> tuple[list[Slice], int]:
    """A slot is a copy of the home, followed by what is borrowed; or packed, if types differ."""
    there = shard.at_home
    packed, nbytes = layout(there, dtype)
    if any(s.dtype != here.dtype for s, here in zip(there, packed, strict=True)):
        return packed, nbytes
    end = 0 if shard.home is None else shard.home.nbytes
    borrowed, more = layout(s for _, s in shard.borrowed)
    return [*shard.own, *(replace(s, offset=end + s.offset) for s in borrowed)], end + more


def _fill(shard: Shard, materializer: Materializer) -> None:
    """Gives the parameters of a new shard their values, where they are stored."""
    formed = [(shard, s) for s in shard.formed]  # initialised in memory of their own, then stored
    for s in shard.own:
        p = s.parameter
        if s.form is None:
            if materializer.has_values(p):
                shard.home_view(s).copy_(p.detach())
            shard.move_home(s)
        elif not (materializer.idle or materializer.is_empty(p)):
            p.data = p.detach().clone()  # what a file or a module replaces is needed if the construction fails
    for owner, s in shard.borrowed:
        if s.form is not None and not materializer.idle:  # a module may initialise a tied parameter again
            s.point_to(StoredValues(owner, s).in_full())
            formed.append((owner, s))
    materializer.fill()
    for owner, s in formed:
        StoredValues(owner, s).write(s.parameter.detach())
        owner.move_home(s)
