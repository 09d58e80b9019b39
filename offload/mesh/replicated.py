"""Parameters that each rank stores whole, such as those outside of blocks; their gradients are means over ranks.

All of them are added by all_reduce at the end of a backward, on the lane of ranks: the same bits on all of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.mesh.device_bytes import ExchangeBytes, exchange_bytes
from offload.mesh.gradients import add_over
from offload.mesh.local_sums import LocalSums
from offload.mesh.parts import Part, WholePart
from offload.mesh.ranks import Ranks
from offload.mesh.shard import without_memory
from offload.mesh.sharded import ShardedParameters, ShownParameter
from offload.mesh.traffic import Traffic, bytes_beside_one_process, piece_bytes, sent_bytes, traffic_of, widened
from offload.mesh.transport import HOST
from offload.mesh.words import described
from offload.planning.partition import aligned
from offload.planning.plan import BACKWARD_CELLS
from offload.streaming.lane import error_context
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice

if TYPE_CHECKING:
    from offload.mesh.shard import MeshShard
    from offload.planning.plan import Plan

__all__ = ["MeshParameters", "ReplicatedGradients", "resident_parts"]


def resident_parts(resident: Shard, ranks: Ranks) -> dict[nn.Parameter, tuple[Shard, Slice, Part]]:
    """Stores what ``resident`` owns in parameters of their own; the layers' parameters lose their memory.

    All ranks get the values of the first one. Returns where each parameter of the layers is stored.
    """
    found: dict[nn.Parameter, tuple[Shard, Slice, Part]] = {}
    for k, s in enumerate(resident.own):
        whole, home = s.parameter, resident.home_view(s)
        home.copy_(ranks.copied_from_first(home))
        one = nn.Parameter(home, whole.requires_grad)
        one.grad, whole.grad = whole.grad, None
        part = WholePart.of(s.name, whole, ranks.count)
        resident.own[k] = replace(s, parameter=one)
        found[whole] = resident, resident.own[k], part
        whole.data = without_memory(whole)
    return found


class ReplicatedGradients:
    """Reduces the gradients of parameters that each of the ``ranks`` stores whole; ``parts``: what each is."""

    def __init__(self, parts: Mapping[nn.Parameter, Part], ranks: Ranks) -> None:
        self._ranks = ranks
        self._parts = parts

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter is one of these."""
        return parameter in self._parts

    def reduce(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Adds the mean over ranks of each gradient to the ``.grad`` of its parameter.

        All ranks call it with as many trained parameters. One that has no gradient here counts as zeros.

        Raises RuntimeError for a sparse gradient.
        """
        trained = [p for p in self._parts if p.requires_grad]
        if not trained:
            return
        for p, gradient in gradients.items():
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"the gradient of {self._parts[p].name} is sparse, which is not supported with mesh=; use a layer "
                    f"with sparse=False"
                )
        found: list[tuple[nn.Parameter, Tensor]] = []
        lane = self._ranks.lane
        arrival = lane.submit("R-outside", lambda: found.extend(self._means(trained, gradients)))
        with error_context("reducing gradients of what each rank stores whole"):
            # Lane of ranks -> host. Without this, the gradients are read before they are there.
            arrival.synchronize()
        for p, mean in found:
            self._ranks.transport.use(mean)
            if p.grad is None:
                p.grad = mean
            else:
                p.grad.add_(mean)

    def trained_parts(self) -> list[Part]:
        """The cuts of those that take a gradient."""
        return [part for p, part in self._parts.items() if p.requires_grad]

    def received(self) -> int:
        """Bytes that a rank receives in one call of :meth:`reduce`."""
        parts, ranks = self.trained_parts(), self._ranks
        nbytes = sum(aligned(part.stored_bytes(0)) for part in widened(parts))
        sizes = (ranks.count, ranks.replicas) if parts else ()
        return sum((count - 1) * (2 * piece_bytes(nbytes, count) + aligned(len(parts))) for count in sizes)

    def _means(
        self, trained: Sequence[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor]
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """The mean of each gradient that any rank has. On the lane."""
        ranks, parts = self._ranks, [self._parts[p] for p in trained]
        totals: list[Tensor | None] = [None] * len(parts)
        for k, (p, wide) in enumerate(zip(trained, widened(parts), strict=True)):
            if (gradient := gradients.get(p)) is not None:
                ranks.transport.use(gradient)
                totals[k] = wide.flat(gradient.detach()).to(wide.dtype, copy=True)
        add_over(totals, parts, ranks)
        if ranks.replicas > 1:
            add_over(totals, parts, ranks, replicas=True)
        found = []
        for k, (p, part) in enumerate(zip(trained, parts, strict=True)):
            total, totals[k] = totals[k], None
            if total is not None:
                mean = total.div_(ranks.divide_factor).to(part.dtype)
                found.append((p, mean.as_strided(part.shape, part.stride)))
        return found


def _refuse_leaf(parameter: Tensor) -> None:
    raise RuntimeError(
        f"a gradient of this rank reached a parameter of shape {tuple(parameter.shape)} outside of the blocks by "
        f"another way than its module, so it would not be summed over ranks; let the forward take the parameter from "
        f"its module (module.weight), where the model has it in each pass"
    )


class MeshParameters(ShardedParameters):
    """What users see of a model with a mesh: the parameters that stream, and those that each rank stores whole."""

    def __init__(
        self,
        shards: Sequence[MeshShard],
        ranks: Ranks,
        resident: Mapping[nn.Parameter, tuple[nn.Parameter, Part]],
        sums: LocalSums,
    ) -> None:
        super().__init__(shards, ranks, resident, sums)
        self._replicated = self._replicated_now()
        self._outside: dict[int, ShownParameter] = {}
        #: The model is one of them, and is freed when it is dropped.
        self._outside_modules: list[weakref.ref[nn.Module]] = []
        largest = max((sum(p.nbytes for p in shard.parameters) for shard in shards), default=0)
        self.buffer_bytes = bytes_beside_one_process(largest, ranks.count) if ranks.transport is HOST else 0

    def _replicated_now(self) -> ReplicatedGradients:
        return ReplicatedGradients({p.stored: p.part for p in self._all if isinstance(p.part, WholePart)}, self._ranks)

    def names(self, s: Slice) -> dict[int, str]:
        """See :meth:`PublicParameters.names`."""
        p = self._by_stored[s.parameter]
        return {id(each): s.name for each in (p.stored, p.whole, p.shown)}

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stored parameter of a DTensor."""
        return self._by_shown[parameter].stored

    def replicate(self, named: Mapping[str, nn.Parameter], modules: Iterable[nn.Module]) -> None:
        """Shows DTensors of parameters that each rank stores whole; all get the values of the first rank.

        Raises RuntimeError on all ranks if their names or shapes differ.
        """
        modules = list(modules)
        parts = {name: WholePart.of(name, p, self._ranks.count) for name, p in named.items()}
        self._ranks.agree("what is outside of the blocks", " ".join(map(described, parts.values())))
        new = []
        for name, p in named.items():
            gradient, p.grad = p.grad, None
            p.data = self._ranks.copied_from_first(p)
            p.grad = gradient
            new.append(ShownParameter(p, p, self._new(p, p, parts[name]), parts[name]))
        self._all += new
        self._by_stored.update((p.stored, p) for p in new)
        self._by_shown.update((p.shown, p) for p in new)
        self._by_whole.update((p.whole, p) for p in new)
        modules = list(modules)
        self._places += self._places_in(modules)
        self._replicated = self._replicated_now()
        self._outside = {id(p.whole): p for p in new}
        self._outside_modules = [weakref.ref(module) for module in modules]
        self._show()
        self.recount()

    def refuse_leaves(self) -> None:
        """Lets autograd refuse gradients that reach parameters outside of blocks by another way than their modules."""
        for p in self._outside.values():
            if p.stored.requires_grad:
                p.stored.register_post_accumulate_grad_hook(_refuse_leaf)

    @contextlib.contextmanager
    def outside_as(self, values_of: Callable[[list[ShownParameter]], Sequence[Tensor]]) -> Iterator[None]:
        """A context in which modules outside of blocks have ``values_of`` trained parameters in place of these."""
        trained = [p for p in self._outside.values() if p.whole.requires_grad]
        values = {id(p.whole): value for p, value in zip(trained, values_of(trained), strict=True)}
        before: list[tuple[Any, Any, Any]] = []
        try:
            for module in [ref() for ref in self._outside_modules if values]:
                if module is None:
                    continue
                members: list[Any] = [module._parameters]
                if isinstance(module, nn.RNNBase):
                    members.append(module._flat_weights)
                for each in members:
                    for key, p in each.items() if isinstance(each, dict) else enumerate(each):
                        if id(p) in values:
                            before.append((each, key, p))
                for each, key, p in before:
                    each[key] = values[id(p)]
                    values[id(p)]._is_param = True
            yield
        finally:
            for each, key, p in before:
                each[key] = p

    def store_replicated(self, gradients: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Adds the means over ranks of gradients of what each rank stores whole to the stored ones."""
        replicated = {p: gradient for p, gradient in gradients.items() if p in self._replicated}
        if self._sums.keeps:
            self._sums.keep_replicated(replicated)
        else:
            self._replicated.reduce(self._sums.with_replicated(replicated))
        return {p: gradient for p, gradient in gradients.items() if p not in self._replicated}

    def exchange_bytes(self) -> ExchangeBytes | None:
        """See :meth:`PublicParameters.exchange_bytes`."""
        if self._ranks.transport is HOST:
            return None
        return exchange_bytes(self._shards, self._replicated.trained_parts(), self._ranks)

    def traffic(self, plan: Plan) -> Traffic:
        """See :meth:`PublicParameters.traffic`."""
        shards = [sent_bytes(shard.parts, [s.parameter.requires_grad for s in shard.slices]) for shard in self._shards]
        found = traffic_of(plan, shards, self._ranks.count, self._ranks.replicas)
        if not any(action.kind in BACKWARD_CELLS for action in plan.actions):
            return found
        return replace(found, bytes_reduced=found.bytes_reduced + self._replicated.received())

    def compare(self, what: str, number: float) -> list[float]:
        """See :meth:`PublicParameters.compare`. Raises RuntimeError on all ranks if they begin different calls."""
        return self._ranks.agree(what, "", number, everywhere=True)
