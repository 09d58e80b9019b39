"""Runs a pass: performs the actions of its plan one by one, while the plan is being made."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from offload.engine.boundary_store import BoundaryStore
from offload.engine.cell import Cell
from offload.engine.tape import Tape
from offload.planning.plan import CELLS, Action, Kind, Plan
from offload.planning.planner import Pass, Sizes
from offload.planning.residency import Residency
from offload.streaming.streamer import Streamer

__all__ = ["follow"]


def follow(
    this: Pass,
    tape: Tape,
    streamer: Streamer,
    run: Callable[[Cell], None],
    end_visit: Callable[[int, Callable[[Action], None]], Sequence[Action]] = lambda j, perform: (),
    around_cells: Callable[[int], contextlib.AbstractContextManager[None]] = lambda j: contextlib.nullcontext(),
    gradients: tuple[BoundaryStore, Residency, Sizes] | None = None,
) -> Plan:
    """Plans a pass and performs its actions.

    Args:
        this: the parameters of the plan.
        tape: whose boundaries are spilled and prefetched.
        streamer: loads and evicts shards.
        run: runs a cell while its shard is on the compute device.
        end_visit: called after the last cell of a shard, before its eviction. It may perform actions of its own, and
            returns others to be added to the plan.
        around_cells: a context for the cells of a shard.
        gradients: in a backward: the store of the boundaries' gradients, their residency, and their sizes.

    Returns:
        The plan that ran.
    """
    boundaries = tape.boundaries
    move_shard = {
        Kind.LOAD: streamer.load,
        Kind.EVICT: streamer.evict,
        Kind.DRAIN: streamer.drain,
        Kind.UPDATE: streamer.update,
        Kind.UPDATE_IN_BACKWARD: streamer.update_in_backward,
    }
    move_boundary = {
        Kind.SPILL: boundaries.spill,
        Kind.PREFETCH: boundaries.prefetch,
        Kind.FORGET: boundaries.forget,
    }
    residency: Residency | None = None
    sizes: Sizes = boundaries.nbytes
    if gradients is not None:
        made, residency, sizes = gradients
        move_boundary |= {
            Kind.SPILL_GRADIENT: made.spill,
            Kind.PREFETCH_GRADIENT: made.prefetch,
            Kind.FORGET_GRADIENT: made.forget,
        }
    done: list[Action] = []

    def perform(action: Action) -> None:
        j, i = action.shard, action.microbatch
        if i is None:
            move_shard[action.kind](j)
        elif action.kind in CELLS:
            run(Cell(j, i))
        else:
            move_boundary[action.kind]((j, i))
        done.append(action)

    actions = this.actions(tape.residency, sizes, residency)
    # Boundaries are moved while a shard is visited; the visit ends before a load, an eviction or a drain.
    for j, group in itertools.groupby(_with_visits(actions), key=lambda pair: pair[0]):
        if j is None:
            for _, action in group:
                perform(action)
            continue
        with streamer.visit(j):
            with around_cells(j):
                for _, action in group:
                    perform(action)
            done += end_visit(j, perform)
    return Plan(tuple(done), streamer.slots, frozenset(this.resident), frozenset(this.pending))


def _with_visits(actions: Iterable[Action]) -> Iterator[tuple[int | None, Action]]:
    """Each action with the shard that is visited at that time; None between visits."""
    visited: int | None = None
    for action in actions:
        if action.microbatch is None:
            visited = None
        elif action.kind in CELLS:
            visited = action.shard
        yield visited, action
