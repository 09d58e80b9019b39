"""Makes the plans of forward and backward passes, for steps that run and for previews.

The order of use is known before a step starts: shards 0..n-1 in forward, n-1..0 in backward. The plan evicts the
resident shard whose next use is furthest away (Belady, 1966), and loads the next missing shard as soon as a slot is
free. So spare slots are a cache: the last shards of forward are still loaded when backward begins. Boundaries are
treated alike (:mod:`offload.planning.residency`).

Actions are made one at a time, and the size of a boundary is asked for after the action that makes it. So a running
step uses measured sizes, and a step whose sizes are known is planned exactly.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypedDict

from offload.planning.plan import Action, Kind, Plan
from offload.planning.residency import Key, Residency

__all__ = ["Pass", "Sizes", "Updates", "plan_step"]

#: Bytes of the boundary that enters a cell, or of its gradient.
Sizes = Callable[[Key], int]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The parameters of the plan of one pass over all shards; two slots are needed for loads that run ahead of use.

    Where all shards are used in memory, no slot is needed.
    """

    shards: int
    microbatches: int
    slots: int
    backward: bool = False
    first: int = 0  #: The first shard that backward has to reach.
    records: bool = True  #: Whether a forward has a backward.
    kept: Collection[Key] = frozenset()  #: Cells that keep their graphs from forward to backward.
    resident: Collection[int] = frozenset()  #: Shards that are in a slot already.
    in_memory: Collection[int] = frozenset()  #: Shards that are used where they rest: never loaded, in no slot.
    later: Sequence[int] = ()  #: The order of use after this pass, as far as it is known.
    pending: Collection[int] = frozenset()  #: Shards that must be updated before they are loaded, or used in memory.
    updates: bool = False  #: Whether a shard is updated as soon as its gradients are drained.
    consume: bool = True  #: Whether a backward is the last one.
    grows: bool = False  #: Whether a forward cell adds to the boundary that enters it, or makes it.

    def __post_init__(self) -> None:
        if self.slots < 1 and not {*range(self.shards)} <= {*self.in_memory}:
            raise ValueError(f"expected at least 1 slot, got slots={self.slots}")

    @property
    def order(self) -> range:
        """The shards in their order of use."""
        return range(self.shards - 1, self.first - 1, -1) if self.backward else range(self.shards)

    @property
    def turns(self) -> range:
        """The micro-batches in the order of their cells in a shard: in backward, the last one first."""
        return range(self.microbatches - 1, -1, -1) if self.backward else range(self.microbatches)

    def keeps(self, j: int, i: int) -> bool:
        """Whether a cell keeps its graph."""
        return self.records and j >= self.first and (j, i) in self.kept

    def now(self, j: int, i: int) -> int:
        """The position of a cell in the step."""
        m = self.microbatches
        return self._in_backward(j, i) if self.backward else j * m + i

    def actions(
        self,
        boundaries: Residency | None,
        sizes: Sizes,
        gradients: Residency | None = None,
        moves: Sequence[Sequence[Action]] | None = None,
    ) -> Iterator[Action]:
        """Plans the pass. A backward continues with the ``boundaries`` that its forward left.

        Args:
            boundaries: which boundaries stay in memory; None if all do.
            sizes: of the results of a cell, boundaries or ``gradients``; called after the action that makes them, where
                not all stay in memory.
            gradients: which gradients of boundaries stay in memory, in a backward; None if all do.
            moves: what :meth:`moves` returns, if it was called before.
        """
        before_visits = iter(self.moves() if moves is None else moves)
        if gradients is not None:
            for i in self.turns:
                yield from gradients.put((self.shards, i), sizes((self.shards, i)), [self.now(self.shards - 1, i)])
        for j, before in zip(self.order, before_visits, strict=True):
            yield from before
            yield from self.visit(j, boundaries, sizes, gradients)

    def visit(
        self, j: int, boundaries: Residency | None, sizes: Sizes, gradients: Residency | None = None
    ) -> Iterator[Action]:
        """The part of :meth:`actions` from the first cell of a shard on, until the loads before the next one."""
        for i in self.turns:
            if boundaries is None and gradients is None:
                yield Action(self._kind(j, i), j, i)
            elif self.backward:
                yield from self._backward_cell(j, i, boundaries, gradients, sizes)
            elif boundaries is not None:
                yield from self._forward_cell(j, i, boundaries, sizes)
        if self.backward:
            yield Action(Kind.DRAIN, j)
            if self.updates:
                yield Action(Kind.UPDATE_IN_BACKWARD, j)

    def moves(self, begin: int = 0) -> Iterator[Sequence[Action]]:
        """Updates, loads and evictions before the cells of each shard. They do not depend on what the cells keep.

        ``begin``: the visit to begin with, when :attr:`resident` are the shards that are in slots by then.
        """
        loads = _Loads(self)
        return (tuple(loads.ahead(position)) for position in range(begin, len(self.order)))

    def _kind(self, j: int, i: int) -> Kind:
        if self.backward:
            return Kind.BACKWARD_KEPT if self.keeps(j, i) else Kind.BACKWARD
        return Kind.FORWARD_KEPT if self.keeps(j, i) else Kind.FORWARD

    def _forward_cell(self, j: int, i: int, boundaries: Residency, sizes: Sizes) -> Iterator[Action]:
        yield Action(self._kind(j, i), j, i)
        if (j or self.grows) and self.needed_again(j, i):
            yield from boundaries.put((j, i), sizes((j, i)), [self._in_backward(j, i)])

    def _backward_cell(
        self, j: int, i: int, boundaries: Residency | None, gradients: Residency | None, sizes: Sizes
    ) -> Iterator[Action]:
        m, now, kept = self.microbatches, self.now(j, i), self.keeps(j, i)
        k, after = (j, i - 1) if i else (j - 1, m - 1)
        if gradients is not None:
            yield from gradients.use((j + 1, i), now)
        if boundaries is not None and not kept:
            yield from boundaries.use((j, i), now)
            yield from boundaries.prefetch(self._recomputed_before(j, i))
        if gradients is not None and k >= self.first:
            yield from gradients.prefetch((k + 1, after))
        yield Action(self._kind(j, i), j, i)
        if gradients is not None:
            gradients.drop((j + 1, i))
        if boundaries is not None:
            if self.consume:
                boundaries.drop((j, i))
            elif not kept:
                yield from boundaries.end_use((j, i))
        if gradients is not None and j > self.first:
            yield from gradients.put((j, i), sizes((j, i)), [now + m])

    def _recomputed_before(self, j: int, i: int) -> Key:
        """The next cell that a backward recomputes after this one; one that does not exist if there is none."""
        while j >= self.first:
            j, i = (j, i - 1) if i else (j - 1, self.microbatches - 1)
            if not self.keeps(j, i):
                break
        return j, i

    def _in_backward(self, j: int, i: int) -> int:
        """The position of the cell in the backward that follows this forward: autograd runs the last one first."""
        return (2 * self.shards - 1 - j) * self.microbatches + self.microbatches - 1 - i

    def needed_again(self, j: int, i: int) -> bool:
        """Whether backward needs the boundary that enters a cell."""
        return self.records and j >= self.first and not self.keeps(j, i)


