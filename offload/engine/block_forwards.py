"""Runs a model's own forward whose blocks make the shards: the blocks of a shard for all chunks in one visit.

::

    for chunk i:           its forward runs to the call of block 0
    for shard j:           load shard j once; shard j+1 is being loaded
      for chunk i:         run a block on what its forward passed; its forward runs on to the call of the next block;
                           and so on for all blocks of the shard
    for chunk i:           its forward has ended

One chunk runs in the caller's thread: each call of a block runs at once (:mod:`offload.engine.block_walk`). More of
them are suspended (:mod:`offload.engine.suspended_walk`). The graph of the code between blocks is in
:mod:`offload.engine.glue`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.engine.block_walk import BlockWalk, CellSteps
from offload.engine.cell import Cell
from offload.engine.glue import Glue
from offload.engine.homes import MovableHomes
from offload.engine.layouts import bytes_of_boundary
from offload.engine.leaf_gradients import LeafBytes
from offload.engine.outside import outside_bytes
from offload.engine.own_attributes import AttributesThen
from offload.engine.state_before import StateBefore
from offload.engine.suspended_walk import SuspendedWalk
from offload.engine.weight_writes import AssignedData, find_writes
from offload.planning.peak_memory import OutsideBytes
from offload.streaming.shard import Shard
from pipe.nested import map_distinct, tensors_in

if TYPE_CHECKING:
    from offload.engine.tape import Tape

__all__ = ["BlockForwards", "Forward", "tensors_of_call"]

#: The forward of a chunk, as a function of the chunk.
Forward = Callable[[Any], Any]


class _Local(threading.local):
    #: Runs a block that the forward in this thread calls.
    call: Callable[[int, tuple[Any, ...], Mapping[str, Any]], Any] | None = None


class BlockForwards(MovableHomes):
    """The part of an executor that runs models by their own forward."""

    shards: list[Shard]
    assigned_data: AssignedData
    #: Names of the blocks in the order of calls; none for a model whose layers are called in order.
    blocks: Sequence[str] = ()
    #: Those of them that are blocks because memory is too small for them to stay.
    rest: Sequence[str] = ()
    #: The place of each block in that order, by its number in the order of ``blocks=``.
    places: Sequence[int] = ()
    #: Whether that order does not change any more: see :mod:`offload.engine.call_order`.
    order_held = False
    #: The parameters outside of the blocks.
    outside: Sequence[nn.Parameter] = ()
    #: Whether those are cast in forwards.
    casts_outside = False
    #: The modules outside of the blocks. Weak references, since the model refers to its executor.
    around: Sequence[weakref.ref[nn.Module]] = ()
    tape: Callable[..., Tape]
    forward_steps: Callable[[Tape], CellSteps]

    def __init__(self) -> None:
        super().__init__()
        self._local = _Local()
        self._within: dict[int, str] = {}
        #: By place of a block: its attributes when it ran last.
        self.attributes_then: dict[int, AttributesThen] = {}
        #: By which parameters outside take gradients: the first block that a gradient enters from outside.
        self.first_entered: dict[tuple[bool, ...], int] = {}
        #: Of the gradients of parameters outside in the last backward.
        self.leaf_gradients: LeafBytes = {}

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
        return min(first, self.first_entered.get(self._flags(), 0)) if self.trains_outside else first

    def modules_outside(self) -> list[nn.Module]:
        """The modules outside of the blocks."""
        return [module for each in self.around if (module := each()) is not None]

    def outside_bytes(self) -> OutsideBytes:
        """Bytes on the compute device that belong to no shard."""
        return outside_bytes(
            self.modules_outside(),
            self.outside,
            self.resident,
            self.shards,
            dtype=self.layer_homes.dtype,
            made=self.leaf_gradients,
            states=self.streamer.gradient_offload.optimizers.resident_state_bytes(),
        )

    def _flags(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in self.outside)

    # --- forwards ---------------------------------------------------------------------------------------------------

    def renumber_cells(self) -> None:
        """Called when runners were put in another order, and their shards have other numbers. Idempotent."""
        self._cell_executor.renumber()

    def call_block(self, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called in place of the forward of block number ``j``."""
        call = self._local.call
        return self.run_alone(j, args, kwargs) if call is None else call(j, args, kwargs)

    @contextlib.contextmanager
    def calling(self, call: Callable[[int, tuple[Any, ...], Mapping[str, Any]], Any]) -> Iterator[None]:
        """A context in which ``call`` runs the blocks that a forward in this thread calls."""
        before, self._local.call = self._local.call, call
        try:
            yield
        finally:
            self._local.call = before

    def _glue(self, chunks: int) -> Glue:
        if not self._within:
            for s in itertools.chain.from_iterable(shard.own for shard in self.shards):
                for key, name in self.public.names(s).items():
                    self._within[key] = name + self.why_it_streams([n for n in self.rest if name.startswith(f"{n}.")])
        made, before = self.leaf_gradients, self._meter.begin_code_before
        follows_outside = not (self.public.sharded or self.casts_outside)
        return Glue(chunks, len(self.blocks), self._within, made, before, self.outside, follows_outside=follows_outside)

    def run_one(self, forward: Forward, inputs: Any) -> tuple[Tape | None, list[Any]]:
        """Runs the forward of one chunk: its tape, if a backward can follow, and its output in a list."""
        walk = BlockWalk(self, self._glue(1))
        before = StateBefore(self.device)
        try:
            with self.calling(walk.call):
                result = forward(walk.glue.begin(0, inputs))
            return walk.end(result)
        except BaseException as error:
            walk.fail(error)
            before.restore()
            raise

    def run_many(self, forward: Forward, chunks: Sequence[Any]) -> tuple[Tape, list[Any]]:
        """Runs the forwards of many chunks."""
        return SuspendedWalk(self, self._glue(len(chunks)), forward, chunks).run()

    def run_alone(self, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs block number ``j`` by itself, without a graph: its shard is loaded for this call."""
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        runner, block = self.runners[self.places[j]], self.blocks[self.places[j]]
        j = runner.shard.index
        if torch.is_grad_enabled() and (runner.shard.trainable or any(x.requires_grad for x in tensors)):
            raise RuntimeError(
                f"block {block} was called outside of the forward of its OffloadModel, with gradients. Call "
                f"the OffloadModel itself, or wrap the module that is called (the trainers of trl call model.model: "
                f"model.model = OffloadModel(model.model, ...)); without gradients (torch.no_grad()) a block runs by "
                f"itself"
            )
        runner.gets_copies = False
        with self._exclusive_pass():
            if not self._frozen_weights:
                self.streamer.release()
                self.assigned_data.store()
            resident = self.streamer.resident()
            self.public.begin_block(str(block), f"in-slots:{sorted(resident)}".replace(" ", ""))
            if j not in resident and not self.shards[j].in_place:
                if len(resident) >= self.streamer.slots:
                    self.streamer.evict_one()
                self.streamer.load(j)
            with self.streamer.visit(j, copied=runner.needs_copy):
                output = map_distinct(Tensor.detach, runner.forward((args, kwargs)))
                self.streamer.store_written_weights(j, find_writes(runner.shard, compare=runner.compares_weights()))
            self.streamer.wait_for_home_reads()
        return output

    # --- one call ---------------------------------------------------------------------------------------------------

    def block_tape(
        self, glue: Glue, calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]], grads: Sequence[bool]
    ) -> Tape:
        """The tape of a forward whose chunks have called the first block with these arguments.

        ``grads``: whether each did so with gradients; the forward may have begun otherwise.
        """
        with_gradients = itertools.compress(calls, grads)
        entering = any(x.requires_grad for call in with_gradients for x in tensors_of_call(call))
        glue.records = (glue.records or any(grads)) and (
            entering or glue.begun or self.trains_outside or self.first_trainable() < len(self.shards)
        )
        stored = []
        for i, ((args, kwargs), grad) in enumerate(zip(calls, grads, strict=True)):
            if glue.records:
                self._refuse_caches(0, args, kwargs)
            stored.append(glue.enter(i, 0, (args, kwargs), grad=grad))
        if glue.records and entering:
            self.first_entered[self._flags()] = 0
        with torch.set_grad_enabled(glue.records):
            tape = self.tape([(tuple(tensors_of_call(call)), {}) for call in calls])
        tape.graphless.update(Cell(0, i) for i, grad in enumerate(grads) if not grad)
        tape.records, tape.glue, tape.inputs = glue.records, glue, glue.inputs
        for i, (value, requires) in enumerate(stored):
            self.steps.record_around("entered", tape.rows[i], tape.boundaries.put((0, i), [value]))
            tape.requires[Cell(0, i)] = requires
        if glue.records and not entering:
            self.first_entered.setdefault(self._flags(), len(self.shards))
        return tape

    def enter(self, tape: Tape, i: int, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad: bool) -> Any:
        """What enters block ``j`` of a chunk, after the block before it has run; ``grad``: called with gradients."""
        glue = tape.glue
        assert glue is not None
        if glue.records:
            self._refuse_caches(j, args, kwargs)
        elif grad and (
            self.runners[j].shard.trainable or any(x.requires_grad for x in tensors_of_call((args, kwargs)))
        ):
            raise RuntimeError(
                f"block {self.blocks[j]} takes part in gradients, unlike all blocks and parameters when this forward "
                f"called its first block, so that nothing was recorded; enable gradients around the whole forward"
            )
        stored, requires = glue.enter(i, j, (args, kwargs), grad=grad)
        if not grad:
            tape.graphless.add(Cell(j, i))
        tape.requires[Cell(j, i)] = requires
        if glue.records and any(requires):
            shard = self.runners[j].shard.index
            known = self.first_entered.get(self._flags(), len(self.shards))
            self.first_entered[self._flags()] = min(shard, known)
            if shard < tape.first:
                raise RuntimeError(
                    f"block {self.blocks[j]} gets an input that needs a gradient, unlike in the forwards before, so "
                    f"that blocks before it ran without a graph; run the forward again"
                )
        return stored

    @contextlib.contextmanager
    def block_context(self, glue: Glue | None, cell: Cell) -> Iterator[None]:
        """The context in which a block runs in forward: as the code that called it has left the settings."""
        if glue is None:
            yield
            return
        with glue.context(cell.i):
            if glue.records:
                then = self.attributes_then.get(cell.j)
                if then is None or not then.unchanged:
                    then = self.attributes_then[cell.j] = AttributesThen(
                        list(self.runners[cell.j].modules[0].modules())
                    )
                    self.runners[cell.j].watched.find_generators()
                glue.attributes[cell] = then
            yield

    def leave(self, tape: Tape, cell: Cell, output: Any) -> Any:
        """The output of a block, for the code after it."""
        assert tape.glue is not None
        if not tape.glue.records:
            return output
        if cell.j + 1 == len(self.blocks):
            self.steps.record_around("returned", tape.rows[cell.i], sum(map(bytes_of_boundary, tensors_in(output))))
        if self.runners[cell.j].others:  # a gradient enters there, as that of an argument does
            shard = self.runners[cell.j].shard.index
            self.first_entered[self._flags()] = min(shard, self.first_entered.get(self._flags(), shard))
        layers = self.runners[cell.j].layers
        if layers.inputs.writes(layers.modes):
            raise RuntimeError(
                f"block {self.blocks[cell.j]} writes into its input in place, which code after it may read; let it "
                f"use an operation that does not write in place"
            )
        requires = tape.requires.pop(Cell(cell.j + 1, cell.i), [])
        tape.returned[cell] = requires
        return tape.glue.leave(cell.i, cell.j, output, requires)

    def first_with_graph(self, tape: Tape) -> int:
        """The first shard that backward has to reach, when it is known which blocks were called without gradients."""
        for each in self._cell_executor.shards[tape.first :] if tape.graphless else ():
            if any(Cell(step, i) not in tape.graphless for step in each.steps for i in range(tape.microbatches)):
                return each.shard.index
        return len(self.shards) if tape.graphless else tape.first

    def finish(self, tape: Tape, i: int, result: Any) -> Any:
        """The detached result of a chunk."""
        assert tape.glue is not None
        if not tape.glue.records:
            return result
        detached, tape.requires[Cell(len(self.blocks), i)] = tape.glue.finish(i, result)
        return detached

    def _refuse_caches(self, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A recomputation would write into the cache again."""
        for x in (*args, *kwargs.values()):
            if not isinstance(x, (Tensor, nn.Module)) and hasattr(x, "get_seq_length") and hasattr(x, "update"):
                raise ValueError(
                    f"block {self.blocks[j]} gets a cache ({type(x).__name__}) in a forward with gradients, into which "
                    f"its recomputation would write again; pass use_cache=False (config.use_cache = False, where the "
                    f"model does not take that), or run the forward under torch.no_grad()"
                )

    @staticmethod
    def why_it_streams(names: Sequence[str]) -> str:
        """Words for an error: why modules ``names``, which the user did not name, stream, and how to keep them."""
        if not names:
            return ""
        patterns = [f"{name}.*" for name in names]
        what = f"{', '.join(names)} stream since memory= is too small for them to stay"
        return f" ({what}; resident={patterns} keeps them on the compute device, with more memory)"


BlockForwards.pass_codes = frozenset(
    method.__code__ for method in (BlockForwards.run_one, BlockForwards.run_many, BlockForwards.run_alone)
)


def tensors_of_call(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[Tensor]:
    """The tensors among the arguments of a call, but not those inside of caches and other objects."""
    args, kwargs = call
    plain = [x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, tuple, list, dict))]
    return tensors_in(plain)
