"""The parameters that users see: without a mesh those of the layers, with one DTensors whose local part is the home.

Outside of forward and backward the layers hold the DTensors; in a pass they hold the whole plain tensors. An optimizer,
``clip_grad_norm_``, an average, ``state_dict()`` or ``torch.distributed.checkpoint`` therefore work on stored values
without knowing of homes.

Gradients of DTensors are set by users, too (``zero_grad``, clipping). So they are taken over before each pass and each
step, and shown again after each pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.mesh.elementwise import check_elementwise
from offload.mesh.parts import WholePart
from offload.mesh.replicated import ReplicatedGradients
from offload.planning.plan import Kind
from offload.planning.planner import Pass
from offload.planning.residency import Residency
from offload.streaming.slices import Slice
from pipe.torch_private import has_hooks

if TYPE_CHECKING:
    from offload.mesh.parts import Part
    from offload.mesh.ranks import Ranks
    from offload.mesh.shard import MeshShard
    from offload.optim.optimizer import OffloadOptimizer

__all__ = ["PublicParameters", "ShardedParameters"]

#: The actions of a plan that are collectives, or decide what collectives find.
_COMMON = (Kind.LOAD, Kind.EVICT, Kind.DRAIN, Kind.UPDATE_IN_BACKWARD)


class PublicParameters:
    """Without a mesh: users see the parameters of the layers themselves."""

    #: Whether each rank stores a part only.
    sharded = False
    #: Host memory that collectives take, beside the slots.
    buffer_bytes = 0

    def of(self, s: Slice) -> nn.Parameter:
        """The parameter that users see for a stored one."""
        return s.parameter

    def in_layers(self) -> contextlib.AbstractContextManager[None]:
        """A context in which layers hold the parameters that they compute with."""
        return contextlib.nullcontext()

    def take_settings(self) -> None:
        """Takes over ``requires_grad`` before a forward. Raises RuntimeError for hooks that would never run."""

    def take_gradients(self) -> None:
        """Takes over gradients that were set, replaced or removed."""

    def begin_pass(self, this: Pass, *, stores: bool = True) -> None:
        """Called before the first action of a pass; ``stores``: whether a backward stores gradients."""

    def begin_block(self, name: str, words: str) -> None:
        """Called before a block runs outside of a pass; ``words``: what its load depends on."""

    def replicate(self, named: Mapping[str, nn.Parameter], modules: Iterable[nn.Module]) -> None:
        """Takes the parameters of ``modules`` that do not stream, and that each process stores whole."""

    def store_replicated(self, gradients: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Stores gradients of these parameters at the end of a backward; returns what is left to autograd."""
        return gradients

    def names(self, s: Slice) -> dict[int, str]:
        """The name of a stored parameter by the ``id`` of each object that code may use for it."""
        return {id(s.parameter if s.part_of is None else s.part_of): s.name}

    def compare(self, what: str, number: float) -> list[float]:
        """The ``number`` of each rank, at a point that all of them reach: the begin of ``what``."""
        return [number]

    def check_optimizer(self, optimizer: OffloadOptimizer) -> None:
        """Raises TypeError for a class that needs whole parameters, where this process stores a part of each."""

    def begin_step(self, optimizer: OffloadOptimizer) -> None:
        """Called at the beginning of a step."""

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """What is stored of a parameter that users see."""
        return parameter

    def local(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What is stored of parameters that users see, without what another process counts in a norm."""
        return list(parameters)

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm of all gradients, from that of what this process stores."""
        return norm

    def show_state(self, s: Slice, state: dict[str, Any]) -> dict[str, Any]:
        """The state of an optimizer for a parameter as users see it."""
        return state

    def stored_state(self, s: Slice, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this process stores of a state that users loaded."""
        return state


@dataclass(frozen=True, eq=False)
class _Parameter:
    """One parameter in its three forms."""

    stored: nn.Parameter
    whole: nn.Parameter
    shown: nn.Parameter
    part: Part


class ShardedParameters(PublicParameters):
    """DTensors for the stored parameters of ``shards``."""

    sharded = True

    def __init__(
        self,
        shards: Sequence[MeshShard],
        ranks: Ranks,
        resident: Mapping[nn.Parameter, tuple[nn.Parameter, Part]] = MappingProxyType({}),
    ) -> None:
        """``resident``: for parameters of layers that each rank stores whole, the stored ones."""
        self._shards = shards
        self._ranks = ranks
        self._all = [
            _Parameter(s.parameter, here.parameter, self._new(s.parameter, here.parameter, part), part)
            for shard in shards
            for s, here, part in zip(shard.own, shard.slices, shard.parts, strict=False)
        ]
        whole = [_Parameter(one, p, self._new(one, p, part), part) for p, (one, part) in resident.items()]
        self._all += whole
        self._by_stored = {p.stored: p for p in self._all}
        self._by_shown = {p.shown: p for p in self._all}
        for shard in shards:
            shard.shown.update((there.parameter, self.of(there)) for there in shard.at_home)
        modules = dict.fromkeys(m for shard in shards for layer in shard.layers for m in layer.modules())
        #: Where layers hold parameters.
        self._places = self._places_in(modules)
        #: What each rank stores whole.
        self._replicated = ReplicatedGradients({p.part.name: p.stored for p in whole}, ranks)
        #: What is gathered, what arrives of other ranks' gradients, and the gradients themselves, of one shard each.
        self.buffer_bytes = max(
            (2 * ranks.count * shard.part_bytes + sum(p.nbytes for p in shard.parameters) for shard in shards),
            default=0,
        )
        #: Number of running contexts in which layers hold whole parameters.
        self._inside = 0
        #: Stored gradients, each with the DTensor that shows it; the same of states of optimizers.
        self._gradients: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._states: dict[nn.Parameter, dict[str, tuple[Tensor, Tensor]]] = {}
        self._show()

    def _places_in(self, modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, _Parameter]]:
        by_whole = {p.whole: p for p in self._all}
        return [
            (module._parameters, key, by_whole[p])
            for module in modules
            for key, p in module._parameters.items()
            if p is not None
        ]

    def _new(self, stored: nn.Parameter, whole: nn.Parameter, part: Part) -> nn.Parameter:
        shown = nn.Parameter(self._wrap(stored.detach(), part), stored.requires_grad)
        vars(shown).update({key: value for key, value in vars(whole).items() if key not in vars(shown)})
        return shown

    def _wrap(self, local: Tensor, part: Part) -> Tensor:
        """A DTensor whose local part shares the memory of ``local``."""
        from torch.distributed.tensor import DTensor

        wrapped: Tensor = DTensor.from_local(
            local,
            self._ranks.mesh,
            self._placements(part),
            run_check=False,
            shape=torch.Size(part.shape),
            stride=part.stride,
        )
        return wrapped

    def _placements(self, part: Part) -> list[Any]:
        from torch.distributed.tensor import Replicate, Shard

        replicas = [Replicate()] * (self._ranks.mesh.ndim - 1)
        return [*replicas, Replicate() if isinstance(part, WholePart) else Shard(0)]

    def of(self, s: Slice) -> nn.Parameter:
        """The DTensor of a stored parameter."""
        return self._by_stored[s.parameter].shown

    def names(self, s: Slice) -> dict[int, str]:
        """See :meth:`PublicParameters.names`."""
        p = self._by_stored[s.parameter]
        return {id(each): s.name for each in (p.stored, p.whole, p.shown)}

    # --- what each rank stores whole --------------------------------------------------------------------------------

    def replicate(self, named: Mapping[str, nn.Parameter], modules: Iterable[nn.Module]) -> None:
        """Shows DTensors of parameters that each rank stores whole; all get the values of the first rank.

        Raises RuntimeError on all ranks if their names or shapes differ.
        """
        parts = {name: WholePart.of(name, p, self._ranks.count) for name, p in named.items()}
        self._ranks.agree("what is outside of the blocks", " ".join(map(_described, parts.values())))
        new = []
        for name, p in named.items():
            gradient, p.grad = p.grad, None
            p.data = self._ranks.copied_from_first(p)
            p.grad = gradient
            new.append(_Parameter(p, p, self._new(p, p, parts[name]), parts[name]))
        self._all += new
        self._by_stored.update((p.stored, p) for p in new)
        self._by_shown.update((p.shown, p) for p in new)
        self._places += self._places_in(modules)
        whole = {p.part.name: p.stored for p in self._all if isinstance(p.part, WholePart)}
        self._replicated = ReplicatedGradients(whole, self._ranks)
        self._show()

    def store_replicated(self, gradients: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Adds the means over ranks of gradients of what each rank stores whole to the stored ones."""
        self._replicated.reduce({p: gradient for p, gradient in gradients.items() if p in self._replicated})
        return {p: gradient for p, gradient in gradients.items() if p not in self._replicated}

    # --- before and after passes ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_layers(self) -> Iterator[None]:
        """A context in which layers hold whole parameters, and gradients are the stored ones. May be nested."""
        if not self._inside:
            self.take_gradients()
        self._inside += 1
        try:
            if self._inside == 1:
                for register, key, p in self._places:
                    register[key] = p.whole
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._show()

    def _show(self) -> None:
        for register, key, p in self._places:
            register[key] = p.shown
        for p in self._all:
            gradient = p.stored.grad
            if gradient is None:
                p.shown.grad = None
            elif self._shown_gradient(p) is not gradient:
                self._gradients[p.stored] = gradient, self._wrap(gradient.detach(), p.part)
                p.shown.grad = self._gradients[p.stored][1]

    def _shown_gradient(self, p: _Parameter) -> Tensor | None:
        """The stored gradient that the DTensor's ``.grad`` shows, if it is the one that was shown last."""
        stored, shown = self._gradients.get(p.stored, (None, None))
        return stored if p.shown.grad is shown and shown is not None else None

    def take_gradients(self) -> None:
        """Takes over gradients that were set, replaced or removed."""
        for p in self._all:
            gradient = p.shown.grad
            if gradient is None:
                p.stored.grad = None
                self._gradients.pop(p.stored, None)
            elif (known := self._shown_gradient(p)) is not None:
                p.stored.grad = known
            else:
                local = self._local_gradient(p, gradient)
                p.stored.grad = local
                self._gradients[p.stored] = local, gradient

    def _local_gradient(self, p: _Parameter, gradient: Any) -> Tensor:
        placements = tuple(self._placements(p.part))
        if getattr(gradient, "placements", None) != placements:
            raise RuntimeError(
                f"expected a gradient of {p.part.name} as a DTensor with the placements {placements} of the parameter, "
                f"got {getattr(gradient, 'placements', type(gradient).__name__)}; redistribute it before you set it"
            )
        local: Tensor = gradient.to_local()
        return local

    def take_settings(self) -> None:
        """Takes over ``requires_grad``. Raises RuntimeError for hooks on gradients."""
        hooked = []
        for p in self._all:
            if has_hooks(p.shown):
                hooked.append(p.part.name)
            p.stored.requires_grad_(p.shown.requires_grad)
            p.whole.requires_grad_(p.shown.requires_grad)
        if hooked:
            raise RuntimeError(
                f"parameters have gradient hooks ({', '.join(hooked[:3])}), which would never run with mesh=: "
                f"gradients are stored shard by shard. Remove the hooks"
            )

    # --- agreement of ranks ---------------------------------------------------------------------------------------

    def check_model(self) -> None:
        """Compares names, shapes and cuts of parameters over all ranks. Raises RuntimeError on all if they differ."""
        text = " ".join(f"{shard.index}:{','.join(map(_described, shard.parts))}" for shard in self._shards)
        self._ranks.agree("the construction of the model", text)

    def begin_pass(self, this: Pass, *, stores: bool = True) -> None:
        """Compares the collectives of a pass over all ranks. Raises RuntimeError on all if they differ."""
        actions = replace(this, microbatches=1, kept=()).actions(Residency(math.inf), lambda key: 0)
        words = [str(action) for action in actions if action.kind in _COMMON]
        if this.backward:
            words.append("stores" if stores else "drops")
            words += [p.part.name for p in self._all if p.whole.requires_grad]
        self._ranks.agree("a backward" if this.backward else "a forward", " ".join(words))

    def begin_block(self, name: str, words: str) -> None:
        """Compares a block that runs outside of a pass over all ranks. Raises RuntimeError on all if they differ."""
        self._ranks.agree("a call of a block by itself", f"{name} {words}")

    def compare(self, what: str, number: float) -> list[float]:
        """See :meth:`PublicParameters.compare`. Raises RuntimeError on all ranks if they begin different calls."""
        return self._ranks.agree(what, "", number, everywhere=True)

    # --- optimizers -----------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: OffloadOptimizer) -> None:
        """Raises TypeError for a class that needs whole parameters."""
        factory = optimizer.factory
        for options in optimizer.options():
            check_elementwise(factory.kind, options, factory.arguments)

    def begin_step(self, optimizer: OffloadOptimizer) -> None:
        """Takes over gradients. Raises RuntimeError for a scale that each rank decides by itself."""
        if getattr(optimizer, "found_inf", None) is not None:
            raise RuntimeError(
                "GradScaler does not support mesh= yet: each rank would decide by itself whether to skip a step; use "
                "torch.bfloat16, which needs no scale"
            )
        self.take_gradients()

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stored parameter of a DTensor."""
        return self._by_shown[parameter].stored

    def local(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The stored parameters of DTensors; of those that each rank stores whole, on the first rank of a row only."""
        found = [self._by_shown[p] for p in parameters]
        return [p.stored for p in found if not (isinstance(p.part, WholePart) and self._ranks.rank)]

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm of all gradients, from that of this rank's parts; a sum in rank order, equal on all ranks."""
        squares = self._ranks.agree("the norm of gradients", "", float(norm) ** 2)
        return torch.tensor(math.sqrt(sum(squares)), dtype=norm.dtype)

    def show_state(self, s: Slice, state: dict[str, Any]) -> dict[str, Any]:
        """The state with a DTensor for each tensor that has an element for each of the parameter."""
        p = self._by_stored[s.parameter]
        known = self._states.setdefault(p.stored, {})
        shown = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == p.stored.shape:
                if key not in known or known[key][0] is not value:
                    known[key] = value, self._wrap(value, replace(p.part, dtype=value.dtype))
                shown[key] = known[key][1]
            else:
                shown[key] = value
        return shown

    def stored_state(self, s: Slice, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of a state: of DTensors, or of tensors of the whole parameter's shape."""
        p = self._by_stored[s.parameter]
        begin, end = p.part.span(self._ranks.rank)
        found = {}
        for key, value in state.items():
            if hasattr(value, "to_local"):
                value = value.to_local()
            elif isinstance(value, Tensor) and value.dim() and tuple(value.shape) == p.part.shape:
                value = value[begin:end]
            found[key] = value
        return found


def _described(part: Part) -> str:
    return f"{part.name}{list(part.shape)}{str(part.dtype).removeprefix('torch.')}".replace(" ", "")
