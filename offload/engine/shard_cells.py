"""Runs a cell: the layers of a shard on one micro-batch, as a whole, or block by block with the model's code between.

::

    forward     block 0  ->  its forward runs on  ->  block 1  ->  ...      what enters each block is stored, as one
                                                                            boundary of the shard
    backward    ...  ->  recompute block 1  ->  its piece of graph  ->  recompute block 0  ->  its piece of graph
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator
from typing import TYPE_CHECKING, Any

from torch import nn

from offload.engine.boundary_store import BoundaryStore
from offload.engine.cell import Cell
from offload.engine.cell_executor import CellExecutor
from offload.engine.steps import Steps

if TYPE_CHECKING:
    from offload.engine.block_forwards import BlockForwards
    from offload.engine.tape import Tape

__all__ = ["ShardCells"]


class ShardCells:
    """Runs the cells of a pass. ``cells`` runs their steps: a shard's layers, or one of its blocks."""

    def __init__(self, executor: BlockForwards, cells: CellExecutor, steps: Steps) -> None:
        self._executor = executor
        self._cells = cells
        self._steps = steps

    def forward(self, tape: Tape, cell: Cell, *, again: bool) -> Generator[tuple[Cell, Any], Any, Any]:
        """Runs a cell: what enters the next shard, or the output.

        Where code runs between blocks, yields each block with its output for what enters the next one, or for the
        result of the model. ``again``: backward needs what entered. It is stored as soon as it is known, so that a
        later change in place is seen.
        """
        glue, boundaries, (j, i) = tape.glue, tape.boundaries, cell
        entering = self._cells.inputs_of(tape, cell)
        steps = self._cells.shards[j].steps
        for step in steps:
            with self._executor.block_context(glue, Cell(step, i)):
                output = self._cells.forward(tape, Cell(step, i), entering.pop())
            if not again:
                boundaries.drop(cell)
            if glue is not None:
                output = yield Cell(step, i), output
            if step < steps[-1]:
                assert glue is not None
                if again:
                    nbytes = boundaries.extend(cell, [output])
                    self._steps.record_boundary(j, tape.rows[i], nbytes)
                entering.append(glue.entered(i, output))
        return output

    def backward(
        self,
        tape: Tape,
        cell: Cell,
        gradients: BoundaryStore,
        *,
        kept: bool,
        consume: bool,
        only: Collection[nn.Parameter] | None,
        to_boundary: bool,
        first: int,
    ) -> list[Any]:
        """Backward of a cell: the gradients of what entered it, or its block number ``first``.

        ``gradients`` of the output are dropped after use, and with ``consume`` so is what entered. ``kept``: the cell
        kept its graph. The others: see :meth:`.CellExecutor.backward`.
        """
        glue, (j, i) = tape.glue, cell
        steps = self._cells.shards[j].steps
        given: list[Any] = gradients.get((j + 1, i))
        entered = [None] * len(steps) if kept else self._cells.inputs_of(tape, cell)
        begin = max(first, steps[0])
        for step in range(steps[-1], begin - 1, -1):
            with contextlib.nullcontext() if glue is None else glue.as_then(Cell(step, i), consume=consume):
                given = self._cells.backward(
                    tape,
                    Cell(step, i),
                    entered.pop(),
                    given,
                    consume=consume,
                    only=only,
                    to_boundary=to_boundary or step > steps[0],
                )
            if step == steps[-1]:
                gradients.drop((j + 1, i))
            if step == begin and consume:
                tape.boundaries.drop(cell)
            if glue is not None:
                given = glue.before(i, step, given, consume=consume)
        return given