class _Loads:
    """Loads of shards ahead of their use, and the evictions that make room for them."""

    def __init__(self, one: Pass) -> None:
        self._slots = one.slots
        self._uses = [*one.order, *one.later]
        self._positions: dict[int, list[int]] = {}
        for k, shard in enumerate(self._uses):
            self._positions.setdefault(shard, []).append(k)
        self._there = set(one.resident)
        self._pending = set(one.pending)
        self._in_memory = frozenset(one.in_memory)
        #: All shards whose uses come before this one are there: no load that is wanted later evicts them.
        self._wanted = 0

    def ahead(self, position: int) -> Iterator[Action]:
        """Loads the missing shards that will be used next, until no slot can be freed."""
        for wanted in range(max(position, self._wanted), len(self._uses)):
            self._wanted = wanted
            shard = self._uses[wanted]
            if shard in self._in_memory:
                yield from self._update(shard)
                continue
            if shard in self._there:
                continue
            if len(self._there) >= self._slots:
                victim = max(self._there, key=lambda other: (self._next_use(other, position), other))
                if self._next_use(victim, position) <= wanted:
                    break
                self._there.discard(victim)
                yield Action(Kind.EVICT, victim)
            self._there.add(shard)
            yield from self._update(shard)
            yield Action(Kind.LOAD, shard)

    def _update(self, shard: int) -> Iterator[Action]:
        if shard in self._pending:
            self._pending.discard(shard)
            yield Action(Kind.UPDATE, shard)

    def _next_use(self, shard: int, position: int) -> int:
        mine = self._positions.get(shard, [])
        k = bisect_left(mine, position)
        return mine[k] if k < len(mine) else len(self._uses)


