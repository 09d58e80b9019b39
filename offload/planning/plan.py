"""The plan of one step as plain data: the ordered actions of its forward and backward.

A plan prints as short tokens, which :meth:`Plan.parse` reads; logs, errors, tests and traces use the same text::

    L0 L1 F0.0 F0.1 E0 L2 F1.0 F1.1 F2.0 F2.1 B2.1 B2.0 D2 E2 L0 B1.1 B1.0 D1 B0.1 B0.0 D0
    U0 L0 U1 L1 F0.0 E0 U2 L2 F1.0 F2.0 B2.0 D2 E2 L0 B1.0 D1 B0.0 D0       the same after an optimizer's step
    L0 L1 F0.0 E0 L2 F1.0 F2.0 B2.0 D2 V2 E2 L0 B1.0 D1 V1 B0.0 D0 V0       with updates in backward
    L0 F0.0 L1 F1.0 S1.0 L2 K2.0 P1.0 G2.0 D2 B1.0 D1 B0.0 D0               a boundary is spilled, a graph is kept
    U1 L0 F0.0 F1.0 L2 F2.0 B2.0 D2 B1.0 D1 B0.0 D0                         shard 1 is used in memory, where it rests

========  =====================================================================
token     meaning
========  =====================================================================
``Lj``    start to load shard j into a free slot
``Ej``    evict shard j; its slot is free (nothing is copied back)
``Fj.i``  run cell (shard j, micro-batch i) forward
``Kj.i``  the same, and keep its graph
``Bj.i``  recompute cell (j, i), and push the gradient back through it
``Gj.i``  push the gradient back through the graph that ``Kj.i`` kept
``Dj``    start to offload the gradients of shard j (drain)
``Uj``    start the pending update of shard j of an earlier step, before its load or its first cell in memory
``Vj``    start the update of shard j in backward, with the gradients that were drained
``Sj.i``  start to spill the boundary that enters cell (j, i)
``Pj.i``  start to read it back (prefetch)
``Xj.i``  drop its copy in memory; the spilled copy remains
========  =====================================================================

The input of shard 0 belongs to the user. An update uses gradients that were drained before: by an earlier step, whose
updates are ``pending`` when a plan starts, or by the plan itself; if gradients are clipped by their norm (``clips``),
after the last drain.

A shard that rests ``in_memory`` in which layers compute has no load, no eviction and no slot: its cells use it there.

This module knows nothing of tensors or torch. :mod:`offload.planning.planner` makes plans.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "BACKWARD_CELLS",
    "CELLS",
    "FORWARD_CELLS",
    "Action",
    "Kind",
    "Plan",
    "PlanError",
    "validate",
]


class Kind(enum.Enum):
    """What an action does."""

    LOAD = "L"
    EVICT = "E"
    FORWARD = "F"
    FORWARD_KEPT = "K"
    BACKWARD = "B"
    BACKWARD_KEPT = "G"
    DRAIN = "D"
    UPDATE = "U"
    UPDATE_IN_BACKWARD = "V"
    SPILL = "S"
    PREFETCH = "P"
    FORGET = "X"

    # That of Enum is a Python function, which a choice of plans would call for each action.
    __hash__ = object.__hash__


FORWARD_CELLS = frozenset({Kind.FORWARD, Kind.FORWARD_KEPT})
BACKWARD_CELLS = frozenset({Kind.BACKWARD, Kind.BACKWARD_KEPT})
CELLS = FORWARD_CELLS | BACKWARD_CELLS
#: (shard, micro-batch)
_Cell = tuple[int, int | None]


class Action(NamedTuple):
    """One token of a plan. ``microbatch`` is given for cells and what enters them."""

    kind: Kind
    shard: int
    microbatch: int | None = None

    def __str__(self) -> str:
        cell = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.kind.value}{self.shard}{cell}"


_TOKEN = re.compile(r"([LEDUV])(\d+)|([FKBGSPX])(\d+)\.(\d+)")


@dataclass(frozen=True)
class Plan:
    """Ordered actions for ``slots`` device slots.

    ``resident`` are the shards that are in a slot before it starts, ``pending`` those that an earlier step left to be
    updated, ``in_memory`` those that are never loaded. ``clips``: an update needs the norm of all gradients.
    """

    actions: tuple[Action, ...]
    slots: int
    resident: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()
    clips: bool = False
    in_memory: frozenset[int] = frozenset()
    #: Whether a forward cell adds to the boundary that enters it, so that it may be written out once more.
    grows: bool = False

    def __str__(self) -> str:
        return " ".join(map(str, self.actions))

    @classmethod
    def parse(
        cls,
        text: str,
        slots: int,
        resident: Iterable[int] = (),
        pending: Iterable[int] = (),
        *,
        clips: bool = False,
        in_memory: Iterable[int] = (),
    ) -> Plan:
        """Reads what ``str(plan)`` wrote.

        Raises:
            ValueError: at the first word that is not a token.
        """
        actions = []
        for word in text.split():
            match = _TOKEN.fullmatch(word)
            if match is None:
                raise ValueError(f"expected a token such as L3, E2, F3.0, B3.0, D3 or U3, got {word!r}")
            move, moved, cell, shard, microbatch = match.groups()
            actions.append(Action(Kind(move), int(moved)) if move else Action(Kind(cell), int(shard), int(microbatch)))
        return cls(tuple(actions), slots, frozenset(resident), frozenset(pending), clips, frozenset(in_memory))

    @property
    def loads(self) -> tuple[int, ...]:
        """The shards that are loaded, in order."""
        return tuple(action.shard for action in self.actions if action.kind is Kind.LOAD)

    @property
    def resident_after(self) -> frozenset[int]:
        """The shards that are in a slot when the plan is done."""
        resident = set(self.resident)
        for action in self.actions:
            if action.kind is Kind.LOAD:
                resident.add(action.shard)
            elif action.kind is Kind.EVICT:
                resident.discard(action.shard)
        return frozenset(resident)


class PlanError(ValueError):
    """A plan that cannot run. The message shows the plan with an arrow at the action that fails."""

    def __init__(self, plan: Plan, position: int, reason: str) -> None:
        words = [str(action) for action in plan.actions]
        near = words[max(0, position - 6) : position]
        there = words[position : position + 1] or ["(end)"]
        after = words[position + 1 : position + 4]
        super().__init__(f"{reason} at action {position}: {' '.join([*near, '-->', *there, *after])}")
        self.position = position


def validate(plan: Plan) -> None:
    """Checks that a plan can run.

    Each cell has its shard and its input in memory; slots suffice; each gradient is drained once. A shard is updated at
    most once for each drain, after it, before its next load or cell in memory, and after the last drain if gradients
    are clipped; a copy loaded earlier is not used any more. A boundary is spilled once, and read back only while it is
    not in memory. A cell is recomputed if and only if it did not keep its graph.

    Raises:
        PlanError: at the first action that breaks one of these.
    """
    proof = _Proof(plan)
    for position, action in enumerate(plan.actions):
        perform = proof.move_shard if action.microbatch is None else proof.run if action.kind in CELLS else proof.move
        for broken, reason in perform(action, position):
            if broken:
                raise PlanError(plan, position, reason)
    if proof.undrained:
        raise PlanError(plan, len(plan.actions), f"gradients of shards {sorted(proof.undrained)} are never drained")


class _Proof:
    """The state while a plan is checked.

    Each method yields (whether a rule is broken, the reason) for the rules of an action, and then performs it.
    """

    def __init__(self, plan: Plan) -> None:
        if len(plan.resident) > plan.slots:
            raise PlanError(plan, 0, f"{len(plan.resident)} shards are resident in {plan.slots} slots")
        if plan.resident & plan.in_memory:
            raise PlanError(plan, 0, f"shards {sorted(plan.resident & plan.in_memory)} are in slots and in memory")
        self._slots, self._clips, self._in_memory = plan.slots, plan.clips, plan.in_memory
        self._grows = plan.grows
        self._last_drain = max((k for k, action in enumerate(plan.actions) if action.kind is Kind.DRAIN), default=-1)
        self._there = set(plan.resident)
        self._pending, self._drained, self._stale = set(plan.pending), set[int](), set[int]()
        self.undrained: set[int] = set()
        #: Cells that ran forward: whether they kept their graphs. Those that ran backward.
        self._forward: dict[_Cell, bool] = {}
        self._backward: set[_Cell] = set()
        #: Boundaries that have a copy out of memory, and those in memory no more.
        self._written: set[_Cell] = set()
        self._away: set[_Cell] = set()

    def move_shard(self, action: Action, position: int) -> Iterator[tuple[bool, str]]:
        """A load, an eviction, a drain or an update."""
        kind, shard, there = action.kind, action.shard, self._there
        if kind is Kind.LOAD:
            yield shard in self._in_memory, f"shard {shard} is loaded, but it is used in memory, where it rests"
            yield shard in there, f"shard {shard} is loaded while it is resident"
            yield len(there) == self._slots, f"shard {shard} is loaded, but all {self._slots} slots are taken"
            yield shard in self._pending, f"shard {shard} is loaded before its pending update"
            there.add(shard)
            self._stale.discard(shard)
        elif kind is Kind.EVICT:
            yield shard not in there, f"shard {shard} is not resident"
            there.discard(shard)
        elif kind is Kind.DRAIN:
            yield shard not in self.undrained, f"shard {shard} has no gradients to drain"
            self.undrained.discard(shard)
            self._drained.add(shard)
        elif kind is Kind.UPDATE:
            yield shard not in self._pending, f"shard {shard} has no pending update"
            self._pending.discard(shard)
            self._stale.update({shard} & there)
        else:
            early = self._clips and position < self._last_drain
            yield shard not in self._drained, f"shard {shard} has no drained gradients to be updated with"
            yield early, f"shard {shard} is updated before the norm of all gradients is known"
            self._drained.discard(shard)
            self._stale.update({shard} & there)

    def run(self, action: Action, position: int) -> Iterator[tuple[bool, str]]:
        """A cell."""
        kind, shard, i = action.kind, action.shard, action.microbatch
        name, cell = f"{shard}.{i}", (shard, i)
        in_memory = shard in self._in_memory
        yield not in_memory and shard not in self._there, f"shard {shard} is not resident"
        yield in_memory and shard in self._pending, f"shard {shard} is used in memory before its pending update"
        yield shard in self._stale, f"shard {shard} was updated since it was loaded"
        kept = self._forward.get(cell)
        if kind in BACKWARD_CELLS:
            yield cell in self._backward, f"cell {action} runs twice"
            yield kept is True and kind is Kind.BACKWARD, f"cell {name} is recomputed though its graph was kept"
            yield kept is False and kind is Kind.BACKWARD_KEPT, f"the graph of cell {name} was not kept"
            self._backward.add(cell)
            self.undrained.add(shard)
        else:
            keeps = kind is Kind.FORWARD_KEPT
            # What would write other weights when it is recomputed runs once more, to keep its graph.
            yield kept is not None and (kept or not keeps), f"cell {action} runs twice"
            self._forward[cell] = keeps
            if self._grows:
                self._written.discard(cell)
        missing = kind is not Kind.BACKWARD_KEPT and cell in self._away
        yield missing, f"the boundary that enters cell {name} is not in memory"

    def move(self, action: Action, position: int) -> Iterator[tuple[bool, str]]:
        """A boundary leaves memory or returns."""
        key = action.shard, action.microbatch
        what = f"boundary {action.shard}.{action.microbatch}"
        if action.kind is Kind.PREFETCH:
            yield key not in self._away, f"{what} is read back while it is in memory"
            self._away.discard(key)
            return
        spills, written = action.kind is Kind.SPILL, key in self._written
        yield key in self._away, f"{what} is not in memory"
        yield spills and written, f"{what} is written out twice"
        yield not (spills or written), f"{what} is dropped, and has no other copy"
        self._written.add(key)
        self._away.add(key)
