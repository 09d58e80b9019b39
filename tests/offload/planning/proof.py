"""Proves that a plan can run."""

from __future__ import annotations

from collections.abc import Iterator

from offload.planning.plan import BACKWARD_CELLS, CELLS, Action, Kind, Plan

#: (shard, micro-batch)
_Cell = tuple[int, int | None]


def plan_of(text: str, slots: int) -> Plan:
    """Reads what ``str(plan)`` wrote."""
    words = [(Kind(word[0]), *map(int, word[1:].split("."))) for word in text.split()]
    return Plan(tuple(Action(*word) for word in words), slots)


def validate(plan: Plan, *, clips: bool = False) -> None:
    """Checks that a plan can run.

    Each cell has its shard and its input in memory; slots suffice; each gradient is drained once. A shard is updated at
    most once for each drain, after it, before its next load or cell in memory, and after the last drain if gradients
    are clipped; a copy loaded earlier is not used any more. A boundary is spilled once, and read back only while it is
    not in memory. A cell is recomputed if and only if it did not keep its graph.

    Raises:
        AssertionError: at the first action that breaks one of these.
    """
    proof = _Proof(plan, clips=clips)
    for position, action in enumerate(plan.actions):
        perform = proof.move_shard if action.microbatch is None else proof.run if action.kind in CELLS else proof.move
        for broken, reason in perform(action, position):
            assert not broken, f"{reason}: {' '.join(map(str, plan.actions[: position + 1]))}"
    assert not proof.undrained, f"gradients of shards {sorted(proof.undrained)} are never drained: {plan}"


class _Proof:
    """The state while a plan is checked.

    Each method yields (whether a rule is broken, the reason) for the rules of an action, and then performs it.
    """

    def __init__(self, plan: Plan, *, clips: bool) -> None:
        assert len(plan.resident) <= plan.slots
        assert not plan.resident & plan.in_memory
        self._slots, self._clips, self._in_memory = plan.slots, clips, plan.in_memory
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
            self._written.discard(cell)  # which a cell may add to
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
