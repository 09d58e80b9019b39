"""Puts the weights of a shard into its modules for one call.

The user's parameters are never moved: they are the home. While a block runs, the registers of its modules
(``module._parameters``) hold tensors on the slot in their place, and the parameters again afterwards. ::

    weights = Weights(shard, device, lambda parameters: parameters)
    with Bound(weights, weights.views(slots)):
        block(input)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.structure import refuse_replaced
from offload.forms.quantised import refresh
from offload.streaming.shard import Shard
from offload.streaming.streamer import SlotPool
from pipe.torch_private.autograd import outside_inference_mode
from pipe.torch_private.tensors import storage_uses

__all__ = ["Bound", "Weights"]

#: The parameters that users see for those of layers.
LeavesOf = Callable[[Sequence[nn.Parameter]], Sequence[nn.Parameter]]


class Weights:
    """The places of one shard's parameters in its modules, and views of them on the slot that holds the shard."""

    def __init__(self, shard: Shard, device: torch.device, leaves_of: LeavesOf) -> None:
        self.shard, self.device = shard, device
        #: Positions in :attr:`Shard.slices` of what is copied to the slot; other parameters stay on the compute device.
        self.streamed = [k for k in range(len(shard.slices)) if shard.copies(k)]
        #: Positions of parts of quantised parameters, to which these refer themselves.
        self._parts = [k for k in self.streamed if shard.slices[k].part_of is not None]
        #: For each position, the shard that stores the parameter and its slice there; and the parameter.
        self.owners = shard.places
        self.parameters = shard.parameters
        #: The parameters that users see, which are the leaves of their graphs.
        self.leaves = leaves_of(self.parameters)
        self._tokens: dict[tuple[int, ...], Sequence[Tensor]] = {}
        #: Cells of the last pass, and how many they are if no block is called again; whether one was, or may be.
        self.cells = self._expected = 0
        self._repeats: bool | None = None
        #: Values that modules have in place of parameters; an interrupt may keep a context from taking them out.
        self.bound: list[Bound] = []
        self._views: dict[int, tuple[weakref.ref[Tensor], list[Tensor]]] = {}
        self.find()

    def find(self) -> None:
        """Finds the parameters in the modules as they are now. Raises RuntimeError if one is in none of them."""
        shard = self.shard
        position = {id(shard.slices[k].parameter): k for k in self.streamed if k not in self._parts}
        #: Attributes of each module, the parameters that it has, and at which position each of them is streamed.
        self._modules: list[tuple[dict[str, Any], dict[str, Any], list[tuple[str, int]]]] = []
        #: Attributes of recurrent layers, which compute with a list that they make of what is in their registers.
        self._recurrent: list[dict[str, Any]] = []
        found: set[int] = set()
        for module in dict.fromkeys(m for layer in shard.layers for m in layer.modules()):
            register = vars(module)["_parameters"]
            items = [(name, position[id(p)]) for name, p in dict.items(register) if id(p) in position]
            if items:
                self._modules.append((vars(module), register, items))
                found.update(k for _, k in items)
            if isinstance(module, nn.RNNBase):
                self._recurrent.append(vars(module))
        gone = [shard.slices[k].name for k in position.values() if k not in found]
        if gone:
            refuse_replaced(gone)

    @property
    def trained(self) -> list[int]:
        """The positions of the parameters that take a gradient."""
        parameters = self.parameters
        return [k for k in self.streamed if parameters[k].requires_grad]

    def tokens(self, positions: Sequence[int], *, once: int, cells: int) -> Sequence[Tensor]:
        """What the gradients of the parameters at these positions have the shapes and types of; without memory.

        Sums take 32 bits at least. ``cells``: those of the pass that begins, if no block is called again; ``once``: of
        one micro-batch. In the first pass blocks may be: a process that resumes has the steps of one that went on.
        """
        if self._expected:
            self._repeats = bool(self._repeats) or self.cells > self._expected
        self.cells, self._expected = 0, cells
        several = once < cells or self._repeats is not False
        key = several, *positions
        if key not in self._tokens:
            full = [torch.promote_types(self.owners[k][1].full_dtype, torch.float32) for k in positions]
            dtypes = full if several else [self.shard.slices[k].dtype for k in positions]
            self._tokens[key] = [
                torch.empty((), dtype=dtype, device=self.device).expand(self.parameters[k].shape)
                for k, dtype in zip(positions, dtypes, strict=True)
            ]
        return self._tokens[key]

    def views(self, slots: SlotPool) -> list[Tensor]:
        """A view of the slot for each parameter, without a graph; the same ones as long as the slot exists."""
        slot = self.shard.slot
        key = id(slot)
        known = self._views.get(key)
        if known is not None and known[0]() is slot:
            return known[1]
        before = storage_uses(slot)
        # Outside inference mode: autograd never accepts a view created inside.
        with outside_inference_mode():
            views = [s.view(slot) for s in self.shard.slices]
        # Views keep memory, so they are dropped with the slot.
        self._views[key] = weakref.ref(slot, partial(self._views.pop, key)), views
        slots.count_views(slot, storage_uses(slot) - before)
        return views

    def homes_moved(self) -> None:
        """Called when homes have moved."""
        #: Whether the gradient of each parameter rests where layers make it, so that autograd accumulates it.
        self.stays = [o.on_device and s.form is None and not o.gradient_types.rounded for o, s in self.owners]
        self.note_addresses()

    def note_addresses(self) -> None:
        """Called when all parameters have the memory of their homes."""
        self._addresses = self._at()

    def _at(self) -> list[int]:
        # No list of the parameters is kept: references to them count as those of code that may read them.
        return [*map(Tensor.data_ptr, [s.parameter for _, s in self.owners])]

    def were_written(self, *, loaded: bool) -> bool:
        """Whether other code has assigned data to parameters, or written to them since the shard was ``loaded``."""
        shard = self.shard
        return self._addresses != self._at() or (loaded and shard.loaded_versions != shard.versions())

    def point_parts(self, values: Sequence[Tensor] | None) -> None:
        """Gives the parts of quantised parameters the memory of ``values``, or of their homes."""
        for k in self._parts:
            owner, s = self.owners[k]
            if values is None:
                owner.point_home(s)
            else:
                s.point_to(values[k])
        for parameter in self.shard.quantised:
            refresh(parameter)

    def unbind(self) -> None:
        """Gives all modules their parameters back, after a failure."""
        while self.bound:
            self.bound[-1].__exit__()


