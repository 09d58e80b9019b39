"""The plan of one step as plain data: the ordered actions of its forward and backward.

A plan prints as short tokens, which :meth:`Plan.parse` reads; logs, errors, tests and traces use the same text::

    L0 L1 F0.0 F0.1 E0 L2 F1.0 F1.1 F2.0 F2.1 B2.0 B2.1 D2 E2 L0 B1.0 B1.1 D1 B0.0 B0.1 D0
    U0 L0 U1 L1 F0.0 E0 U2 L2 F1.0 F2.0 B2.0 D2 E2 L0 B1.0 D1 B0.0 D0       the same after an optimizer's step
    L0 L1 F0.0 E0 L2 F1.0 F2.0 B2.0 D2 V2 E2 L0 B1.0 D1 V1 B0.0 D0 V0       with updates in backward
    L0 F0.0 L1 F1.0 S1.0 L2 K2.0 P1.0 G2.0 D2 B1.0 D1 B0.0 D0               a boundary is spilled, a graph is kept

========  =====================================================================
token     meaning
========  =====================================================================
``Lj``    start to load shard j into a free slot
``Ej``    evict shard j; its slot is free (nothing is copied back)
``Fj.i``  run cell (shard j, micro-batch i) forward
``Kj.i``  the same, and keep its graph
``Bj.i``  recompute cell (j, i), and push the gradient back through it
``Gj.i``  push the gradient back through the graph that ``Kj.i`` kept
``Rj.i``  run cell (j, i) forward again, for the input of the next, which was not kept
``Dj``    start to offload the gradients of shard j (drain)
``Uj``    start the pending update of shard j of an earlier step, before its load
``Vj``    start the update of shard j in backward, with the gradients that were drained
``Sj.i``  start to spill the boundary that enters cell (j, i)
``Pj.i``  start to read it back (prefetch)
``Xj.i``  drop its copy in memory; the spilled copy remains
``sj.i``  the same three, for the gradient of that boundary
``pj.i``
``xj.i``
========  =====================================================================

The boundary that enters shard n of n is the output, of which only the gradient is stored. The input of shard 0 belongs
to the user. An update uses gradients that were drained before: by an earlier step, whose updates are ``pending`` when a
plan starts, or by the plan itself; if gradients are clipped by their norm (``clips``), after the last drain.

This module knows nothing of tensors or torch. :mod:`offload.planning.planner` makes plans.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "BACKWARD_CELLS",
    "CELLS",
    "FORWARD_CELLS",
    "GRADIENT_MOVES",
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
    REPEAT = "R"
    DRAIN = "D"
    UPDATE = "U"
    UPDATE_IN_BACKWARD = "V"
    SPILL = "S"
    PREFETCH = "P"
    FORGET = "X"
    SPILL_GRADIENT = "s"
    PREFETCH_GRADIENT = "p"
    FORGET_GRADIENT = "x"


FORWARD_CELLS = frozenset({Kind.FORWARD, Kind.FORWARD_KEPT})
BACKWARD_CELLS = frozenset({Kind.BACKWARD, Kind.BACKWARD_KEPT})
CELLS = FORWARD_CELLS | BACKWARD_CELLS | {Kind.REPEAT}
GRADIENT_MOVES = frozenset({Kind.SPILL_GRADIENT, Kind.PREFETCH_GRADIENT, Kind.FORGET_GRADIENT})
_BOUNDARIES = frozenset({Kind.SPILL, Kind.PREFETCH, Kind.FORGET}) | GRADIENT_MOVES


@dataclass(frozen=True, slots=True)
class Action:
    """One token of a plan. ``microbatch`` is given for cells and what enters them."""

    kind: Kind
    shard: int
    microbatch: int | None = None

    def __str__(self) -> str:
        cell = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.kind.value}{self.shard}{cell}"


_TOKEN = re.compile(r"([LEDUV])(\d+)|([FKBGRSPXspx])(\d+)\.(\d+)")


@dataclass(frozen=True)
class Plan:
    """Ordered actions for ``slots`` device slots.

    ``resident`` are the shards that are in a slot before it starts, ``pending`` those that an earlier step left to be
    updated. ``clips``: an update needs the norm of all gradients.
    """

    actions: tuple[Action, ...]
    slots: int
    resident: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()
    clips: bool = False

    def __str__(self) -> str:
        return " ".join(map(str, self.actions))

    @classmethod
    def parse(
        cls, text: str, slots: int, resident: Iterable[int] = (), pending: Iterable[int] = (), *, clips: bool = False
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
        return cls(tuple(actions), slots, frozenset(resident), frozenset(pending), clips)

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
    most once for each drain, after it, before its next load, and after the last drain if gradients are clipped; a copy
    loaded earlier is not used any more. A boundary is spilled once, and read back only while it is not in memory. A
    cell is recomputed if and only if it did not keep its graph.

    Raises:
        PlanError: at the first action that breaks one of these.
    """
    proof = _Proof(plan)
    for position, action in enumerate(plan.actions):
        if action.kind in CELLS:
            reason = proof.run(action)
        elif action.kind in _BOUNDARIES:
            reason = proof.move_boundary(action)
        else:
            reason = proof.move_shard(action, position)
        if reason:
            raise PlanError(plan, position, reason)
    if proof.undrained:
        raise PlanError(plan, len(plan.actions), f"gradients of shards {sorted(proof.undrained)} are never drained")


