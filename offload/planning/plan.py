"""The plan of one step as plain data: the ordered actions of its forward and backward.

A plan prints as short tokens; logs, errors, tests and traces use the same text::

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
updates are ``pending`` when a plan starts, or by the plan itself; if gradients are clipped by their norm, after the
last drain.

A shard that rests ``in_memory`` in which layers compute has no load, no eviction and no slot: its cells use it there.

This module knows nothing of tensors or torch. :mod:`offload.planning.planner` makes plans.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["BACKWARD_CELLS", "CELLS", "Action", "Kind", "Plan"]


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


BACKWARD_CELLS = frozenset({Kind.BACKWARD, Kind.BACKWARD_KEPT})
CELLS = frozenset({Kind.FORWARD, Kind.FORWARD_KEPT}) | BACKWARD_CELLS


class Action(NamedTuple):
    """One token of a plan. ``microbatch`` is given for cells and what enters them."""

    kind: Kind
    shard: int
    microbatch: int | None = None

    def __str__(self) -> str:
        cell = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.kind.value}{self.shard}{cell}"


@dataclass(frozen=True)
class Plan:
    """Ordered actions for ``slots`` device slots.

    ``resident`` are the shards that are in a slot before it starts, ``pending`` those that an earlier step left to be
    updated, ``in_memory`` those that are never loaded.
    """

    actions: tuple[Action, ...]
    slots: int
    resident: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()
    in_memory: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return " ".join(map(str, self.actions))

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