class Bound:
    """A context in which the modules of ``weights`` have ``values`` in place of parameters; none: they keep those."""

    __slots__ = ("_lists", "_modules", "_values", "_weights")

    def __init__(self, weights: Weights, values: Sequence[Tensor]) -> None:
        self._weights, self._values = weights, values
        self._modules: Sequence[tuple[dict[str, Any], dict[str, Any], Any]] = ()
        self._lists: Sequence[tuple[dict[str, Any], Any]] = ()

    def __enter__(self) -> None:
        values, weights = self._values, self._weights
        if not values:
            return
        parameters = weights.parameters
        for attributes, register, items in weights._modules:
            if attributes["_parameters"] is not register or [
                name for name, k in items if dict.get(register, name) is not parameters[k]
            ]:
                weights.find()  # follows those that other modules hold now, as with ``weight_norm``
                break
        weights.bound.append(self)
        self._modules = weights._modules
        for attributes, register, items in weights._modules:
            bound = dict(dict.items(register))  # the register finishes updates where it is asked itself
            for name, k in items:
                bound[name] = value = values[k]
                value._is_param = True  # libraries look for ``nn.Parameter``
            attributes["_parameters"] = bound
        if weights._recurrent:
            self._lists = [(attributes, attributes["_flat_weights"]) for attributes in weights._recurrent]
        if weights._parts:
            weights.point_parts(values)

    def __exit__(self, *raised: Any) -> None:
        if not self._values:
            return
        for attributes, register, _ in self._modules:
            attributes["_parameters"] = register
        for attributes, before in self._lists:
            attributes["_flat_weights"] = before
        weights = self._weights
        if weights._parts:
            weights.point_parts(None)
        if self in weights.bound:
            weights.bound.remove(self)
