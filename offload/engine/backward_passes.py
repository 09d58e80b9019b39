"""Runs the backward of an offloaded model: gradients go through the cells from the last shard to the first.

The picture is in :mod:`offload.engine.executor`. A cell is recomputed from its boundary, or its kept graph is used; the
gradients of a shard are offloaded while the shard before it computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from offload.engine.block_forwards import BlockForwards
from offload.engine.boundary_store import SpillingStore
from offload.engine.cell import Cell
from offload.engine.follow import Follower, performers
from offload.engine.reach import Reach
from offload.engine.shard_cells import ShardCells
from offload.engine.since_forward import check_buffers, frozen_again
from offload.engine.steps import joined
from offload.engine.tape import Tape, TapeState
from offload.planning.planner import Pass
from offload.planning.residency import Key
from offload.streaming.lane import CopyLanes
from pipe.freed import Living

__all__ = ["BackwardPasses"]


class BackwardPasses(BlockForwards):
    """The part of an executor that runs backwards."""

    _lanes: CopyLanes
    #: Of forwards whose backward may follow.
    _tapes: Living[TapeState]

    def trainable(self, first: int) -> list[nn.Parameter]:
        """The parameters that take a gradient in a backward down to shard ``first``, each once."""
        used = (parameter for shard in self.shards[first:] for parameter in shard.parameters)
        return [parameter for parameter in dict.fromkeys(used) if parameter.requires_grad]

    def backward(
        self,
        tape: Tape,
        output_gradients: Sequence[Sequence[Any]],
        *,
        consume: bool,
        accumulate: bool = True,
        returned: Collection[nn.Parameter] = (),
        to_inputs: bool = True,
    ) -> tuple[list[list[Any]], dict[nn.Parameter, Tensor]]:
        """Propagates gradients of the outputs back through all shards.

        Args:
            tape, output_gradients: of the forward; for each chunk, a tensor or None for each leaf of its output.
            consume: free each boundary after its use; False where the tape may be used again.
            accumulate: add gradients of parameters to ``.grad``; else only those of ``returned`` are computed.
            returned: parameters whose gradients are returned instead, stored where their homes are.
            to_inputs: whether gradients of the inputs are needed if ``accumulate`` is False.

        Returns gradients of the inputs, like ``output_gradients``, and those of ``returned``.
        """
        self.check_open()
        n, m = len(self.shards), tape.microbatches
        gradients = self._store(gradients=True)
        input_gradients: list[list[Any]] = [[None] * len(leaves) for leaves in tape.inputs]
        measured = self._meter.overheads.in_pass("backward")
        running = self._exclusive_pass(recomputes=self.recompute)
        with contextlib.closing(gradients), running, measured, frozen_again(tape.frozen):
            reuses_slots = self._frozen_weights > 0 or self.streamer.slot_pool.shared
            if tape.assignments != self.assigned_data.stores and not reuses_slots:
                # Slots were loaded by a later forward, during which parameters may have had other values.
                self.streamer.release()
            resident = self.streamer.resident()
            self.assigned_data.check_unchanged(tape)
            check_buffers(tape)
            waiting = sum(other is not tape.state and not other.used for other in self._tapes)
            gradient_offload = self.streamer.gradient_offload
            only = None if accumulate else frozenset(returned)
            shards = self._cell_executor.shards
            reach = Reach.of(shards, tape.first, tape.glue, only, to_inputs=to_inputs)
            updates = gradient_offload.begin(waiting, returned, drop_others=not accumulate)
            this = Pass(
                shards=n,
                microbatches=m,
                slots=self.streamer.slots,
                backward=True,
                first=reach.shard,
                kept=tape.graphs,
                resident=resident,
                in_memory=self.streamer.in_place(),
                later=range(n - 1, tape.first - 1, -1) if reuses_slots else (),
                pending=self.streamer.pending(),
                updates=updates,
                consume=consume,
            )
            self.public.begin_pass(this, stores=accumulate)
            cells = ShardCells(self, self._cell_executor, self.steps)
            if consume:
                tape.state.used = True  # its used boundaries are freed

            def size(key: Key) -> int:
                # Gradients of outputs are stored one by one, when the plan asks for them, so that one can be spilled
                # before the next.
                j, i = key
                if j == n:
                    given = list(output_gradients[i])
                    if tape.glue is not None:
                        given = tape.glue.from_result(i, given, consume=consume)
                    self.steps.record_gradient(n, tape.rows[i], gradients.put(key, given))
                return gradients.nbytes(key)

            def run(cell: Cell) -> None:
                j, i = cell
                back = cells.backward(
                    tape,
                    cell,
                    gradients,
                    kept=this.keeps(j, i),
                    consume=consume,
                    only=only,
                    to_boundary=reach.needs_input(j, shards[j].steps),
                    first=reach.block,
                )
                if j > reach.shard:
                    self.steps.record_gradient(j, tape.rows[i], gradients.put(cell, back))
                elif j == 0 and not reach.block:
                    input_gradients[i] = back

            def visit(j: int) -> contextlib.AbstractContextManager[object]:
                return self.streamer.visit(j, copied=shards[j].writes_weights)

            follower = Follower(performers(run, self.streamer, tape.boundaries, gradients))
            follower.follow(this.actions(tape.residency, size, self.steps.residency(gradients=True)), visit)
            if tape.plan is not None and tape.plan.in_memory == this.in_memory:
                self.steps.record_step(joined(tape.plan, follower.plan(this)), tape.rows, tape.planned, training=True)
                tape.plan = None  # a second backward begins with other shards in slots
            self.streamer.gradient_offload.wait_idle()
            if tape.glue is not None and reach.shard > 0:  # inputs that code after those shards has used
                input_gradients = [tape.glue.of_inputs(i) for i in range(m)]
            taken = gradient_offload.pop_returned() | ({} if tape.glue is None else tape.glue.take())
            taken = self.public.store_replicated(taken) if accumulate else taken
            # The next micro-batch reuses the slots; else the next forward begins with empty ones anyway.
            if not reuses_slots:
                self.streamer.wait_for_home_reads()
                self.streamer.release()
        if reuses_slots and not self._frozen_weights:
            self.streamer.slot_pool.prefetch_previous(self.streamer)
        return input_gradients, taken

    def _store(self, *, spills: bool = True, gradients: bool = False) -> SpillingStore:
        """A store for the boundaries of a forward, or for their gradients; a backward has both."""
        scratch = self._tier.scratch() if spills else None
        return SpillingStore(scratch, self._lanes.boundary, self._meter, gradients=gradients)


BackwardPasses.pass_codes = BlockForwards.pass_codes | {BackwardPasses.backward.__code__}
