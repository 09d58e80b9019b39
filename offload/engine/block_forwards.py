"""Runs a model's own forward whose blocks are the shards: block ``j`` of all chunks in one visit.

::

    for chunk i:           its forward runs to the call of block 0
    for shard j:           load shard j once; shard j+1 is being loaded
      for chunk i:         run block j on what its forward passed; its forward runs on to the call of block j+1
    for chunk i:           its forward has ended

One chunk runs in the caller's thread: each call of a block runs at once. More of them are suspended
(:mod:`offload.engine.suspend`). The graph of the code between blocks is in :mod:`offload.engine.glue`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.engine.cell import Cell, ShardRunner
from offload.engine.glue import Glue
from offload.engine.homes import MovableHomes
from offload.engine.state_before import StateBefore
from offload.engine.suspend import BlockCall, Result, SuspendedForward
from offload.engine.weight_writes import AssignedData, find_writes
from offload.streaming.shard import Shard, State
from pipe.nested import map_distinct, tensors_in

if TYPE_CHECKING:
    from offload.engine.tape import Tape

__all__ = ["BlockForwards", "Forward"]

#: The forward of a chunk, as a function of the chunk.
Forward = Callable[[Any], Any]

_Steps = Generator[tuple[Cell, Any], Any, list[Any]]


class _Local(threading.local):
    #: Runs a block that the forward in this thread calls.
    call: Callable[[int, tuple[Any, ...], Mapping[str, Any]], Any] | None = None


class BlockForwards(MovableHomes):
    """The part of an executor that runs models by their own forward."""

    shards: Sequence[Shard]
    runners: Sequence[ShardRunner]
    assigned_data: AssignedData
    #: Names of the blocks, each of which is a shard; none for a model whose layers are called in order.
    blocks: Sequence[str] = ()
    #: The parameters outside of the blocks.
    outside: Sequence[nn.Parameter] = ()
    tape: Callable[..., Tape]
    forward_steps: Callable[[Tape], _Steps]

    def __init__(self) -> None:
        super().__init__()
        self._local = _Local()
        self._within: dict[int, str] = {}
        #: By which parameters outside take gradients: the first block that a gradient enters from outside.
        self._first_entered: dict[tuple[bool, ...], int] = {}

    # --- what backward has to reach ---------------------------------------------------------------------------------

    @property
    def trains_outside(self) -> bool:
        """Whether a parameter outside of the blocks takes a gradient."""
        return any(p.requires_grad for p in self.outside)

    def first_trainable(self) -> int:
        """The first shard that backward has to reach if no input needs a gradient."""
        n = len(self.shards)
        first = next((shard.index for shard in self.shards if shard.trainable), n)
        # Parameters between blocks: known after the first forward.
        return min(first, self._first_entered.get(self._flags(), 0)) if self.trains_outside else first

    def _flags(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in self.outside)

    # --- forwards ---------------------------------------------------------------------------------------------------

    def call_block(self, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called in place of the forward of block ``j``."""
        call = self._local.call
        return self.run_alone(j, args, kwargs) if call is None else call(j, args, kwargs)

    @contextlib.contextmanager
    def _calling(self, call: Callable[[int, tuple[Any, ...], Mapping[str, Any]], Any]) -> Iterator[None]:
        before, self._local.call = self._local.call, call
        try:
            yield
        finally:
            self._local.call = before

    def _glue(self, chunks: int) -> Glue:
        if not self._within:
            self._within = {id(s.parameter): s.name for shard in self.shards for s in shard.own}
        return Glue(chunks, len(self.shards), self._within)

    def run_one(self, forward: Forward, inputs: Any) -> tuple[Tape | None, list[Any]]:
        """Runs the forward of one chunk: its tape, if a backward can follow, and its output in a list."""
        walk = _Walk(self, self._glue(1))
        before = StateBefore(self.device)
        try:
            with self._calling(walk.call):
                result = forward(walk.glue.begin(0, inputs))
            return walk.end(result)
        except BaseException as error:
            walk.fail(error)
            before.restore()
            raise

    def run_many(self, forward: Forward, chunks: Sequence[Any]) -> tuple[Tape, list[Any]]:
        """Runs the forwards of many chunks."""
        glue, n = self._glue(len(chunks)), len(self.shards)

        def suspended(i: int) -> SuspendedForward:
            def run(call: Callable[..., Any]) -> Any:
                with self._calling(call):
                    return forward(glue.begin(i, chunks[i]))

            return SuspendedForward(run, self.device)

        forwards: list[SuspendedForward] = []
        steps: _Steps | None = None
        try:
            forwards = [suspended(i) for i in range(len(chunks))]
            calls = [self._expected(each.start(), 0, glue, i) for i, each in enumerate(forwards)]
            tape = self.block_tape(glue, [(call.args, call.kwargs) for call in calls])
            del calls
            steps = self.forward_steps(tape)
            cell, output = next(steps)
            while True:
                state = forwards[cell.i].resume(self.leave(tape, cell, output))
                if cell.j + 1 < n:
                    call = self._expected(state, cell.j + 1, glue, cell.i)
                    entering = self.enter(tape, cell.i, cell.j + 1, call.args, call.kwargs)
                    del call
                elif isinstance(state, Result):
                    entering = self.finish(tape, cell.i, state.value)
                else:
                    raise self.out_of_order(state.j, n)
                del state
                following, outputs = _sent(steps, entering)
                if following is None:
                    return tape, outputs
                cell, output = following
        except BaseException as error:
            fail(steps, error)
            raise
        finally:
            for each in forwards:
                each.cancel()

    def _expected(self, state: BlockCall | Result, j: int, glue: Glue, i: int) -> BlockCall:
        if isinstance(state, Result):
            raise self.out_of_order(None, j)
        if state.j != j:
            raise self.out_of_order(state.j, j)
        if state.settings is not None:
            glue.contexts[i] = state.settings.again()
        return state

    def run_alone(self, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a block by itself, without a graph: its shard is loaded for this call."""
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if torch.is_grad_enabled() and (self.shards[j].trainable or any(x.requires_grad for x in tensors)):
            raise RuntimeError(
                f"block {self.blocks[j]} was called outside of the forward of its OffloadModel, with gradients. Call "
                f"the OffloadModel itself, or wrap the module that you call; without gradients (torch.no_grad()) a "
                f"block runs by itself"
            )
        with self._exclusive_pass():
            if not self._frozen_weights:
                self.streamer.release()
                self.assigned_data.store()
            if self.shards[j].state is State.HOME and j not in self.streamer.resident():
                if len(self.streamer.resident()) >= self.streamer.slots:
                    self.streamer.evict_one()
                self.streamer.load(j)
            with self.streamer.visit(j):
                runner = self.runners[j]
                output = map_distinct(Tensor.detach, runner.forward((args, kwargs)))
                self.streamer.store_written_weights(j, find_writes(runner.shard, compare=runner.compares_weights()))
            self.streamer.wait_for_home_reads()
        return output

    # --- one call ---------------------------------------------------------------------------------------------------

    def block_tape(self, glue: Glue, calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Tape:
        """The tape of a forward whose chunks have called the first block with these arguments."""
        entering = any(x.requires_grad for call in calls for x in _tensors(call))
        glue.records = torch.is_grad_enabled() and (
            entering or glue.begun or self.trains_outside or self.first_trainable() < len(self.shards)
        )
        stored = []
        for i, (args, kwargs) in enumerate(calls):
            if glue.records:
                self._refuse_caches(0, args, kwargs)
            stored.append(glue.enter(i, 0, args, kwargs))
        if glue.records and entering:
            self._first_entered[self._flags()] = 0
        tape = self.tape([(tuple(_tensors(call)), {}) for call in calls])
        tape.records, tape.glue, tape.inputs = glue.records, glue, glue.inputs
        for i, (value, requires) in enumerate(stored):
            tape.boundaries.put((0, i), value)
            tape.requires[Cell(0, i)] = requires
        if glue.records and not entering:
            self._first_entered.setdefault(self._flags(), len(self.shards))
        return tape

    def enter(self, tape: Tape, i: int, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What enters block ``j`` of a chunk, after the block before it has run."""
        glue = tape.glue
        assert glue is not None
        if glue.records:
            self._refuse_caches(j, args, kwargs)
        stored, requires = glue.enter(i, j, args, kwargs)
        tape.requires[Cell(j, i)] = requires
        if glue.records and any(requires):
            known = self._first_entered.get(self._flags(), len(self.shards))
            self._first_entered[self._flags()] = min(j, known)
            if j < tape.first:
                raise RuntimeError(
                    f"block {self.blocks[j]} gets an input that needs a gradient, unlike in the forwards before, so "
                    f"that blocks before it ran without a graph; run the forward again"
                )
        return stored

    def leave(self, tape: Tape, cell: Cell, output: Any) -> Any:
        """The output of a block, for the code after it."""
        assert tape.glue is not None
        if not tape.glue.records:
            return output
        run = tape.cells.get(cell)
        if run is not None and run.copies_input:
            raise RuntimeError(
                f"block {self.blocks[cell.j]} writes into its input in place, which code after it may read; let it "
                f"use an operation that does not write in place"
            )
        requires = tape.requires.pop(Cell(cell.j + 1, cell.i), [])
        tape.returned[cell] = requires
        return tape.glue.leave(cell.i, cell.j, output, requires)

    def finish(self, tape: Tape, i: int, result: Any) -> Any:
        """The detached result of a chunk."""
        assert tape.glue is not None
        if not tape.glue.records:
            return result
        detached, tape.requires[Cell(len(self.shards), i)] = tape.glue.finish(i, result)
        return detached

    def _refuse_caches(self, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A recomputation would write into the cache again."""
        for x in (*args, *kwargs.values()):
            if not isinstance(x, (Tensor, nn.Module)) and hasattr(x, "get_seq_length") and hasattr(x, "update"):
                raise ValueError(
                    f"block {self.blocks[j]} gets a cache ({type(x).__name__}) in a forward with gradients, into which "
                    f"its recomputation would write again; pass use_cache=False, or run the forward under "
                    f"torch.no_grad()"
                )

    def out_of_order(self, called: int | None, expected: int) -> RuntimeError:
        """The error for a forward that does not call the blocks in order."""
        name = "to end" if expected == len(self.blocks) else f"to call block {self.blocks[expected]}"
        what = "ended" if called is None else f"called block {self.blocks[called]}"
        return RuntimeError(
            f"expected the forward {name} next, but it {what}: with gradients each block is called once, in the order "
            f"of ``blocks``. Name the lists of blocks in the order in which the forward calls them, leave out those "
            f"that it calls several times, and turn off layers that are skipped at random (layerdrop=0)"
        )


BlockForwards.pass_codes = frozenset(
    method.__code__ for method in (BlockForwards.run_one, BlockForwards.run_many, BlockForwards.run_alone)
)


class _OutOfOrderError(Exception):
    """Ends a pass whose blocks are not called in its order."""


class _Walk:
    """The forward of one chunk in the caller's thread: blocks run when they are called."""

    def __init__(self, executor: BlockForwards, glue: Glue) -> None:
        self.glue = glue
        self._executor = executor
        self._tape: Tape | None = None
        self._steps: _Steps | None = None
        self._next = 0
        #: Whether blocks run one by one, since the forward calls them in another order.
        self._alone = False

    def call(self, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a block."""
        executor, tape = self._executor, self._tape
        if j != self._next or self._alone:
            if self._with_gradients():
                raise executor.out_of_order(j, self._next)
            self._give_up()
            return executor.run_alone(j, args, kwargs)
        if tape is None:
            self._tape = tape = executor.block_tape(self.glue, [(args, kwargs)])
            self._steps = executor.forward_steps(tape)
            del args, kwargs
            cell, output = next(self._steps)
        else:
            entering = executor.enter(tape, 0, j, args, kwargs)
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
        if self._next < len(self._executor.shards) or self._tape is None or self._steps is None:
            if self._with_gradients():
                raise self._executor.out_of_order(None, self._next)
            self._give_up()
            return None, [result]
        following, outputs = _sent(self._steps, self._executor.finish(self._tape, 0, result))
        assert following is None, "a pass with one cell too many"
        return self._tape, outputs

    def fail(self, error: BaseException) -> None:
        """Cleans up after an error anywhere in the forward."""
        fail(self._steps, error)


def _sent(steps: _Steps, entering: Any) -> tuple[tuple[Cell, Any] | None, list[Any]]:
    """The next cell and its output; or None, and the outputs of the pass, at its end.

    A function, since an interrupt at the ``try`` itself would not reach an ``except`` around it.
    """
    try:
        return steps.send(entering), []
    except StopIteration as end:
        return None, end.value


def fail(steps: _Steps | None, error: BaseException) -> None:
    """Ends a pass with an error, which the pass may have raised itself."""
    if steps is not None:
        try:
            steps.throw(error)
        except BaseException as raised:
            if raised is not error:
                raise


def _tensors(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[Tensor]:
    """The tensors among the arguments of a block, but not those inside of caches and other objects."""
    args, kwargs = call
    plain = [x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, tuple, list, dict))]
    return tensors_in(plain)