class _Proof:
    """The state while a plan is checked; each method returns what is wrong with an action, or None."""

    def __init__(self, plan: Plan) -> None:
        if len(plan.resident) > plan.slots:
            raise PlanError(plan, 0, f"{len(plan.resident)} shards are resident in {plan.slots} slots")
        self._slots, self._clips = plan.slots, plan.clips
        self._last_drain = max((k for k, action in enumerate(plan.actions) if action.kind is Kind.DRAIN), default=-1)
        self._there = set(plan.resident)
        self._pending, self._drained, self._stale = set(plan.pending), set[int](), set[int]()
        self.undrained: set[int] = set()
        #: Cells that ran forward: whether they kept their graphs. Those that ran backward.
        self._forward: dict[tuple[int, int], bool] = {}
        self._backward: set[tuple[int, int]] = set()
        #: Boundaries and gradients of boundaries: those that have a copy out of memory, and those in memory no more.
        self._written: set[tuple[bool, int, int]] = set()
        self._away: set[tuple[bool, int, int]] = set()

    def move_shard(self, action: Action, position: int) -> str | None:
        """A load, an eviction, a drain or an update."""
        shard, there = action.shard, self._there
        if action.kind is Kind.LOAD:
            if shard in there:
                return f"shard {shard} is loaded while it is resident"
            if len(there) == self._slots:
                return f"shard {shard} is loaded, but all {self._slots} slots are taken"
            if shard in self._pending:
                return f"shard {shard} is loaded before its pending update"
            there.add(shard)
            self._stale.discard(shard)
        elif action.kind is Kind.EVICT:
            if shard not in there:
                return f"shard {shard} is not resident"
            there.discard(shard)
        elif action.kind is Kind.DRAIN:
            if shard not in self.undrained:
                return f"shard {shard} has no gradients to drain"
            self.undrained.discard(shard)
            self._drained.add(shard)
        else:
            return self._update(action, position)
        return None

    def _update(self, action: Action, position: int) -> str | None:
        shard = action.shard
        if action.kind is Kind.UPDATE:
            if shard not in self._pending:
                return f"shard {shard} has no pending update"
            self._pending.discard(shard)
        else:
            if shard not in self._drained:
                return f"shard {shard} has no drained gradients to be updated with"
            if self._clips and position < self._last_drain:
                return f"shard {shard} is updated before the norm of all gradients is known"
            self._drained.discard(shard)
        self._stale.update({shard} & self._there)
        return None

    def run(self, action: Action) -> str | None:
        """A cell."""
        shard, i = action.shard, action.microbatch
        assert i is not None
        if shard not in self._there:
            return f"shard {shard} is not resident"
        if shard in self._stale:
            return f"shard {shard} was updated since it was loaded"
        backward, keeps = action.kind in BACKWARD_CELLS, action.kind is Kind.FORWARD_KEPT
        kept = self._forward.get((shard, i))
        if backward:
            if (shard, i) in self._backward:
                return f"cell {action} runs twice"
            if kept is True and action.kind is Kind.BACKWARD:
                return f"cell {shard}.{i} is recomputed though its graph was kept"
            if kept is False and action.kind is Kind.BACKWARD_KEPT:
                return f"the graph of cell {shard}.{i} was not kept"
            self._backward.add((shard, i))
            self.undrained.add(shard)
        elif action.kind is Kind.REPEAT:
            if kept is None:
                return f"cell {action} is repeated before it ran"
        else:
            # What would write other weights when it is recomputed runs once more, to keep its graph.
            if kept is not None and not (keeps and not kept):
                return f"cell {action} runs twice"
            self._forward[shard, i] = keeps
        if action.kind is not Kind.BACKWARD_KEPT and (False, shard, i) in self._away:
            return f"the boundary that enters cell {shard}.{i} is not in memory"
        if backward and (True, shard + 1, i) in self._away:
            return f"the gradient that enters cell {shard}.{i} is not in memory"
        return None

    def move_boundary(self, action: Action) -> str | None:
        """A boundary, or the gradient of one, leaves memory or returns."""
        shard, i = action.shard, action.microbatch
        assert i is not None
        key = (action.kind in GRADIENT_MOVES, shard, i)
        what = f"{'the gradient of ' * key[0]}boundary {shard}.{i}"
        if action.kind in (Kind.PREFETCH, Kind.PREFETCH_GRADIENT):
            if key not in self._away:
                return f"{what} is read back while it is in memory"
            self._away.discard(key)
            return None
        if key in self._away:
            return f"{what} is not in memory"
        spills = action.kind in (Kind.SPILL, Kind.SPILL_GRADIENT)
        if spills and key in self._written:
            return f"{what} is written out twice"
        if not spills and key not in self._written:
            return f"{what} is dropped, and has no other copy"
        self._written.add(key)
        self._away.add(key)
        return None