class Updates(TypedDict):
    """What an optimizer adds to a plan: see :func:`plan_step`."""

    pending: frozenset[int]
    updates: bool
    clips: bool


def plan_step(
    shards: int,
    *,
    slots: int,
    microbatches: int = 1,
    training: bool = True,
    first: int = 0,
    kept: Collection[Key] = frozenset(),
    in_memory: Collection[int] = frozenset(),
    pending: Collection[int] = (),
    updates: bool = False,
    clips: bool = False,
    boundaries: Residency | None = None,
    gradients: Residency | None = None,
    boundary_sizes: Sizes = lambda key: 0,
    gradient_sizes: Sizes = lambda key: 0,
    grows: bool = False,
) -> Plan:
    """Plans a whole step from empty slots: forward, and backward where ``training``.

    Args:
        shards, slots, microbatches, first, kept, in_memory, pending, updates: see :class:`Pass`.
        training: whether there is a backward.
        grows: see :class:`Pass`.
        clips: see :class:`Plan`.
        boundaries, gradients: which boundaries, and gradients of boundaries, stay in memory; all, if left out.
        boundary_sizes: bytes of the boundary that enters a cell, as far as it is known, else 0.
        gradient_sizes: of its gradient; that of shard ``shards`` is the output's.
    """
    step = _loads_of(shards, slots, first, training, frozenset(in_memory), frozenset(pending))
    forward = replace(step.forward, microbatches=microbatches, kept=kept, grows=grows)
    actions = [*forward.actions(boundaries, boundary_sizes, moves=step.before_forward)]
    if training:
        backward = replace(step.backward, microbatches=microbatches, kept=kept, updates=updates)
        actions += backward.actions(boundaries, gradient_sizes, gradients, step.before_backward)
    return Plan(
        tuple(actions), slots, pending=frozenset(pending), clips=clips, in_memory=frozenset(in_memory), grows=grows
    )


@dataclass(frozen=True)
class _LoadsOfStep:
    """The passes of a step, and their updates, loads and evictions before the cells of each visit."""

    forward: Pass
    before_forward: Sequence[Sequence[Action]]
    backward: Pass
    before_backward: Sequence[Sequence[Action]]


@lru_cache(maxsize=4)
def _loads_of(
    shards: int, slots: int, first: int, training: bool, in_memory: frozenset[int], pending: frozenset[int]
) -> _LoadsOfStep:
    """The loads and evictions of a step, cached for all tried plans that agree in them."""
    forward = Pass(
        shards=shards,
        microbatches=1,
        slots=slots,
        first=first,
        records=training,
        in_memory=in_memory,
        later=range(shards - 1, first - 1, -1) if training else (),
        pending=pending,
    )
    before = tuple(forward.moves())
    resident = Plan(tuple(itertools.chain.from_iterable(before)), slots).resident_after
    backward = replace(forward, backward=True, resident=resident, later=(), pending=frozenset())
    return _LoadsOfStep(forward, before, backward, tuple(backward.moves()) if training else ())
