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
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.backward_passes import BackwardPasses
from offload.engine.cell import Cell, OutputFn
from offload.engine.cell_executor import requires
from offload.engine.follow import Follower, ForwardActions, performers
from offload.engine.inputs import check_inputs
from offload.engine.layouts import bytes_of_boundary
from offload.engine.raw_chunk import versions_of
from offload.engine.references import References
from offload.engine.row_units import RowUnits, largest_rows, rounded_up
from offload.engine.shard_cells import ShardCells
from offload.engine.since_forward import buffers_of, frozen, refuse_unrepeatable
from offload.engine.structure import Structure
from offload.engine.tape import Tape, TapeState
from offload.engine.weight_writes import AssignedData
from offload.mesh.public import PublicParameters
from offload.mesh.sharding import Sharding
from offload.planning.plan import Action, Kind
from offload.planning.planner import Pass
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
from pipe.freed import Living
from pipe.nested import flatten, tensors_in
from pipe.recompute.phase import is_recomputing

__all__ = ["Executor"]


class Executor(BackwardPasses):
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
            own_slots=layers_apart,  # an embedding beside blocks is much larger than they are
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
        read_current_values(self.shards, self.streamer)  # before the parts, which watch the parameters of modules
        self.use(self.parts_over(self.shards))
        super().__init__()
        lenders = [] if self.resident is None else [self.resident]
        self.assigned_data = AssignedData(self.shards, self.streamer.gradient_offload.optimizers.views, lenders)
        #: The parameters that users see; with a mesh, layers hold them from now on.
        self.public = PublicParameters() if sharding is None else sharding.public(self.shards)
        self._tapes: Living[TapeState] = Living()
        self.row_units = RowUnits()

    def recount(self) -> None:
        """Counts the engine's own references to parameters anew."""
        stored = [s.parameter for layer in self.layer_homes.places for s in layer]
        watched = [p for runner in self.runners for _, p in runner.watched.parameters]
        self._references = References(self.shards, [*stored, *watched, *self.held_by_engine()])

    def waits_for_backward(self) -> bool:
        """Whether a forward still needs its backward."""
        return any(not tape.used for tape in self._tapes)

    def held_elsewhere(self, known: Counter[nn.Parameter], views: Counter[int]) -> bool:
        """See :meth:`.References.held_elsewhere`; ``known`` is without the engine's own graphs."""
        for tape in self._tapes:
            known.update(p for p in tape.parameters if p in known)
        return self._references.held_elsewhere(known, views)

    def check_structure(self) -> None:
        """Refuses layers and parameters that were replaced; from now on the present modules and buffers are watched."""
        if self.structure is not None and self.structure.check():
            with self.public.in_layers():
                for runner in self.runners:
                    runner.watch()
        for runner in self.runners:
            runner.watched.find_generators()

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
        rows = [self.row_units.count(leaves) for leaves in inputs]
        rounded = [rounded_up(units, largest_rows(leaves)) for units, leaves in zip(rows, inputs, strict=True)]
        records = torch.is_grad_enabled() and (first < len(self.shards) or self.trains_outside)
        if records:
            refuse_unrepeatable(self.shards)
        idle = not self.waits_for_backward()
        planned = self.steps.begin(rows, rounded, training=records, idle=idle)
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
            planned=planned,
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
        """As :meth:`forward`; where code runs between shards, yields each cell and its output for the next input."""
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
                self.steps.record_boundary(j, tape.rows[i], nbytes)

            def end_visit(j: int) -> None:
                def inputs_of(cell: Cell) -> list[Any]:
                    follower.follow(tape.residency.use(cell, this.now(*cell)))
                    entered = self._cell_executor.inputs_of(tape, cell)
                    follower.follow(tape.residency.end_use(cell))
                    return entered

                before = tape.graphs
                written = self._cell_executor.end_visit(tape, j, range(m), inputs_of)
                self.streamer.store_written_weights(j, written)
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
                self._tapes.add(tape.life, tape.state)
                self.order_held = True
                self.streamer.wait_for_home_reads(tape.first)  # changes of the others are refused in backward
            else:
                self.steps.record_step(tape.plan, tape.rows, tape.planned, training=False)
                self.streamer.wait_for_home_reads()
                if not reuses_slots:  # the next pass begins with empty slots anyway
                    self.streamer.release_own_slots()
        return outputs


Executor.pass_codes = BackwardPasses.pass_codes | {Executor.forward.__code__}
