"""Runs the blocks of a model that ranks share: loads and reductions are collectives, in one order on all of them.

::

    forward     ranks compare what decides its loads         shard by shard, as in one process
    backward    ranks compare what decides its collectives   for each shard that the forward used, the last first:
                                                             load, cells, reduction, with or without gradients here
    its end                                                  one reduction of what each rank stores whole

What follows from the order of calls is the same on all ranks as long as they call alike. Where a forward calls blocks
in another order than the one before, they compare it. Where the graph of one rank leaves out a block that another one's
reaches, this rank takes part in its load, and in its reduction with zeros.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offload.engine.backward import Backward
from offload.engine.block import Block
from offload.engine.engine import Engine
from offload.engine.homes import ModelHomes
from offload.engine.passes import Slots
from offload.engine.visit import Visit
from offload.engine.weights import Weights
from offload.mesh.gradients import MeshGradientOffload
from offload.mesh.sharded import MeshParameters, ShownParameter
from offload.planning.plan import Kind
from pipe.freed import Life
from pipe.torch_private.autograd import accumulates_everywhere, has_hooks, is_requested

__all__ = ["MeshEngine"]

T = TypeVar("T")


@dataclass
class _Way:
    """How far a backward is through the graph of one forward."""

    #: The shards in the order of the forward, and the place of the one in use.
    uses: Sequence[int]
    place: int
    #: Those whose gradients are being reduced.
    left: set[int] = field(default_factory=set)


class _Outside(torch.autograd.Function):
    """Parameters outside of the blocks for one forward. Its backward runs after all uses, with the sums of these."""

    @staticmethod
    def forward(ctx: Any, take: Callable[..., None], whole: Sequence[Tensor], *shown: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.take = take
        return tuple([p.detach() for p in whole])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        edges = [edge for edge, _ in ctx.next_functions]
        ctx.take(edges[-len(gradients) :], gradients)
        return (None, None, *(None for _ in gradients))


class MeshBackward(Backward):
    """The backwards of a model that ranks share."""

    def __init__(self, homes: ModelHomes, weights: Sequence[Weights], slots: Slots) -> None:
        super().__init__(homes, weights, slots)
        assert isinstance(homes.public, MeshParameters)
        assert isinstance(self.streamer.gradient_offload, MeshGradientOffload)
        self._public, self._ranks = homes.public, homes.public.ranks
        self._gradients = self.streamer.gradient_offload
        self._way: _Way | None = None
        #: While a backward runs: what ends the context in which modules hold whole parameters.
        self._whole = contextlib.ExitStack()
        #: Of the running backward: whether ranks have compared it, and whether it stores gradients.
        self._agreed = self._stores = False

    def abort(self) -> None:
        """See :meth:`Backward.abort`."""
        super().abort()
        self._way = None
        self._whole.close()

    def words_of(self, order: Sequence[int]) -> list[str]:
        """What ranks compare: an order of shards, and those in slots."""
        slots = [f"one-of-{self.streamer.slots}-slots-has-shard-{j}" for j in self.streamer.loaded]
        return [*(f"shard-{j}" for j in order), *slots]

    def _begin(self) -> None:
        self._whole.enter_context(self._public.whole())
        self._way, self._agreed, self._stores = None, False, accumulates_everywhere()

    def _use(self, visit: Visit) -> None:
        j, way = visit.weights.shard.index, self._way
        if way is None or way.uses is not visit.uses:
            self._finish_way()
            place = self._agree(self.words_of(visit.uses), _last(visit.uses, j, len(visit.uses)))
            self._way = way = _Way(visit.uses, place)
        if way.uses[way.place] != j:
            place = _last(way.uses, j, way.place)
            if place < 0:
                self._public.leave_order(f"shard {j} in backward", way.place)
            else:
                self._go_on(way, place)
        self.slots.use(j, reversed(way.uses[: way.place]))

    def _agree(self, words: Sequence[str], place: int = -1) -> int:
        self._agreed = True
        return self._public.begin_backward(" ".join(words), place, stores=self._stores)

    def _go_on(self, way: _Way, place: int) -> None:
        """Takes part in what other ranks do with the shards before that at ``place``."""
        while way.place > place:
            self.slots.use(way.uses[way.place], reversed(way.uses[: way.place]))
            self._leave_empty(way)
            way.place -= 1

    def _leave_empty(self, way: _Way) -> None:
        j = way.uses[way.place]
        if self._stores and j not in way.left and j not in way.uses[: way.place] and self.weights[j].trained:
            self._reduce(way, j, [None] * len(self.weights[j].parameters))

    def _finish_way(self) -> None:
        way = self._way
        if way is not None and self._stores and way.uses:
            self._go_on(way, 0)
            self._leave_empty(way)
        self._way = None

    def _reduce(self, way: _Way | None, j: int, gradients: list[Tensor | None]) -> None:
        if way is not None:
            way.left.add(j)
        if self.slots.act is not None:
            self.slots.act(Kind.DRAIN, j)
        self._gradients.drain(self.streamer.shards[j], gradients)
        if self.updates:
            self.streamer.update_in_backward(j)

    def leave(
        self, visit: Visit, accumulators: Sequence[Any], gradients: list[Tensor | None]
    ) -> Sequence[Tensor | None]:
        self.views(visit)
        if visit.step is not None:
            visit.step.end_cell()
        weights = visit.weights
        self._refuse_requests(accumulators, [weights.parameters[k] for k in visit.positions])
        home: list[Tensor | None] = [None] * len(weights.parameters)
        for n, k in enumerate(visit.positions):
            gradient, gradients[n] = gradients[n], None
            if gradient is not None and weights.parameters[k].requires_grad:
                home[k] = gradient.detach().to(weights.owners[k][1].full_dtype)
        gradient = None
        way = self._way
        assert way is not None
        if self._stores and weights.trained:
            if weights.shard.index in way.left:
                self._public.leave_order(f"gradients of shard {weights.shard.index}", way.place)
            self._reduce(way, weights.shard.index, home)
        return [None] * len(gradients)

    def _refuse_requests(self, accumulators: Sequence[Any], parameters: Sequence[nn.Parameter]) -> None:
        """Raises RuntimeError if gradients of parameters are asked for."""
        if self._stores:
            leaves = self._public.for_autograd(parameters)
            found = [p for p, leaf in zip(parameters, leaves, strict=True) if has_hooks(leaf)]
        else:
            found = [p for p, edge in zip(parameters, accumulators, strict=True) if is_requested(edge)]
        self._public.refuse_requests(found)

    def take_outside(
        self,
        parameters: list[ShownParameter],
        life: weakref.ref[Life],
        accumulators: Sequence[Any],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Called in backward with the gradients of what is outside of the blocks; ``life``: of the forward."""
        self.enter(None, None, life)
        self._refuse_requests(accumulators, [p.whole for p in parameters])
        for p, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and self._stores and p.whole.requires_grad:
                self._gradients.add_whole(p.stored, gradient.detach())

    def _store_rest(self) -> None:
        if not self._agreed:  # autograd came by no block
            self._agree(["outside"])
        self._finish_way()
        for shard in self._public.kept if self._stores else ():
            self._reduce(None, shard.index, [None] * len(shard.slices))

    def _store_returned(self) -> None:
        if self._stores:
            self._public.store_replicated(self._gradients.whole)
        self._gradients.whole.clear()
        self._whole.close()


