"""Runs forward and backward of an offloaded model: cells (shard j, micro-batch i) in the order of a plan.

::

    forward    for shard j:            load shard j once; shard j+1 is being loaded
                 for micro-batch i:    boundary[j+1][i] = shard_j(boundary[j][i])      no graph; replay recorded
    backward   for shard j, reversed:  load shard j once; shard j-1 is being loaded
                 for micro-batch i:    recompute cell (j, i) from its boundary, push the gradient through it
               gradients of shard j are offloaded while shard j-1 computes

Each shard is loaded once per pass for any number of micro-batches, and a shard that is still resident at the beginning
of the other pass is not loaded again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.block_forwards import BlockForwards
from offload.engine.boundary_store import SpillingStore
from offload.engine.cell import Cell, OutputFn
from offload.engine.cell_executor import largest_rows, requires
from offload.engine.follow import Follower, ForwardActions, performers
from offload.engine.inputs import check_inputs
from offload.engine.layouts import bytes_of_boundary
from offload.engine.raw_chunk import RawChunk, versions_of
from offload.engine.reach import Reach
from offload.engine.recut import recut
from offload.engine.shape_inference import inferred_boundaries
from offload.engine.shard_cells import ShardCells
from offload.engine.since_forward import buffers_of, check_buffers, frozen, frozen_again, refuse_unrepeatable
from offload.engine.steps import joined
from offload.engine.structure import Structure
from offload.engine.tape import Tape
from offload.engine.weight_writes import AssignedData
from offload.mesh.public import PublicParameters
from offload.mesh.sharding import Sharding
from offload.planning.plan import Action, Kind
from offload.planning.planner import Pass
from offload.planning.residency import Key
from offload.policy import MemoryPolicy
from offload.storage import Tier
from offload.streaming.current_values import read_current_values
from offload.streaming.lane import CopyLanes
from offload.streaming.layer_homes import make_shards
from offload.streaming.materialize import Values, move_buffers
from offload.streaming.quantised import check_frozen
from offload.streaming.resident import resident_shard
from offload.streaming.streamer import Streamer
from offload.streaming.weight_forms import WeightForm
from offload.telemetry.statistics import Meter
from pipe.nested import flatten, tensors_in
from pipe.recompute.phase import is_recomputing

__all__ = ["Executor"]


class Executor(BlockForwards):
    """Forward and backward over the shards of one model.

    Moves the parameters of ``layers`` to their homes and the buffers to the compute device. ``cuts`` are the numbers of
    layers of each shard; ``values`` the sources of parameters and buffers that are not read from the layers.
    """

    #: Of the layers, once the model is complete.
    structure: Structure | None = None

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        cuts: Sequence[int],
        values: Mapping[Tensor, Values],
        *,
        policy: MemoryPolicy,
        budget_bytes: int | None,
        device: torch.device,
        tier: Tier,
        lanes: CopyLanes,
        meter: Meter,
        recompute: bool,
        param_dtype: torch.dtype | None,
        sharding: Sharding | None = None,
        resident: Collection[nn.Parameter] = (),
        layers_apart: bool = False,
        form: WeightForm | None = None,
        gradient_dtype: torch.dtype | None = None,
        accumulates: bool = False,
    ) -> None:
        self.resident = resident_shard(layers, set(resident), len(cuts), device)
        if self.resident is not None and self.resident.home is not None:
            meter.hold(self.resident.home.nbytes)
        named = list(layers.items())
        if sharding is None:
            self.shards, self.layer_homes = make_shards(named, cuts, tier, param_dtype, values, self.resident, form)
        else:
            self.shards, self.layer_homes = sharding.make_shards(named, cuts, tier, param_dtype, values, self.resident)
        if gradient_dtype is not None:
            self.layer_homes.round_gradients(self.shards, gradient_dtype, accumulates=accumulates)
        move_buffers(layers.values(), device)
        #: Names of the quantised parameters.
        self.quantised = {s.part_of: s.name for shard in self.shards for s in shard.own if s.part_of is not None}
        given: dict[str, Any] = {"device": device, "tier": tier, "meter": meter}
        self.streamer = Streamer(
            self.shards,
            slots=policy.slots or 2,
            lanes=lanes,
            budget_bytes=budget_bytes,
            own_slots=layers_apart and sharding is None,  # an embedding beside blocks is much larger than they are
            **given,
        )
        if sharding is not None:
            self.streamer.gradient_offload = sharding.gradient_offload(self.shards, lane=lanes.drain, **given)
        self.device = device
        self._tier = tier
        self._lanes = lanes
        self._meter = meter
        #: What the model may hold, with all bytes decided.
        self.policy = policy
        self.recompute, self.layers_apart = recompute, layers_apart
        #: Whether the model has a memory budget.
        self.strict = budget_bytes is not None
        read_current_values(self.shards)  # before the parts, which watch the parameters of modules
        self.use(self.parts_over(self.shards))
        super().__init__()
        lenders = [] if self.resident is None else [self.resident]
        self.assigned_data = AssignedData(self.shards, self.streamer.gradient_offload.optimizers.views, lenders)
        #: The parameters that users see; with a mesh, layers hold them from now on.
        self.public = PublicParameters() if sharding is None else sharding.public(self.shards)
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        #: The autograd nodes whose outputs are alive: each holds ``parameters``.
        self.nodes: weakref.WeakSet[Any] = weakref.WeakSet()

    def recut(self, cuts: Sequence[int]) -> None:
        """See :func:`offload.engine.recut.recut`."""
        recut(self, cuts)

    def waits_for_backward(self) -> bool:
        """Whether a forward still needs its backward."""
        return any(not tape.used for tape in self._tapes)

    def held_elsewhere(self, known: Counter[nn.Parameter], views: Counter[int]) -> bool:
        """See :meth:`.References.held_elsewhere`; ``known`` is without the engine's own graphs."""
        for node in self.nodes:
            known.update(p for p in node.parameters if p in known)
        return self._references.held_elsewhere(known, views)

    def check_structure(self) -> None:
        """Refuses layers and parameters that were replaced; from now on the present modules and buffers are watched."""
        if self.structure is not None and self.structure.check():
            with self.public.in_layers():
                for runner in self.runners:
                    runner.watch()

    # --- forward ------------------------------------------------------------------------------------------------

    def tape(self, chunks: Sequence[Any], output_fns: Sequence[OutputFn | None] = ()) -> Tape:
        """An empty tape for a forward over ``chunks``, each an (args, kwargs) pair with a function of its output."""
        self.check_open()
        inputs = [flatten(chunk)[0] for chunk in chunks]
        tensors = [x for leaves in inputs for x in leaves if isinstance(x, Tensor)]
        check_inputs(inputs)
        check_frozen(self.quantised)
        if not self.blocks:  # else before the forward, which may run with casts of parameters
            self.check_structure()
        self.public.take_settings()
        first = 0 if any(x.requires_grad for x in tensors) else self.first_trainable()
        rows = [largest_rows(leaves) for leaves in inputs]
        records = torch.is_grad_enabled() and (first < len(self.shards) or self.trains_outside)
        if records:
            refuse_unrepeatable(self.shards)
        elements = [sum(x.numel() for x in leaves if isinstance(x, Tensor)) for leaves in inputs]
        self.steps.begin(rows, elements, training=records, idle=not self.waits_for_backward())
        if self.steps.needs_sizes and not self.blocks and not any(isinstance(chunk, RawChunk) for chunk in chunks):
            i = max(range(len(chunks)), key=elements.__getitem__)
            sizes = inferred_boundaries([shard.layers for shard in self.shards], chunks[i], self.layer_homes.dtype)
            for j, nbytes in enumerate(sizes, 1):
                if j == len(self.shards) and any(output_fns):
                    break  # they make another output
                self.steps.record_boundary(j, rows[i], elements[i], nbytes, training=records)
        return Tape(
            executor=self,
            # Without recomputation boundaries are kept by the graphs, on the device.
            boundaries=self._store(spills=self.recompute),
            residency=self.steps.residency(),
            microbatches=len(chunks),
            records=records,
            first=first,
            frozen=frozen(self.shards) if records and self.recompute else (),
            buffers=buffers_of(self.shards) if records and self.recompute else (),
            output_fns=output_fns or [None] * len(chunks),
            inputs=inputs,
            rows=rows,
            elements=elements,
            graphs=self.steps.kept_cells(rows, first),
            cheap_recompute=self.recompute and self.steps.cheap_recompute,
            input_versions=[versions_of(leaves) for leaves in inputs],
            input_specs=[flatten(chunk)[1] for chunk in chunks],
            requires={Cell(0, i): requires(leaves) for i, leaves in enumerate(inputs)},
        )

    def forward(self, tape: Tape, chunks: Sequence[Any]) -> list[Any]:
        """Runs all chunks through all shards. Returns one detached output for each chunk."""
        try:
            next(self.forward_steps(tape))
        except StopIteration as end:
            outputs: list[Any] = end.value
            return outputs
        raise AssertionError("only a tape with glue yields")

    def forward_steps(self, tape: Tape) -> Generator[tuple[Cell, Any], Any, list[Any]]:
        """The same. If code runs between shards, yields each cell with its output for what enters the next shard."""
        n, m = len(self.shards), tape.microbatches
        measured = self._meter.overheads.in_pass("forward") if tape.records else contextlib.nullcontext()
        with self._exclusive_pass(on_failure=tape.discard), measured:
            if tape.records:
                self._meter.begin_step()
            # With shared slots a recomputation must use the weights of its forward. Otherwise homes may have been
            # written since, also in ways that no version counts.
            shared = self.streamer.slot_pool.shared
            reuses_slots = self._frozen_weights > 0 or (shared and is_recomputing())
            if not reuses_slots:
                self.streamer.release()
                self.assigned_data.store()
            this = Pass(
                shards=n,
                microbatches=m,
                slots=self.streamer.slots,
                first=tape.first,
                records=tape.records,
                kept=tape.graphs,
                resident=self.streamer.resident(),
                in_memory=self.streamer.in_place(),
                later=range(n) if reuses_slots and shared else range(n - 1, tape.first - 1, -1) if tape.records else (),
                pending=self.streamer.pending(),
                grows=self.steps.boundaries_grow,
            )
            self.public.begin_pass(this)
            outputs: list[Any] = [None] * m
            cells = ShardCells(self, self._cell_executor, self.steps)

            def run(cell: Cell) -> Generator[tuple[Cell, Any], Any, None]:
                output = yield from cells.forward(tape, cell, again=tape.needed_again(cell))
                j, i = cell.j + 1, cell.i
                if j < n:
                    nbytes = tape.boundaries.put((j, i), output if tape.glue is None else [output])
                else:
                    outputs[i] = output
                    nbytes = sum(bytes_of_boundary(x) for x in tensors_in(output))
                self.steps.record_boundary(j, tape.rows[i], tape.elements[i], nbytes, training=tape.records)

            def end_visit(j: int) -> None:
                def inputs_of(cell: Cell) -> list[Any]:
                    follower.follow(tape.residency.use(cell, this.now(*cell)))
                    entered = self._cell_executor.inputs_of(tape, cell)
                    follower.follow(tape.residency.end_use(cell))
                    return entered

                before = tape.graphs
                written = self._cell_executor.end_visit(tape, j, range(m), inputs_of)
                self.streamer.store_written_weights(j, written)
                self._cell_executor.refresh_checksums(j, written, tape)
                tape.versions[j], tape.assignments = self.shards[j].versions(), self.assigned_data.stores
                follower.done += [Action(Kind.FORWARD_KEPT, *cell) for cell in sorted(tape.graphs - before)]

            @contextlib.contextmanager
            def visit(j: int) -> Iterator[None]:
                with self.streamer.visit(j, copied=self._cell_executor.shards[j].needs_copy):
                    with self._cell_executor.storing_writes_on_failure(j, self.streamer):
                        yield
                    end_visit(j)

            follower = Follower(performers(run, self.streamer, tape.boundaries))
            planned = ForwardActions(this, tape, follower)
            yield from follower.follow_cells(planned, visit)
            tape.plan = follower.plan(planned.this)
            for output in outputs:
                leaves, spec = flatten(output)
                tape.output_specs.append(spec)
                tape.output_shapes.append([x.shape if isinstance(x, Tensor) else None for x in leaves])
            if tape.records:
                tape.first = self.first_with_graph(tape)
                self._tapes.add(tape)
                self.order_held = True
                self.streamer.wait_for_home_reads(tape.first)  # changes of the others are refused in backward
            else:
                self.steps.record_step(tape.plan, tape.rows, training=False)
                self.streamer.wait_for_home_reads()
                if not reuses_slots:  # the next pass begins with empty slots anyway
                    self.streamer.release_own_slots()
        return outputs

    # --- backward -----------------------------------------------------------------------------------------------

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
        with (
            contextlib.closing(gradients),
            self._exclusive_pass(recomputes=self.recompute),
            measured,
            frozen_again(tape.frozen),
        ):
            reuses_slots = self._frozen_weights > 0 or self.streamer.slot_pool.shared
            if tape.assignments != self.assigned_data.stores and not reuses_slots:
                # Slots were loaded by a later forward, during which parameters may have had other values.
                self.streamer.release()
            resident = self.streamer.resident()
            self.assigned_data.check_unchanged(tape)
            self._cell_executor.check_homes(tape)
            check_buffers(tape)
            waiting = sum(other is not tape and not other.used for other in self._tapes)
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
                tape.used = True  # its used boundaries are freed

            def size(key: Key) -> int:
                # Gradients of outputs are stored one by one, when the plan asks for them, so that one can be spilled
                # before the next.
                j, i = key
                if j == n:
                    given = list(output_gradients[i])
                    if tape.glue is not None:
                        given = tape.glue.from_result(i, given, consume=consume)
                    self.steps.gradient_bytes[n, tape.rows[i]] = gradients.put(key, given)
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
                    self.steps.gradient_bytes[j, tape.rows[i]] = gradients.put(cell, back)
                elif j == 0 and not reach.block:
                    input_gradients[i] = back

            def visit(j: int) -> contextlib.AbstractContextManager[object]:
                return self.streamer.visit(j, copied=shards[j].writes_weights)

            follower = Follower(performers(run, self.streamer, tape.boundaries, gradients))
            follower.follow(this.actions(tape.residency, size, self.steps.residency(gradients=True)), visit)
            if tape.plan is not None and tape.plan.in_memory == this.in_memory:
                self.steps.record_step(joined(tape.plan, follower.plan(this)), tape.rows, training=True)
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

    # --- both passes ---------------------------------------------------------------------------------------------

    def _store(self, *, spills: bool = True, gradients: bool = False) -> SpillingStore:
        """A store for boundaries, or for their gradients; a backward has both."""
        scratch = self._tier.scratch() if spills else None
        return SpillingStore(scratch, self._lanes.boundary, self._meter, gradients=gradients)


Executor.pass_codes = BlockForwards.pass_codes | {Executor.forward.__code__, Executor.backward.__code__}
