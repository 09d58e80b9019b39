"""Runs forward and backward of an offloaded model: cells (shard j, micro-batch i) in the order of a plan.

::

    forward    for shard j:            load shard j once; shard j+1 is being loaded
                 for micro-batch i:    boundary[j+1][i] = shard_j(boundary[j][i])      no graph; replay recorded
    backward   for shard j, reversed:  load shard j once; shard j-1 is being loaded
                 for micro-batch i:    recompute cell (j, i) from its boundary, push the gradient through it
               gradients of shard j are offloaded while shard j-1 computes

Each shard is loaded once per pass for any number of micro-batches, and a shard that is still resident at the beginning
of the other pass is not loaded again.

After an exception in either pass no copy is running, parameters are views of their homes, and the model can be used
again; gradients that were stored before stay, as in a backward of plain torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.boundary_store import SpillingStore
from offload.engine.cell import Cell, OutputFn, ShardRunner
from offload.engine.cell_executor import CellExecutor, largest_rows, requires, versions_of
from offload.engine.follow import Follower
from offload.engine.layouts import bytes_of_boundary, refuse_hidden, refuse_strided_nested
from offload.engine.raw_chunk import RawChunk
from offload.engine.references import References
from offload.engine.shape_inference import inferred_boundaries
from offload.engine.state_before import StateBefore
from offload.engine.steps import Steps, joined
from offload.engine.structure import Structure
from offload.engine.tape import Tape
from offload.planning.plan import CELLS, Action, Kind, Plan
from offload.planning.planner import Pass
from offload.planning.residency import Key
from offload.storage import Tier
from offload.streaming.lane import Lanes
from offload.streaming.shard import Shard
from offload.streaming.streamer import Streamer
from offload.telemetry.statistics import Meter
from pipe.nested import flatten, tensors_in
from pipe.process import check_process
from pipe.recompute.phase import is_recomputing
from pipe.torch_private import transform_under_way

__all__ = ["Executor"]


class Executor:
    """Forward and backward over the shards of one model."""

    #: Whether the model was closed.
    closed = False
    #: Of the layers, once the model is complete.
    structure: Structure | None = None

    def __init__(
        self,
        shards: list[Shard],
        layer_names: list[list[str]],
        *,
        device: torch.device,
        tier: Tier,
        lanes: Lanes,
        meter: Meter,
        slots: int,
        boundary_bytes: int,
        recompute: bool,
        graph_bytes: int = 0,
        param_dtype: torch.dtype | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        self.shards = shards
        self.streamer = Streamer(
            shards, slots=slots, device=device, tier=tier, lanes=lanes, meter=meter, budget_bytes=budget_bytes
        )
        self.runners = [ShardRunner(shard, names, device) for shard, names in zip(shards, layer_names, strict=True)]
        self._cell_executor = CellExecutor(
            self.runners, device=device, meter=meter, recompute=recompute, param_dtype=param_dtype
        )
        self.device = device
        self._tier = tier
        self._lanes = lanes
        self._meter = meter
        self.boundary_bytes = boundary_bytes
        self._recompute = recompute
        self._param_dtype = param_dtype
        #: Makes plans, and keeps those that ran.
        self.steps = Steps(
            self.runners,
            boundary_bytes=boundary_bytes,
            recompute=recompute,
            graph_bytes=graph_bytes,
            strict=budget_bytes is not None,
            spills=tier.scratch() is not None,
            on_host=device.type == "cpu",
        )
        for runner in self.runners:
            runner.measures_graphs = recompute and graph_bytes > 0
        self._references = References(shards, (p for runner in self.runners for _, p in runner.watched.parameters))
        #: Whether a pass is running, or was interrupted before its cleanup.
        self._busy = False
        self._made_in = os.getpid()
        this = weakref.ref(self)  # without it, a cycle with the streamer

        def in_pass() -> bool:
            executor = this()
            return executor is not None and executor.busy

        def clean_up() -> None:
            executor = this()
            if executor is not None:
                executor.clean_up()

        self.streamer.in_pass, self.streamer.clean_up = in_pass, clean_up
        self._frozen_weights = 0
        #: Number of calls that stored assigned data, and the last of them for each parameter, by identity.
        self._assignments = 0
        self._assigned_at: dict[int, int] = {}
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        #: The autograd nodes whose outputs are alive: each holds ``parameters``.
        self.nodes: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def busy(self) -> bool:
        """Whether a forward or backward is running."""
        return self._busy and self._passes() > 0

    def _passes(self) -> int:
        """Number of running forwards and backwards of this model, in all threads."""
        count = 0
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None:
                if frame.f_code in _PASSES and frame.f_locals.get("self") is self:
                    count += 1
                frame = frame.f_back
        return count

    def held_elsewhere(self, known: Counter[nn.Parameter], views: Counter[int]) -> bool:
        """See :meth:`.References.held_elsewhere`; ``known`` is without the engine's own graphs."""
        for node in self.nodes:
            known.update(p for p in node.parameters if p in known)
        return self._references.held_elsewhere(known, views)

    def bytes_at_home(self) -> int:
        """Bytes of stored parameters and gradients."""
        return sum(b.nbytes for shard in self.shards for b in (shard.home, shard.gradients) if b is not None)

    def store_assigned_data(self) -> None:
        """Copies tensors assigned to the ``.data`` of parameters since the last pass into their homes.

        Raises:
            ValueError: if such a tensor has another size or dtype than its parameter had.
        """
        assigned = [(shard, s, s.parameter.detach()) for shard in self.shards for s in shard.assigned()]
        if len(assigned) > 1:
            # Parameters may have exchanged their data. Without the copies, one would be overwritten before it is read.
            homes = {shard.home.tensor.untyped_storage().data_ptr() for shard in self.shards if shard.home is not None}
            assigned = [
                (shard, s, value.clone() if value.untyped_storage().data_ptr() in homes else value)
                for shard, s, value in assigned
            ]
        self._assignments += 1
        for shard, s, value in assigned:
            # Without incrementing the version: a graph outside of the model that uses the parameter stays valid.
            self._assigned_at[id(s.parameter)] = self._assignments
            shard.store_assigned_data(s, value)

    @contextlib.contextmanager
    def frozen_weights(self) -> Iterator[None]:
        """A context in which parameters do not change: forwards reuse the shards that are in slots."""
        if not self._frozen_weights:
            self.streamer.release()
        self._frozen_weights += 1
        try:
            yield
        finally:
            self._frozen_weights -= 1

    def prefetch(self, *, backward: bool) -> None:
        """Begins to load the first shards of the next pass, unless a pass is running."""
        if not self._busy:
            self.streamer.prefetch(self.streamer.backward_order if backward else range(len(self.shards)))

    # --- forward ------------------------------------------------------------------------------------------------

    def tape(self, chunks: Sequence[Any], output_fns: Sequence[OutputFn | None] = ()) -> Tape:
        """An empty tape for a forward over ``chunks``, each an (args, kwargs) pair with a function of its output."""
        self._check_open()
        inputs = [flatten(chunk)[0] for chunk in chunks]
        transform = transform_under_way(x for leaves in inputs for x in leaves if isinstance(x, Tensor))
        if transform is not None:
            raise RuntimeError(
                f"an OffloadModel cannot run inside {transform}: its weights are in memory only while their shard "
                f"runs, which only backward() supports; transform, export or trace the bare module"
            )
        for x in (x for leaves in inputs for x in leaves if isinstance(x, Tensor)):
            refuse_strided_nested(x, "an input of the model")
        for leaves in inputs:
            refuse_hidden(leaves, "an input of the model")
        if self.structure is not None and self.structure.check():
            for runner in self.runners:
                runner.watch()
        input_requires_grad = any(isinstance(x, Tensor) and x.requires_grad for leaves in inputs for x in leaves)
        first = 0 if input_requires_grad else next((s.index for s in self.shards if s.trainable), len(self.shards))
        rows = [largest_rows(leaves) for leaves in inputs]
        records = torch.is_grad_enabled() and first < len(self.shards)
        elements = [sum(x.numel() for x in leaves if isinstance(x, Tensor)) for leaves in inputs]
        self.steps.check_input(elements, training=records)
        if self.steps.needs_sizes and not any(isinstance(chunk, RawChunk) for chunk in chunks):
            i = max(range(len(chunks)), key=elements.__getitem__)
            args, kwargs = chunks[i]
            sizes = inferred_boundaries([shard.layers for shard in self.shards], args, kwargs, self._param_dtype)
            for j, nbytes in enumerate(sizes, 1):
                if j == len(self.shards) and any(output_fns):
                    break  # they make another output
                self.steps.record_boundary(j, rows[i], elements[i], nbytes, training=records)
        return Tape(
            executor=self,
            # Without recomputation boundaries are kept by the graphs, on the device.
            boundaries=self._store(spills=self._recompute),
            residency=self.steps.residency(),
            microbatches=len(chunks),
            records=records,
            first=first,
            output_fns=output_fns or [None] * len(chunks),
            inputs=inputs,
            rows=rows,
            elements=elements,
            graphs=self.steps.kept_cells(rows, first),
            input_versions=[versions_of(leaves) for leaves in inputs],
            input_specs=[flatten(chunk)[1] for chunk in chunks],
            requires={Cell(0, i): requires(leaves) for i, leaves in enumerate(inputs)},
        )

    def forward(self, tape: Tape, chunks: Sequence[Any]) -> list[Any]:
        """Runs all chunks through all shards. Returns one detached output for each chunk."""
        n, m = len(self.shards), tape.microbatches
        with self._exclusive_pass(on_failure=tape.discard):
            if tape.records:
                self._meter.begin_step()
            # With shared slots a recomputation must use the weights of its forward. Otherwise homes may have been
            # written since, also in ways that no version counts.
            shared = self.streamer.slot_pool.shared
            reuses_slots = self._frozen_weights > 0 or (shared and is_recomputing())
            if not reuses_slots:
                self.streamer.release()
                self.store_assigned_data()
            this = Pass(
                shards=n,
                microbatches=m,
                slots=self.streamer.slots,
                first=tape.first,
                records=tape.records,
                kept=tape.graphs,
                resident=self.streamer.resident(),
                later=range(n) if reuses_slots and shared else range(n - 1, tape.first - 1, -1) if tape.records else (),
                pending=self.streamer.pending(),
            )
            outputs: list[Any] = [None] * m

            def run(cell: Cell) -> None:
                output = self._cell_executor.forward(tape, cell, self._cell_executor.input_of(tape, cell))
                if not this.needed_again(*cell):
                    tape.boundaries.drop(cell)
                j, i = cell.j + 1, cell.i
                if j < n:
                    nbytes = tape.boundaries.put((j, i), output)
                else:
                    outputs[i] = output
                    nbytes = sum(bytes_of_boundary(x) for x in tensors_in(output))
                self.steps.record_boundary(j, tape.rows[i], tape.elements[i], nbytes, training=tape.records)

            def end_visit(j: int) -> None:
                def input_of(cell: Cell) -> Any:
                    for action in tape.residency.use(cell, this.now(*cell)):
                        follower.perform(action)
                    entered = self._cell_executor.input_of(tape, cell)
                    for action in tape.residency.end_use(cell):
                        follower.perform(action)
                    return entered

                before = tape.graphs
                written = self._cell_executor.end_visit(tape, j, range(m), input_of)
                self.streamer.store_written_weights(j, written)
                self._cell_executor.refresh_checksums(j, written)
                tape.versions[j], tape.assignments = self.shards[j].versions(), self._assignments
                follower.done += [Action(Kind.FORWARD_KEPT, *cell) for cell in sorted(tape.graphs - before)]

            @contextlib.contextmanager
            def visit(j: int) -> Iterator[None]:
                with self.streamer.visit(j):
                    with self._cell_executor.storing_writes_on_failure(j, self.streamer):
                        yield
                    end_visit(j)

            follower = Follower(self._performers(run, tape.boundaries))
            follower.follow(this.actions(tape.residency, tape.boundaries.nbytes), visit)
            tape.plan = self._plan(this, follower)
            for output in outputs:
                leaves, spec = flatten(output)
                tape.output_specs.append(spec)
                tape.output_shapes.append([x.shape if isinstance(x, Tensor) else None for x in leaves])
            if tape.records:
                self._tapes.add(tape)
                self.streamer.wait_for_home_reads(tape.first)  # changes of the others are refused in backward
            else:
                self.steps.record_step(tape.plan, tape.rows, training=False)
                self.streamer.wait_for_home_reads()
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
        """Propagates gradients of the outputs (flat, for each chunk) back through all shards.

        Args:
            tape: of the forward.
            output_gradients: for each chunk, a tensor or None for each leaf of its output.
            consume: free each boundary after its use; False where the tape may be used again.
            accumulate: whether gradients of parameters are added to ``.grad``; else only those of ``returned`` are
                computed.
            returned: parameters whose gradients are returned instead.
            to_inputs: whether gradients of the inputs are needed if ``accumulate`` is False.

        Returns:
            For each chunk, a gradient or None for each leaf of its input; and the gradients of ``returned``, stored
            where their homes are.
        """
        self._check_open()
        n, m = len(self.shards), tape.microbatches
        gradients = self._store(gradients=True)
        input_gradients: list[list[Any]] = [[None] * len(leaves) for leaves in tape.inputs]
        with contextlib.closing(gradients), self._exclusive_pass(recomputes=self._recompute):
            reuses_slots = self._frozen_weights > 0 or self.streamer.slot_pool.shared
            if tape.assignments != self._assignments and not reuses_slots:
                # Slots were loaded by a later forward, during which parameters may have had other values.
                self.streamer.release()
            resident = self.streamer.resident()
            self._cell_executor.check_unchanged(tape, self.shards, self._assigned_at)
            self._cell_executor.check_homes(tape)
            waiting = sum(other is not tape and not other.used for other in self._tapes)
            gradient_offload = self.streamer.gradient_offload
            updates = gradient_offload.begin(waiting, returned, only_those=not accumulate)
            only = None if accumulate else frozenset(returned)
            # Shards that no requested gradient needs are skipped, as in autograd: their hooks must not run.
            requested = [
                shard.index for shard in self.shards if only is not None and not only.isdisjoint(shard.parameters)
            ]
            first = tape.first if only is None or to_inputs else min(requested, default=n)
            this = Pass(
                shards=n,
                microbatches=m,
                slots=self.streamer.slots,
                backward=True,
                first=first,
                kept=tape.graphs,
                resident=resident,
                later=range(n - 1, tape.first - 1, -1) if reuses_slots else (),
                pending=self.streamer.pending(),
                updates=updates,
                consume=consume,
            )
            if consume:
                tape.used = True  # its used boundaries are freed

            def size(key: Key) -> int:
                # Gradients of outputs are stored one by one, when the plan asks for them, so that one can be spilled
                # before the next.
                j, i = key
                if j == n:
                    self.steps.gradient_bytes[n, tape.rows[i]] = gradients.put(key, list(output_gradients[i]))
                return gradients.nbytes(key)

            def run(cell: Cell) -> None:
                j, i = cell
                given = gradients.get((j + 1, i))
                boundary = None if this.keeps(j, i) else self._cell_executor.input_of(tape, cell)
                to_boundary = accumulate or to_inputs or j > first
                back = self._cell_executor.backward(
                    tape, cell, boundary, given, consume=consume, only=only, to_boundary=to_boundary
                )
                gradients.drop((j + 1, i))
                if consume:
                    tape.boundaries.drop(cell)
                if j > first:
                    self.steps.gradient_bytes[j, tape.rows[i]] = gradients.put(cell, back)
                elif j == 0:
                    input_gradients[i] = back

            follower = Follower(self._performers(run, tape.boundaries, gradients))
            follower.follow(
                this.actions(tape.residency, size, self.steps.residency(gradients=True)), self.streamer.visit
            )
            if tape.plan is not None:
                self.steps.record_step(joined(tape.plan, self._plan(this, follower)), tape.rows, training=True)
                tape.plan = None  # a second backward begins with other shards in slots
            self.streamer.gradient_offload.wait_idle()
            taken = gradient_offload.pop_returned()
            # The next micro-batch reuses the slots; else the next forward begins with empty ones anyway.
            if not reuses_slots:
                self.streamer.wait_for_home_reads()
                self.streamer.release()
        if reuses_slots and not self._frozen_weights:
            self.streamer.slot_pool.prefetch_previous(self.streamer)
        return input_gradients, taken

    # --- both passes ---------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this OffloadModel was closed and cannot run; make a new one")

    @contextlib.contextmanager
    def _exclusive_pass(
        self, on_failure: Callable[[], None] | None = None, *, recomputes: bool = False
    ) -> Iterator[None]:
        """Runs one pass at a time; after a failure no copy is running and parameters are views of their homes.

        A failure is an exception at any line, such as Ctrl-C. If it interrupts the cleanup itself, the next pass begins
        with that cleanup.
        """
        check_process(self._made_in, "this OffloadModel")
        if self._busy and self._passes() > 1:  # one is the caller
            raise RuntimeError(
                "this OffloadModel is in the middle of a forward or backward; a layer or a hook of it called it again, "
                "or another thread did"
            )
        before = StateBefore(self.device, (runner.watched for runner in self.runners) if recomputes else ())
        with self.streamer.slot_pool.turn(self.streamer):
            try:
                if self._busy or self.streamer.must_cancel:
                    self._cancel()
                if self.streamer.finish_step is not None:
                    self.streamer.finish_step()
                self._busy = True
                yield
                self._busy = False
            except BaseException:
                before.restore()
                self._cancel()
                if on_failure is not None:
                    on_failure()
                raise

    def clean_up(self) -> None:
        """Cleans up after a pass that was interrupted before its cleanup, if there is one."""
        if self._busy and not self._passes():
            self._cancel()

    def _cancel(self) -> None:
        self.streamer.cancel()
        self._busy = False

    def _store(self, *, spills: bool = True, gradients: bool = False) -> SpillingStore:
        """A store for boundaries, or for their gradients; a backward has both."""
        scratch = self._tier.scratch() if spills else None
        return SpillingStore(scratch, self._lanes.boundary, self._meter, gradients=gradients)

    def _performers(
        self, run: Callable[[Cell], None], boundaries: SpillingStore, gradients: SpillingStore | None = None
    ) -> dict[Kind, Callable[[Any], None]]:
        """What performs each action of a pass; ``run`` performs those of cells."""
        performers: dict[Kind, Callable[[Any], None]] = dict.fromkeys(CELLS, run)
        performers |= {
            Kind.LOAD: self.streamer.load,
            Kind.EVICT: self.streamer.evict,
            Kind.DRAIN: self.streamer.drain,
            Kind.UPDATE: self.streamer.update,
            Kind.UPDATE_IN_BACKWARD: self.streamer.update_in_backward,
            Kind.SPILL: boundaries.spill,
            Kind.PREFETCH: boundaries.prefetch,
            Kind.FORGET: boundaries.forget,
        }
        if gradients is not None:
            performers |= {
                Kind.SPILL_GRADIENT: gradients.spill,
                Kind.PREFETCH_GRADIENT: gradients.prefetch,
                Kind.FORGET_GRADIENT: gradients.forget,
            }
        return performers

    def _plan(self, this: Pass, follower: Follower) -> Plan:
        """The plan of a pass that ran."""
        return Plan(tuple(follower.done), self.streamer.slots, frozenset(this.resident), frozenset(this.pending))


#: The functions whose frames are running passes.
_PASSES: frozenset[CodeType] = frozenset({Executor.forward.__code__, Executor.backward.__code__})