class MeshEngine(Engine):
    """Runs blocks whose weights are gathered from the ranks of a mesh."""

    has_ranks = True
    backward_kind = MeshBackward
    backward: MeshBackward

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self._homes.public, MeshParameters)
        self._public = self._homes.public
        self._public.refuse_leaves()
        #: Of blocks that the model's forward calls, by identity.
        self._names = {id(block): name for block, name in zip(self.numbered, self._homes.blocks, strict=False)}
        #: By whether gradients are enabled: whether a forward has run, whose order is expected of the next one.
        self._ran: set[bool] = set()

    def _find(self) -> None:
        with self._public.whole():
            super()._find()

    def _check_structure(self) -> None:
        self._public.take_settings()
        super()._check_structure()

    def _run_pass(self, run: Callable[[], T]) -> T:
        with self._public.whole():
            training = torch.is_grad_enabled()
            assert self.backward.forward is not None
            self.backward.forward.order.guesses = self._homes.layers_apart and training not in self._ran
            words = self.backward.words_of(self._orders[training])
            self._public.begin_forward(" ".join(["with-gradients" if training else "without-gradients", *words]))
            result = run()
            self._ran.add(training)
            return result

    def _leave_order(self, block: Block) -> None:
        assert self.backward.forward is not None
        self._public.leave_order(self._names.get(id(block), block.name), len(self.backward.forward.order.uses))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """See :meth:`Engine.computing`."""
        with self._public.whole(), self._public.outside_as(self._outside_values):
            yield

    def _outside_values(self, trained: list[ShownParameter]) -> Sequence[Tensor]:
        whole = [p.whole for p in trained]
        if not whole or not torch.is_grad_enabled():
            return whole
        assert self.backward.forward is not None
        taker = partial(self.backward.take_outside, trained, weakref.ref(self.backward.forward.life))
        values: Sequence[Tensor] = _Outside.apply(  # type: ignore[no-untyped-call]
            taker, whole, *[p.shown for p in trained]
        )
        return values


def _last(uses: Sequence[int], j: int, end: int) -> int:
    """The last place of ``j`` in ``uses[:end]``; -1 if there is none."""
    return next((k for k in range(end - 1, -1, -1) if uses[k] == j), -1)
