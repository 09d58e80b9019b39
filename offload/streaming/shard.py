"""A shard: consecutive layers whose parameters move together, and the places that hold its bytes.

At home, each parameter's ``.data`` is a view of the home block. For the time of a visit the same ``Parameter`` objects
point into a device slot instead, so layers, hooks and autograd see ordinary parameters on the compute device.

::

                load()                    bind()
      HOME ----------------> LOADED ----------------> BOUND
       ^                      |   ^                     |
       |       drop()         |   |      unbind()       |
       +----------------------+   +---------------------+

A parameter that several shards use (a tied one) rests in the first; the others borrow it: their slot gets a copy too,
and their gradients go to the one home.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from offload.planning.partition import aligned
from offload.storage import Block, Tier
from offload.streaming.casts import Casts
from offload.streaming.materialize import Materializer, Values
from pipe.torch_private import set_versions, storage_uses

if TYPE_CHECKING:
    from offload.optim.update import Update

__all__ = ["Shard", "State", "layout", "make_shards", "named_parameters"]


class State(enum.Enum):
    """Which memory a shard holds."""

    HOME = "home"  # its home block only
    LOADED = "loaded"  # home, and a slot that holds a copy or is about to; nobody computes with it
    BOUND = "bound"  # home and slot; its parameters point into the slot


@dataclass(frozen=True)
class Slice:
    """Where one parameter lies in a flat block of bytes, and with which layout."""

    name: str
    parameter: nn.Parameter
    offset: int
    nbytes: int
    stride: tuple[int, ...]
    dtype: torch.dtype

    def check_data(self, expected: torch.Size | None = None) -> None:
        """Raises ValueError if the parameter has not the size (or ``expected`` shape) and type that it rests in."""
        shape, dtype = self.parameter.shape, self.parameter.dtype
        if dtype != self.dtype:
            raise ValueError(
                f"expected data of {self.dtype} for parameter {self.name}, got {dtype}; the type of a parameter is "
                f"fixed when the model is made: assign data.to({self.dtype}), or convert the layers and wrap them then"
            )
        if shape.numel() * dtype.itemsize != self.nbytes or shape != (expected or shape):
            raise ValueError(
                f"expected data of {self.nbytes:,} bytes for parameter {self.name}, got shape {tuple(shape)}; the "
                f"shape of a parameter is fixed when the model is made"
            )

    def view(self, block: Tensor) -> Tensor:
        """The parameter's values in ``block`` (flat, uint8); no copy."""
        # Not a view in autograd's sense, which would keep the tensors that it was made of: who holds the memory of a
        # block is counted.
        offset = block.storage_offset() + self.offset
        memory = torch.empty(0, dtype=self.dtype, device=block.device)
        return memory.set_(block.untyped_storage(), offset // self.dtype.itemsize, self.parameter.shape, self.stride)


def layout(parameters: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype | None = None) -> tuple[list[Slice], int]:
    """Packs parameters one behind the other, real ones as ``dtype``; returns their slices and the block's bytes."""
    slices, end = [], 0
    for name, parameter in parameters:
        # Dense strides (channels_last, say) are kept: kernels choose their algorithm by them.
        stride = torch.empty_like(parameter, device="meta").stride()
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        nbytes = parameter.numel() * kind.itemsize
        slices.append(Slice(name, parameter, end, nbytes, stride, kind))
        end += aligned(nbytes)
    return slices, end


@dataclass
class Loan:
    """A parameter that rests in another shard, and where it lies in that shard's home."""

    owner: Shard
    at_home: Slice


@dataclass(eq=False)
class Shard:
    """Layers ``[first, first + len(layers))`` of the model."""

    index: int
    first: int
    layers: list[nn.Module]
    #: What rests here, and where in the home.
    own: list[Slice] = field(default_factory=list)
    loans: list[Loan] = field(default_factory=list)
    #: All parameters that the layers use, and where they lie in a slot: own first, then borrowed.
    slices: list[Slice] = field(default_factory=list)
    home: Block | None = None
    gradients: Block | None = None
    #: Where in it the gradients rest that it has room for.
    gradient_offsets: dict[Slice, int] = field(default_factory=dict)
    #: The update that its home needs before its bytes may be read or written; None again when it is done.
    pending: Update | None = None
    state: State = State.HOME
    slot_bytes: int = 0
    #: ``_version`` of each parameter when the resident copy was made.
    loaded_versions: tuple[int, ...] = ()
    #: What graphs that are kept refer to, besides views of the slot.
    weight_casts: Casts = field(default_factory=Casts)
    _slot: Tensor | None = None
    _wide: list[Tensor | None] = field(default_factory=list)
    _gradients_at_home: list[Tensor | None] = field(default_factory=list)
    _views: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that the layers use, in the order of :attr:`slices`."""
        return [s.parameter for s in self.slices]

    @property
    def trainable(self) -> bool:
        """Whether any parameter takes a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def at_home(self) -> list[Slice]:
        """Where the parameters of :attr:`slices` lie at home, own or owner's."""
        return [*self.own, *(loan.at_home for loan in self.loans)]

    @property
    def casts(self) -> bool:
        """Whether slots hold another type than homes."""
        return any(there.dtype != here.dtype for there, here in zip(self.at_home, self.slices, strict=True))

    def versions(self) -> tuple[int, ...]:
        """Counts of in-place changes of each parameter: equal counts mean that nobody wrote to it in between."""
        return tuple(parameter._version for parameter in self.parameters)

    def set_versions(self, versions: tuple[int, ...]) -> None:
        """Declares that the parameters hold what they held when their counts were ``versions``."""
        if versions != self.versions():
            set_versions(self.parameters, versions)

    def assigned(self) -> list[Slice]:
        """While not bound: the own parameters whose ``.data`` was assigned since they were last home."""
        if self.home is None:
            return []
        home = self.home.tensor.data_ptr()
        return [s for s in self.own if s.parameter.numel() and s.parameter.data_ptr() != home + s.offset]

    def store_assigned_data(self, s: Slice, value: Tensor) -> None:
        """Copies ``value``, which was assigned to the ``.data`` of an own parameter, into its home.

        Raises:
            ValueError: if it has another size or type.
        """
        s.check_data()
        if self.pending is not None:
            # The assignment came after the step. Without this, the step would be applied to what was assigned.
            self.pending.start().synchronize()
        home = self.home_view(s)
        home.copy_(value)
        s.parameter.data = home

    # --- transitions --------------------------------------------------------------------------------------------

    def load(self, slot: Tensor) -> None:
        """HOME -> LOADED. The caller fills ``slot`` by :meth:`fill`, on a lane."""
        assert self.state is State.HOME, f"shard {self.index} is {self.state.value}"
        self._slot = slot
        self.loaded_versions = self.versions()
        self.state = State.LOADED

    def fill(self, slot: Tensor, update: Update | None = None) -> None:
        """Copies the home's bytes into ``slot``. Runs on the load lane and touches no state.

        ``update`` is what was pending when the load was given; it may have filled the slot already.
        """
        borrowed = self.slices[len(self.own) :]
        if update is not None and update.filled(slot):
            pass
        elif self.home is not None and not self.casts:
            self.home.read_into(slot)
        elif self.home is not None:
            source = self.home.staged()
            for there, here in zip(self.own, self.slices, strict=False):
                here.view(slot).copy_(there.view(source), non_blocking=True)
        for loan, here in zip(self.loans, borrowed, strict=True):
            block = loan.owner.home
            assert block is not None
            here.view(slot).copy_(loan.at_home.view(block.tensor), non_blocking=True)

    def bind(self) -> int:
        """LOADED -> BOUND. The parameters are on the compute device, and have no gradient there yet.

        Returns:
            How many tensors that look at the slot it had to make.
        """
        assert self.state is State.LOADED, f"shard {self.index} is {self.state.value}"
        views: list[Tensor] | None = self._views.get(self.slot)
        made = 0
        if views is None:
            before = storage_uses(self.slot)
            # Made outside inference mode: a view made inside is refused by autograd for ever.
            with torch.inference_mode(False):
                views = [s.view(self.slot) for s in self.slices]
            self._views[self.slot] = views
            made = storage_uses(self.slot) - before  # a view may keep others that it was made of
        self._gradients_at_home = [parameter.grad for parameter in self.parameters]
        self._wide = [None] * len(self.slices)
        self.state = State.BOUND  # before the first parameter moves: see reset()
        for parameter, view in zip(self.parameters, views, strict=True):
            # Without this, autograd would add to ``.grad`` at home while a lane writes there too.
            parameter.grad = None
            parameter.data = view
        return made

    def widen_gradients(self) -> None:
        """To be called after each micro-batch: where slots hold 16-bit types, sums gradients in a wider one.

        Autograd sums in the type of the parameter. Without this, the sum over many micro-batches would stand still as
        soon as it is some hundred times as large as what is added.
        """
        for k, (parameter, there) in enumerate(zip(self.parameters, self.at_home, strict=True)):
            gradient, wide = parameter.grad, self._wide[k]
            if gradient is None or gradient.dtype not in (torch.bfloat16, torch.float16) or gradient.is_sparse:
                continue
            parameter.grad = None
            dtype = torch.promote_types(there.dtype, torch.float32)
            self._wide[k] = gradient.to(dtype) if wide is None else wide.add_(gradient)

    def unbind(self) -> list[Tensor | None]:
        """BOUND -> LOADED. The parameters are home again; returns the gradients that autograd left on the device."""
        assert self.state is State.BOUND, f"shard {self.index} is {self.state.value}"
        self.widen_gradients()
        self.weight_casts.end_visit()
        gradients = [
            p.grad if wide is None else wide.to(there.dtype)
            for p, wide, there in zip(self.parameters, self._wide, self.at_home, strict=True)
        ]
        self._go_home()
        self.state = State.LOADED
        self._gradients_at_home = []
        return gradients

    def _go_home(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None  # a gradient must be where its parameter is, so it goes first and comes last
        for position, gradient in enumerate(self._gradients_at_home):
            owner, s = self.owner_of(position)
            s.parameter.data = owner.home_view(s)
            s.parameter.grad = gradient

    def drop(self) -> None:
        """LOADED -> HOME. A slot is never copied back."""
        assert self.state is State.LOADED, f"shard {self.index} is {self.state.value}"
        self._slot = None
        self.state = State.HOME

    def reset(self) -> None:
        """Any state -> HOME, after a failure: also from the middle of a transition, and of another reset.

        No copy into its slot may be under way.
        """
        if self.state is State.BOUND:
            self.weight_casts.end_visit()
            self._go_home()
        self._wide = []
        self.state = State.HOME
        self._slot = None

    # --- views --------------------------------------------------------------------------------------------------

    @property
    def slot(self) -> Tensor:
        """The slot that holds the shard."""
        assert self._slot is not None, f"shard {self.index} is {self.state.value}"
        return self._slot

    @property
    def bound(self) -> bool:
        """Whether a slot holds the shard for layers to use."""
        return self._slot is not None

    @property
    def memory(self) -> set[StorageWeakRef]:
        """The memory that the layers' parameters are in while they compute."""
        return {StorageWeakRef(self.slot.untyped_storage())}

    @property
    def in_slot(self) -> list[Tensor]:
        """The memory of each parameter of :attr:`slices` in the slot that the shard is bound to."""
        views: list[Tensor] = self._views[self.slot]
        return views

    def home_view(self, s: Slice) -> Tensor:
        """A parameter's values at home."""
        assert self.home is not None
        with torch.inference_mode(False):
            return s.view(self.home.tensor)

    def detach_gradients(self) -> None:
        """Leaves the gradients' home, for another, to gradients of earlier backwards that are still held.

        Or if it has room for parameters that are frozen by now, and no gradient rests there.
        """
        block = self.gradients
        if block is None:
            return
        address = block.tensor.untyped_storage().data_ptr()
        grads = [s.parameter.grad for s in self.own]
        resting = sum(g is not None and not g.is_sparse and g.untyped_storage().data_ptr() == address for g in grads)
        too_large = not resting and not all(s.parameter.requires_grad for s in self.gradient_offsets)
        if too_large or storage_uses(block.tensor) > 1 + resting:
            self.gradients, self.gradient_offsets = None, {}

    def gradient_home(self, s: Slice, tier: Tier) -> tuple[Block, int, Tensor]:
        """Block, offset and view where an own gradient rests. Made at need, with room for what takes gradients."""
        if s not in self.gradient_offsets:
            self.gradients, self.gradient_offsets, end = None, {}, 0
            for own in self.own:
                if own is s or own.parameter.requires_grad:
                    self.gradient_offsets[own] = end
                    end += aligned(own.nbytes)
            self.gradients = tier.allocate(end, f"shard{self.index}-gradients")
        assert self.gradients is not None
        offset = self.gradient_offsets[s]
        with torch.inference_mode(False):
            return self.gradients, offset, replace(s, offset=offset).view(self.gradients.tensor)

    def owner_of(self, position: int) -> tuple[Shard, Slice]:
        """The shard where the parameter at ``position`` of :attr:`slices` rests, and its slice there."""
        if position < len(self.own):
            return self, self.own[position]
        loan = self.loans[position - len(self.own)]
        return loan.owner, loan.at_home


def named_parameters(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of some layers in the order in which they lie in a block, each once, by its first name."""
    names = {p: f"{name}.{path}" for name, module in layers for path, p in reversed([*module.named_parameters()])}
    return [(names[p], p) for p in dict.fromkeys(p for _, module in layers for p in module.parameters())]


def make_shards(
    layers: Sequence[tuple[str, nn.Module]],
    cuts: Sequence[int],
    tier: Tier,
    dtype: torch.dtype | None = None,
    values: Mapping[Tensor, Values] | None = None,
) -> list[Shard]:
    """Groups layers into shards and moves their parameters home, one shard after the other.

    Args:
        layers: name and module of each layer; those on the meta device are given memory and values.
        cuts: number of layers of each shard.
        tier: where the homes are.
        dtype: of floating-point parameters in slots; homes keep the parameter's own.
        values: what parameters and buffers are read from, if not from the layers.
    """
    materializer = Materializer(values)
    shards: list[Shard] = []
    resting: dict[nn.Parameter, tuple[Shard, Slice]] = {}
    first = 0
    for index, count in enumerate(cuts):
        part = layers[first : first + count]
        for name, module in part:
            materializer.give_memory(name, module)
        shard = Shard(index, first, [module for _, module in part])
        used = named_parameters(part)
        new = [(name, p) for name, p in used if p not in resting]
        shard.own, home_bytes = layout(new)
        if home_bytes:
            shard.home = tier.home(index, home_bytes)
        for s in shard.own:
            home = shard.home_view(s)
            if materializer.has_values(s.parameter):
                home.copy_(s.parameter.detach())
            s.parameter.data = home
            if s.parameter.grad is not None:
                s.parameter.grad = s.parameter.grad.to(home.device)
            resting[s.parameter] = (shard, s)
        materializer.give_values()
        borrowed = [(name, p) for name, p in used if resting[p][0] is not shard]
        shard.loans = [Loan(*resting[p]) for _, p in borrowed]
        shard.slices, shard.slot_bytes = layout([*new, *borrowed], dtype=dtype)
        shards.append(shard)
        first += count
    return shards
