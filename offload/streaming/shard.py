"""A shard: consecutive layers whose parameters are loaded into a device slot together.

In storage (at home), each parameter's ``.data`` is in the shard's block, on a storage of its own. A slot holds a copy
on the compute device while the shard is used, and is never copied back.

A tied parameter is stored in the first shard that uses it. Other shards borrow it: their slots get a copy too, and
their gradients are added to the owner's.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload.forms.quantised import stored_tensors
from offload.storage import Block, Tier
from offload.streaming.contract import PendingUpdate
from offload.streaming.slices import Slice, read_converted
from offload.streaming.stored_gradients import GradientRegion, GradientTypes, set_gradient
from pipe.torch_private.autograd import outside_inference_mode
from pipe.torch_private.tensors import storage_uses

__all__ = ["Shard", "round_gradients"]


@dataclass(eq=False)
class Shard:
    """Layers ``[first, first + len(layers))`` of the model."""

    index: int
    first: int
    layers: list[nn.Module]
    #: Parameters stored in this shard's block.
    own: list[Slice] = field(default_factory=list)
    #: For each borrowed parameter, the shard that stores it and its slice there.
    borrowed: list[tuple[Shard, Slice]] = field(default_factory=list)
    #: All parameters that the layers use, as slices of a slot: own first, then borrowed.
    slices: list[Slice] = field(default_factory=list)
    home: Block | None = None
    #: Where the form of the weights has them: the lower halves, each at the offset of the upper one in :attr:`home`.
    lower: Block | None = None
    #: Storage of :attr:`home`, and of the gradients and optimizer states that are made from now on.
    tier: Tier | None = None
    #: The home of a shard that rests elsewhere, with the values of an earlier time; None where it is at home.
    file: Block | None = None
    #: The same of :attr:`lower`.
    lower_file: Block | None = None
    #: ``_version`` of each own parameter that is stored in a form, after the last write that the form knows of.
    form_versions: tuple[int, ...] | None = None
    #: Whether layers use the home itself instead of a copy in a slot.
    in_place: bool = False
    #: The places of stored gradients: one region, and others for what was thawed while it was in use.
    gradient_regions: list[GradientRegion] = field(default_factory=list)
    #: In which types they are stored.
    gradient_types: GradientTypes = field(default_factory=GradientTypes)
    #: The update to run before the stored bytes may be read or written; None again when it is done.
    pending: PendingUpdate | None = None
    slot_bytes: int = 0
    #: ``_version`` of each parameter when the resident copy was loaded.
    loaded_versions: tuple[int, ...] = ()
    #: Whether layers wrote to the weights in its slot in a backward, which is not stored.
    written: bool = False
    #: The memory of own parameters at home, each on a storage of its own, by their offset.
    own_memory: dict[int, Tensor] = field(default_factory=dict)
    #: The slot that holds the shard; the copy is done or queued.
    _slot: Tensor | None = None

    @property
    def resident(self) -> bool:
        """Whether this only owns parameters that stay on the compute device."""
        return not self.layers

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that the layers use, in the order of :attr:`slices`."""
        return [s.parameter for s in self.slices]

    @property
    def quantised(self) -> list[nn.Parameter]:
        """The parameters that the layers use of which slices are parts."""
        return list(dict.fromkeys(s.part_of for s in self.slices if s.part_of is not None))

    @property
    def formed(self) -> list[Slice]:
        """The own parameters that are stored in a form."""
        return [s for s in self.own if s.form is not None]

    @property
    def trainable(self) -> bool:
        """Whether any parameter takes a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @functools.cached_property
    def places(self) -> list[tuple[Shard, Slice]]:
        """For each parameter of :attr:`slices`, the shard that stores it and its slice there."""
        return [*((self, s) for s in self.own), *self.borrowed]

    @property
    def at_home(self) -> list[Slice]:
        """Slices in storage of the parameters of :attr:`slices`, in this shard or the owner's."""
        return [there for _, there in self.places]

    @functools.cached_property
    def bytes_at_home(self) -> int:
        """Bytes that a load reads."""
        return sum(s.nbytes for s in self.at_home)

    @property
    def casts(self) -> bool:
        """Whether slots hold another type than storage."""
        return any(there.dtype != here.dtype for there, here in zip(self.at_home, self.slices, strict=True))

    @property
    def slot_keeps_weights(self) -> bool:
        """Whether a slot has the bits of the home, so that an update may take them from there."""
        # A slot may hold bfloat16 values of a form as float32.
        return all(
            there.dtype == here.dtype or (there.form is not None and here.dtype == torch.float32)
            for there, here in zip(self.own, self.slices, strict=False)
        )

    def slot_slice(self, s: Slice) -> Slice:
        """The place in a slot of an own parameter."""
        return next(here for there, here in zip(self.own, self.slices, strict=False) if there is s)

    @property
    def may_bind_in_place(self) -> bool:
        """Whether layers can compute with the home itself: they do not cast, and borrow from no other shard."""
        return not (self.casts or self.borrowed)

    @property
    def home_uses(self) -> int:
        """The engine's own references to the memory of the home, without those of optimizers."""
        return 1 + sum(1 + len(s.aliases) for s in self.own)

    def count_home_owners(self) -> int:
        """The number of tensors (and other owners) on the memory of the home, in its storage or in those of parameters.

        Without :attr:`own_memory`, and what its storages hold of the home.
        """
        assert self.home is not None
        begin = self.home.tensor.data_ptr()
        there = [view for offset, view in self.own_memory.items() if view.data_ptr() == begin + offset]
        return storage_uses(self.home.tensor) + sum(storage_uses(view) - 2 for view in there)

    def home_storages(self) -> set[int]:
        """Addresses of the storages that :meth:`count_home_owners` counts."""
        tensors = [] if self.home is None else [self.home.tensor, *self.own_memory.values()]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    @property
    def blocking_io(self) -> bool:
        """Whether the shard rests in a file, see :attr:`Tier.blocking_io`."""
        return self.tier is not None and self.tier.blocking_io

    @property
    def on_device(self) -> bool:
        """Whether the shard rests in the memory that layers compute in."""
        return self.tier is not None and self.tier.on_device

    def versions(self) -> tuple[int, ...]:
        """Version counter of each parameter: equal counters mean no write in between."""
        return tuple([s.parameter._version for s in self.slices])

    def assigned(self) -> list[Slice]:
        """While not bound: the own parameters whose ``.data`` the user has replaced."""
        if self.home is None:
            return []
        home = self.home.tensor.data_ptr()
        return [s for s in self.own if s.parameter.numel() and s.parameter.data_ptr() != home + s.offset]

    def store_assigned_data(self, s: Slice, value: Tensor) -> None:
        """Stores ``value``, assigned to ``.data`` of an own parameter. Raises ValueError for another size or type."""
        s.check_data(s.parameter, s.parameter.shape)
        self.home_view(s).copy_(value)
        self.point_home(s)

    def load(self, slot: Tensor) -> None:
        """Takes a slot. The caller fills ``slot`` by :meth:`fill`, on a lane."""
        assert self._slot is None, f"shard {self.index} is in a slot"
        self._slot, self.written = slot, False
        self.loaded_versions = self.versions()

    def fill(self, slot: Tensor, update: PendingUpdate | None = None) -> None:
        """Copies the stored bytes into ``slot``. Runs on the load lane and changes no state.

        ``update`` was pending when the load was submitted; it may have filled the slot already.
        """
        if update is None or not update.filled(slot):
            self.fill_own(slot)
        for (owner, there), here in zip(self.borrowed, self.slices[len(self.own) :], strict=True):
            here.view(slot).copy_(owner.home_view(there), non_blocking=True)

    def fill_own(self, slot: Tensor) -> None:
        """Copies the stored bytes of the own parameters into ``slot``, without those that other shards store."""
        if self.home is not None and not self.casts:
            self.home.read_into(slot)
        elif self.home is not None:
            places = list(zip(self.own, self.slices, strict=False))
            read_converted(self.home, places, slot, in_file=self.blocking_io)

    def drop(self) -> None:
        """Leaves its slot, if it has one, which is never copied back; once no copy into it is running."""
        self._slot = None

    @property
    def slot(self) -> Tensor:
        """The slot that holds the shard."""
        assert self._slot is not None, f"shard {self.index} is in no slot"
        return self._slot

    def point_home(self, s: Slice) -> None:
        """Points an own parameter to its stored values."""
        s.point_to(self.memory_of(s))

    def memory_of(self, s: Slice) -> Tensor:
        """The stored values of an own parameter, on a storage of their own."""
        assert self.home is not None
        memory = self.own_memory.get(s.offset)
        # Code that shares the storage with another process moves it to other memory.
        if memory is None or memory.data_ptr() != self.home.tensor.data_ptr() + s.offset:
            memory = s.own_view(self.home.tensor)
            if s.nbytes:
                self.own_memory[s.offset] = memory
        return memory

    def move_home(self, s: Slice) -> None:
        """Points an own parameter to its stored values, and moves its gradient to where these are."""
        gradient, s.parameter.grad = s.parameter.grad, None
        self.point_home(s)
        set_gradient(s.parameter, None if gradient is None else gradient.to(s.parameter.device))

    def home_view(self, s: Slice) -> Tensor:
        """A view of a parameter's stored values, for the engine: in the storage of the home."""
        assert self.home is not None
        with outside_inference_mode():
            return s.view(self.home.tensor)

    def lower_view(self, s: Slice) -> Tensor | None:
        """The lower halves of an own parameter, int16, in the order of its memory; None if they are not stored."""
        return None if self.lower is None else self.lower.tensor[s.offset : s.offset + s.nbytes].view(torch.int16)

    def detach_gradients(self) -> None:
        """Drops regions whose earlier gradients are still used, or that only waste space: on frozen parameters, or on
        those of other shards."""
        found = [(region, len(region.stored())) for region in self.gradient_regions]
        if not any(stored for _, stored in found):
            trained = [*map(id, [s for s in self.own if s.parameter.requires_grad])]
            found = [(region, 0) for region, _ in found if [*map(id, region.slices)] == trained]
        self.gradient_regions = [region for region, stored in found if not region.in_use(stored)]

    def gradient_region(self, parameter: nn.Parameter) -> GradientRegion | None:
        """The region with a place for the gradient of an own parameter, if there is one."""
        return next((region for region in self.gradient_regions if id(parameter) in region.offsets), None)

    def gradient_home(self, s: Slice) -> tuple[Block, int, Tensor]:
        """Block, offset and view of an own gradient. Makes a region on demand, for all trainable ones without place."""
        region = self.gradient_region(s.parameter)
        if region is None:
            placeless = [o for o in self.own if o is s or o.parameter.requires_grad]
            placeless = [o for o in placeless if self.gradient_region(o.parameter) is None]
            assert self.tier is not None
            label = f"shard{self.index}-gradients"
            region = GradientRegion.allocate(self.tier, label, placeless, self.gradient_types)
            self.gradient_regions.append(region)
        with outside_inference_mode():
            return region.block, region.offsets[id(s.parameter)], region.view(s)

    def copies(self, position: int) -> bool:
        """Whether a load copies the parameter at ``position`` of :attr:`slices`; else layers use it where it rests."""
        return not self.places[position][0].resident

    def whole_like(self, s: Slice) -> Tensor:
        """A tensor without memory, like an own parameter, of which other processes may store a part."""
        return s.like()

    def check_stores(self, positions: Sequence[int]) -> None:
        """Raises RuntimeError if writes of layers to parameters at ``positions`` cannot be stored."""
        found = [s.name for s in (self.places[k][1] for k in positions) if s.form is not None]
        if found:
            raise RuntimeError(
                f"layers of shard {self.index} wrote their own parameters ({', '.join(found)}) while they ran, but "
                f"with store_dtype= only an OffloadOptimizer writes parameters; make the model without store_dtype"
            )


def round_gradients(shards: Sequence[Shard], dtype: torch.dtype, *, accumulates: bool) -> None:
    """Stores floating-point gradients of all shards of a model rounded to ``dtype``, see :class:`.GradientTypes`."""
    layers = [layer for shard in shards for layer in shard.layers]
    uses = Counter(id(each.parameter) for layer in layers for each in stored_tensors([("", layer)]))
    rounded: set[int] = set()
    # As it is stored, and as layers use it, which differ with a mesh.
    for there, here in (pair for shard in shards for pair in zip(shard.own, shard.slices, strict=False)):
        wide = there.full_dtype.is_floating_point and there.full_dtype.itemsize > dtype.itemsize
        if wide and uses[id(here.parameter)] == 1:
            rounded |= {id(there.parameter), id(here.parameter)}
    types = GradientTypes(dtype, accumulates, frozenset(rounded))
    for shard in shards:
        shard.gradient_types = types
