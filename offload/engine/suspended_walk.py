"""Runs the forwards of many chunks: each is suspended where it calls a block, which then runs for all of them at once.

The first chunk comes to each block before the others, which have to call the blocks in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from offload.engine.block_walk import CellSteps, fail, next_cell
from offload.engine.call_order import comes_next, out_of_order
from offload.engine.glue import Glue
from offload.engine.own_attributes import OwnAttributes
from offload.engine.suspend import BlockCall, Result, SuspendedForward

if TYPE_CHECKING:
    from offload.engine.block_forwards import BlockForwards, Forward
    from offload.engine.tape import Tape

__all__ = ["SuspendedWalk"]


class SuspendedWalk:
    """The forwards of many chunks, each in a thread of its own."""

    def __init__(self, executor: BlockForwards, glue: Glue, forward: Forward, chunks: Sequence[Any]) -> None:
        self._executor = executor
        self._glue = glue
        self._forward = forward
        self._chunks = chunks
        self._own = OwnAttributes(len(chunks))
        self._outside = executor.modules_outside()
        #: The modules of each block.
        self._inside = {runner: list(runner.modules[0].modules()) for runner in executor.runners}
        self._tape: Tape | None = None

    def run(self) -> tuple[Tape, list[Any]]:
        """Runs all of them: the tape, and the outputs."""
        executor, own, n = self._executor, self._own, len(self._executor.blocks)
        everywhere = [*self._outside, *itertools.chain(*self._inside.values())]
        forwards: list[SuspendedForward] = []
        steps: CellSteps | None = None
        try:
            forwards = [self._suspended(i) for i in range(len(self._chunks))]
            calls = []
            for i, each in enumerate(forwards):
                with own.running(i, everywhere):
                    state = each.start()
                calls.append(self._expected(i, 0, state))
            self._tape = tape = executor.block_tape(
                self._glue, [(call.args, call.kwargs) for call in calls], [call.settings.grad for call in calls]
            )
            del calls, state
            steps = executor.forward_steps(tape)
            cell, output = next(steps)
            while True:
                left = executor.leave(tape, cell, output)
                with own.running(cell.i, self._outside):
                    state = forwards[cell.i].resume(left)
                del left, output
                if cell.j + 1 < n:
                    call = self._expected(cell.i, cell.j + 1, state)
                    grad = call.settings.grad
                    entering = executor.enter(tape, cell.i, cell.j + 1, call.args, call.kwargs, grad=grad)
                    del call
                elif isinstance(state, Result):
                    entering = executor.finish(tape, cell.i, state.value)
                else:
                    raise out_of_order(executor, state.j, n, records=self._glue.records)
                del state
                following, outputs = next_cell(steps, entering)
                if following is None:
                    return tape, outputs
                cell, output = following
        except BaseException as error:
            fail(steps, error)
            raise
        finally:
            for each in forwards:
                each.cancel()

    def _suspended(self, i: int) -> SuspendedForward:
        def run(call: Callable[..., Any]) -> Any:
            with self._executor.calling(call):
                return self._forward(self._glue.begin(i, self._chunks[i]))

        return SuspendedForward(run, self._executor.device)

    def _expected(self, i: int, j: int, state: BlockCall | Result) -> BlockCall:
        """The call of block ``j`` by a chunk, which raises if the chunk did anything else."""
        executor, records = self._executor, self._glue.records
        if i == 0 and isinstance(state, BlockCall):
            comes_next(executor, j, state.j, self._tape, records=records)
        if isinstance(state, Result):
            raise out_of_order(executor, None, j, records=records)
        if executor.places[state.j] != j:
            raise out_of_order(executor, state.j, j, records=records)
        self._glue.contexts[i] = _as_called(state, self._own.running(i, self._inside[executor.runners[j]]))
        return state


@contextlib.contextmanager
def _as_called(call: BlockCall, attributes: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """A context with the settings and attributes that the call of a block was made with."""
    with attributes, call.settings.again():
        yield
