"""The plan of one step as plain data: which shard is loaded, used, evicted and drained, in which order.

The order in which shards are used is known before a step starts: 0..n-1 in forward, n-1..0 in backward. So which shard
to evict is not a guess. The plan evicts the resident shard whose next use is furthest away (Belady, 1966), and loads
the next missing shard as soon as that leaves a slot free. Spare slots thus become a cache without a knob: the shards
used last in forward are still there when backward begins.

A plan prints as short tokens and parses back; the same text stands in logs, errors, test expectations and traces::

    L0 L1 F0.0 F0.1 E0 L2 F1.0 F1.1 F2.0 F2.1 B2.0 B2.1 D2 E2 L0 B1.0 B1.1 D1 B0.0 B0.1 D0
    U0 L0 U1 L1 F0.0 E0 U2 L2 F1.0 F2.0 B2.0 D2 E2 L0 B1.0 D1 B0.0 D0       the same after an optimizer's step
    L0 L1 F0.0 E0 L2 F1.0 F2.0 B2.0 D2 U2 E2 L0 B1.0 D1 U1 B0.0 D0 U0       with updates in backward

========  =====================================================================
token     meaning
========  =====================================================================
``Lj``    start to load shard j into a free slot
``Ej``    drop shard j; its slot is free (nothing is copied: a slot is clean)
``Fj.i``  run cell (shard j, micro-batch i) forward
``Bj.i``  push the gradient back through cell (j, i)
``Dj``    start to send the gradients of shard j home
``Uj``    start the optimizer's update of shard j, where it rests
========  =====================================================================

An update belongs to gradients that were drained before: by the step before, whose updates are ``pending`` when a plan
starts, or by the plan itself. A gradient clipped by the norm of all (``clips``) is updated after the last drain.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import enum
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

__all__ = ["Action", "Kind", "Plan", "PlanError", "Updates", "plan_pass", "plan_step", "validate"]


class Kind(enum.Enum):
    """What an action does."""

    LOAD = "L"
    EVICT = "E"
    FORWARD = "F"
    BACKWARD = "B"
    DRAIN = "D"
    UPDATE = "U"


@dataclass(frozen=True)
class Action:
    """One token of a plan. ``microbatch`` is given for cells only."""

    kind: Kind
    shard: int
    microbatch: int | None = None

    def __str__(self) -> str:
        cell = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.kind.value}{self.shard}{cell}"


_TOKEN = re.compile(r"([LEDU])(\d+)|([FB])(\d+)\.(\d+)")


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


def plan_pass(
    order: Sequence[int],
    kind: Kind,
    *,
    slots: int,
    microbatches: int,
    resident: Collection[int] = (),
    later: Sequence[int] = (),
    pending: Collection[int] = (),
    updates: bool = False,
) -> Plan:
    """Plans one pass over the shards in ``order``, each used once.

    Args:
        order: the shards in their order of use.
        kind: ``Kind.FORWARD`` or ``Kind.BACKWARD``; after a backward visit the shard's gradients are drained.
        slots: number of device slots, at least 1 (at least 2 for loads that run ahead of use).
        microbatches: cells of each visit.
        resident: shards that are in a slot already.
        later: the order of use after this pass, as far as it is known; it decides what is worth keeping.
        pending: shards that must be updated before they are loaded.
        updates: whether a shard is updated as soon as its gradients are drained.
    """
    if slots < 1:
        raise ValueError(f"expected at least 1 slot, got slots={slots}")
    uses = [*order, *later]
    positions: dict[int, list[int]] = {}
    for k, shard in enumerate(uses):
        positions.setdefault(shard, []).append(k)
    there = set(resident)
    left = set(pending)
    actions: list[Action] = []

    def next_use(shard: int, position: int) -> int:
        mine = positions.get(shard, [])
        k = bisect_left(mine, position)
        return mine[k] if k < len(mine) else len(uses)

    def make_room(position: int, wanted: int) -> bool:
        """Frees a slot for the shard used at ``wanted``, unless all that is resident is needed sooner."""
        if len(there) < slots:
            return True
        victim = max(there, key=lambda shard: (next_use(shard, position), shard))
        if next_use(victim, position) <= wanted:
            return False
        there.discard(victim)
        actions.append(Action(Kind.EVICT, victim))
        return True

    for position, shard in enumerate(order):
        for wanted in range(position, len(uses)):
            # Look ahead from the shard about to be used; stop where the next missing one finds no room.
            if uses[wanted] in there:
                continue
            if not make_room(position, wanted):
                break
            there.add(uses[wanted])
            if uses[wanted] in left:
                left.discard(uses[wanted])
                actions.append(Action(Kind.UPDATE, uses[wanted]))
            actions.append(Action(Kind.LOAD, uses[wanted]))
        actions.extend(Action(kind, shard, i) for i in range(microbatches))
        if kind is Kind.BACKWARD:
            actions.append(Action(Kind.DRAIN, shard))
            if updates:
                actions.append(Action(Kind.UPDATE, shard))
    return Plan(tuple(actions), slots, frozenset(resident), frozenset(pending))


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
    pending: Collection[int] = (),
    updates: bool = False,
    clips: bool = False,
) -> Plan:
    """Plans a whole step from empty slots: forward, and backward where ``training``. See :func:`plan_pass`."""
    forward, backward = range(shards), range(shards - 1, -1, -1)
    first = plan_pass(
        forward,
        Kind.FORWARD,
        slots=slots,
        microbatches=microbatches,
        later=backward if training else (),
        pending=pending,
    )
    if not training:
        return Plan(first.actions, slots, pending=first.pending, clips=clips)
    second = plan_pass(
        backward,
        Kind.BACKWARD,
        slots=slots,
        microbatches=microbatches,
        resident=first.resident_after,
        updates=updates,
    )
    return Plan(first.actions + second.actions, slots, pending=first.pending, clips=clips)


def validate(plan: Plan) -> None:
    """Proves that a plan can run.

    Each cell finds its shard resident, slots suffice, each gradient is drained once. A shard is updated once for each
    drain at the most, after it, before its next load, and after the last drain if gradients are clipped; a copy from
    before is not used any more.

    Raises:
        PlanError: at the first action that breaks one of these.
    """
    there = set(plan.resident)
    undrained: set[int] = set()
    done: set[Action] = set()
    pending, drained, stale = set(plan.pending), set[int](), set[int]()
    last_drain = max((k for k, action in enumerate(plan.actions) if action.kind is Kind.DRAIN), default=-1)
    if len(there) > plan.slots:
        raise PlanError(plan, 0, f"{len(there)} shards are resident in {plan.slots} slots")
    for position, action in enumerate(plan.actions):
        shard = action.shard
        if action.kind is Kind.LOAD:
            if shard in there:
                raise PlanError(plan, position, f"shard {shard} is loaded while it is resident")
            if len(there) == plan.slots:
                raise PlanError(plan, position, f"shard {shard} is loaded, but all {plan.slots} slots are taken")
            if shard in pending:
                raise PlanError(plan, position, f"shard {shard} is loaded before its pending update")
            there.add(shard)
            stale.discard(shard)
            continue
        if action.kind is Kind.DRAIN:
            if shard not in undrained:
                raise PlanError(plan, position, f"shard {shard} has no gradients to drain")
            undrained.discard(shard)
            drained.add(shard)
            continue
        if action.kind is Kind.UPDATE:
            if shard not in pending | drained:
                raise PlanError(plan, position, f"shard {shard} has no drained gradients to be updated with")
            if shard not in pending and plan.clips and position < last_drain:
                raise PlanError(plan, position, f"shard {shard} is updated before the norm of all gradients is known")
            pending.discard(shard)
            drained.discard(shard)
            stale.update({shard} & there)
            continue
        if shard not in there:
            raise PlanError(plan, position, f"shard {shard} is not resident")
        if action.kind is Kind.EVICT:
            there.discard(shard)
            continue
        if shard in stale:
            raise PlanError(plan, position, f"shard {shard} was updated since it was loaded")
        if action in done:
            raise PlanError(plan, position, f"cell {action} runs twice")
        done.add(action)
        if action.kind is Kind.BACKWARD:
            undrained.add(shard)
    if undrained:
        raise PlanError(plan, len(plan.actions), f"gradients of shards {sorted(undrained)} are never drained")
