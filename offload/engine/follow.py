"""Follows a plan: what it says is done action by action, while it is being made."""

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
    """Plans a pass and does what the plan says.

    Args:
        this: what the plan depends on.
        tape: whose boundaries move.
        streamer: moves shards.
        run: runs a cell while its shard is on the compute device.
        end_visit: what is to be done before the shard leaves, after its last cell. It may perform actions of its own,
            and returns those that it has done besides.
        around_cells: a context for the cells of a shard.
        gradients: those of boundaries, in a backward; what plans which of them stay in memory; and their sizes.

    Returns:
        What was done.
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
    # Boundaries move while a shard is there; it leaves before another one comes, or its gradients go home.
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
    """Each action with the shard that is on the compute device for cells then."""
    visited: int | None = None
    for action in actions:
        if action.microbatch is None:
            visited = None
        elif action.kind in CELLS:
            visited = action.shard
        yield visited, action
