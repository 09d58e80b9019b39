"""Runs the forward of one chunk in the caller's thread: each block runs at once when the forward calls it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from offload.engine.call_order import comes_next, out_of_order
from offload.engine.cell import Cell
from offload.engine.glue import Glue

if TYPE_CHECKING:
    from offload.engine.block_forwards import BlockForwards
    from offload.engine.tape import Tape

__all__ = ["BlockWalk", "CellSteps", "fail", "next_cell"]

#: A pass: yields each cell with its output, and is sent what enters the next shard.
CellSteps = Generator[tuple[Cell, Any], Any, list[Any]]


class _OutOfOrderError(Exception):
    """Ends a pass whose blocks are not called in its order."""


class BlockWalk:
    """The forward of one chunk in the caller's thread: blocks run when they are called."""

    def __init__(self, executor: BlockForwards, glue: Glue) -> None:
        self.glue = glue
        self._executor = executor
        self._tape: Tape | None = None
        self._steps: CellSteps | None = None
        self._next = 0
        #: Whether blocks run one by one, since the forward calls them in another order.
        self._alone = False

    def call(self, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs block number ``j``."""
        executor, tape = self._executor, self._tape
        if self._alone or not comes_next(executor, self._next, j, tape, records=self._with_gradients()):
            if self._with_gradients():
                raise out_of_order(executor, j, self._next)
            self._give_up()
            return executor.run_alone(j, args, kwargs)
        if tape is None:
            self._tape = tape = executor.block_tape(self.glue, [(args, kwargs)], [torch.is_grad_enabled()])
            self._steps = executor.forward_steps(tape)
            del args, kwargs
            cell, output = next(self._steps)
        else:
            entering = executor.enter(tape, 0, self._next, args, kwargs, grad=torch.is_grad_enabled())
            del args, kwargs
            assert self._steps is not None
            cell, output = self._steps.send(entering)
        self._next += 1
        return executor.leave(tape, cell, output)

    def _with_gradients(self) -> bool:
        return self.glue.records if self._tape is not None else torch.is_grad_enabled()

    def _give_up(self) -> None:
        self._alone = True
        # Not close(): a pass that a GeneratorExit ends is taken for one that an interrupt has ended before.
        fail(self._steps, _OutOfOrderError())

    def end(self, result: Any) -> tuple[Tape | None, list[Any]]:
        """The tape and the output, after the forward."""
        if self._next < len(self._executor.blocks) or self._tape is None or self._steps is None:
            if self._with_gradients():
                raise out_of_order(self._executor, None, self._next)
            self._give_up()
            return None, [result]
        following, outputs = next_cell(self._steps, self._executor.finish(self._tape, 0, result))
        assert following is None, "a pass with one cell too many"
        return self._tape, outputs

    def fail(self, error: BaseException) -> None:
        """Cleans up after an error anywhere in the forward."""
        fail(self._steps, error)


def next_cell(steps: CellSteps, entering: Any) -> tuple[tuple[Cell, Any] | None, list[Any]]:
    """Sends a pass what enters its next shard; returns its next cell and output, or None and all outputs at its end.

    A function, since an interrupt at the ``try`` itself would not reach an ``except`` around it.
    """
    try:
        return steps.send(entering), []
    except StopIteration as end:
        return None, end.value


def fail(steps: CellSteps | None, error: BaseException) -> None:
    """Throws an error into a pass, so that it cleans up; the pass may have raised that error itself."""
    if steps is not None:
        try:
            steps.throw(error)
        except BaseException as raised:
            if raised is not error:
                raise
