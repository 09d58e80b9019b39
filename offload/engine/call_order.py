"""Follows the order in which a model's forward calls its blocks: noted on the first forward, held from then on.

Loads are planned before a forward begins, so an order is expected: at first that of ``blocks=``. Where a forward calls
another block than the expected one, that block moves up, and the plan of the loads that remain is made again::

    expected    a0 a1 a2 b0 b1 b2
    called      a0 b0                   b0 moves up:    a0 b0 a1 a2 b1 b2
                a0 b0 a1 b1             b1 moves up:    a0 b0 a1 b1 a2 b2

The first forward with gradients that ends decides: its order is held, since a backward and all later plans use it.

A shard moves up with all of its blocks. It gets another number, and nothing else: its home, its place in a slot, its
updates and what was measured of it stay. A shard that was prefetched too early stays in its slot, unless the plan needs
that slot sooner.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.engine.block_forwards import BlockForwards
    from offload.engine.cell import ShardRunner
    from offload.engine.tape import Tape

__all__ = ["comes_next", "out_of_order"]


def comes_next(executor: BlockForwards, position: int, number: int, tape: Tape | None, *, records: bool) -> bool:
    """Whether a block is the one at ``position`` of the order of calls; it moves there if it may.

    To be called once for each position in a forward.

    Args:
        executor, position: of the blocks.
        number: of the block that is called.
        tape: of the running forward, if any block ran.
        records: whether that is, or will be, for a backward.
    """
    sharded = executor.public.sharded
    if sharded and records and not executor.order_held:
        executor.public.compare_calls(position, executor.blocks[executor.places[number]])
    if executor.places[number] == position:
        return True
    if position == len(executor.blocks) or (sharded and not records) or _why_not(executor, position, number):
        return False
    _move_up(executor, position, number, tape)
    return True


def out_of_order(executor: BlockForwards, number: int | None, position: int, *, records: bool = True) -> RuntimeError:
    """The error for a forward that calls block ``number``, or ends (None), where the one at ``position`` is due.

    ``records``: whether it is for a backward; else it has several chunks.
    """
    blocks, what, why = executor.blocks, "ended", ""
    name = "to end" if position == len(blocks) else f"to call block {blocks[position]}"
    if number is not None:
        what = f"called block {blocks[executor.places[number]]}"
        why = _why_not(executor, position, number) or "unlike the first chunk of this forward"
    when = "with gradients" if records else "with several micro-batches or chunks"
    free = "under torch.no_grad()" if records else "with one micro-batch"
    return RuntimeError(
        f"expected the forward {name} next, but it {what}{why and f' ({why})'}: {when} each block is called once, in "
        f"the order of the first forward, by which loads are planned. Leave lists that the forward calls several times "
        f"out of ``blocks``, and turn off layers that are skipped at random (layerdrop=0); {free} blocks may be called "
        f"in any order{executor.why_it_streams(executor.rest)}"
    )


def _why_not(executor: BlockForwards, position: int, number: int) -> str:
    """Why block ``number`` cannot become the one at ``position``; empty if it can."""
    place = executor.places[number]
    if place < position:
        return "it was called before"
    if executor.order_held:
        return "the first forward with gradients called them in another order"
    here, there = executor.runners[position].shard, executor.runners[place].shard
    if here is not there and position and executor.runners[position - 1].shard is here:
        return (
            f"the blocks of a shard are called one after the other, and {executor.blocks[position]} is in the shard of "
            f"{executor.blocks[position - 1]} (num_slices={len(executor.shards)}): leave out num_slices"
        )
    return ""


def _move_up(executor: BlockForwards, position: int, number: int, tape: Tape | None) -> None:
    """Makes block ``number`` the one at ``position``, where :func:`_why_not` allows it.

    ``tape``: of the running forward, whose cells before that position ran or are running. An interrupt changes nothing,
    or all of it.
    """
    executor.refuse_other_passes()
    commit = _prepare(executor, position, executor.places[number], tape)
    try:
        commit()
    except BaseException:
        commit()  # an interrupt: everything is made, and the rest cannot fail
        raise


def _prepare(executor: BlockForwards, position: int, place: int, tape: Tape | None) -> Callable[[], None]:
    before, shards = list(executor.runners), list(executor.shards)
    block = before[place]
    here = before[position].shard.index
    mine = [block]
    if block.shard.index != here:
        mine += [runner for runner in before[position:] if runner.shard is block.shard and runner is not block]
    runners = [*before[:position], *mine, *(runner for runner in before[position:] if runner not in mine)]
    ordered = list(dict.fromkeys(runner.shard for runner in runners))
    moved = {shard.index: k for k, shard in enumerate(ordered) if shard.index != k}
    names, places = _names(executor, before, runners)
    firsts = [0, *itertools.accumulate(len(shard.layers) for shard in ordered)]
    attributes = {j: then for j, then in executor.attributes_then.items() if j < position}
    entered = {flags: j for flags, j in executor.first_entered.items() if j < here or not moved}
    renumber_streamer = executor.streamer.prepare_renumbering(moved)
    renumber_meter = executor.meter.prepare_renumbering(moved)
    moves = [] if tape is None else [*tape.moved, *([moved] if moved else [])]
    assert len(ordered) == len(shards)

    def commit() -> None:
        for k, shard in enumerate(ordered):
            shard.index, shard.first = k, firsts[k]
        executor.shards[:], executor.runners[:] = ordered, runners
        executor.blocks, executor.places = names, places
        executor.attributes_then, executor.first_entered = attributes, entered
        executor.renumber_cells()
        renumber_streamer()
        renumber_meter()
        if moved:
            executor.steps.forget_boundaries(here)
        if tape is not None and moved:
            tape.moved = moves
            if tape.first >= here:
                tape.first = max(here, executor.first_trainable())
            kept = {cell for cell in executor.steps.kept_cells(tape.rows, tape.first) if cell.j >= here}
            tape.graphs = kept | {cell for cell in tape.graphs if cell[0] < here}

    return commit


def _names(executor: BlockForwards, before: list[ShardRunner], after: list[ShardRunner]) -> tuple[list[str], list[int]]:
    """The names of the blocks in their new order; and the new place of each by its number."""
    old: Mapping[ShardRunner, int] = {runner: k for k, runner in enumerate(before)}
    new: Mapping[ShardRunner, int] = {runner: k for k, runner in enumerate(after)}
    names = [executor.blocks[old[runner]] for runner in after]
    return names, [new[before[place]] for place in executor.places]
