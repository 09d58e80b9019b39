"""Runs the cells of a tape: forward records what backward needs, backward recomputes the cell or uses its kept graph.

===============  ====================================  ==========================================================
memory mode      forward records                       backward
===============  ====================================  ==========================================================
recompute        its replay; the boundary is stored    runs the cell again from its boundary, with a graph
keep the graph   the graph, weights by reference       uses the graph
no backward      nothing (before the first shard that  does not reach the cell
                 takes part, or without gradients)
===============  ====================================  ==========================================================

Both modes compute with the same values: an input or parameter that was changed in between raises an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.cell import Cell, OutputFn, ShardRunner
from offload.engine.cell_input import CellInput
from offload.engine.layouts import fitting
from offload.engine.raw_chunk import LazyInput, versions_of
from offload.engine.saved_tensors import MemoryProfileRecorder, weights_by_reference
from offload.engine.shard_runners import ShardRunners
from offload.engine.tape import CellRecords, KeptCell, Tape
from offload.engine.weight_writes import (
    differs_from_home,
    find_writes,
    has_values,
    set_values,
    values_at_home,
    values_in_slot,
)
from offload.planning.memory_profile import MemoryProfile, SavedTensor
from offload.streaming.shard import Shard
from offload.streaming.streamer import Streamer
from offload.telemetry.statistics import Meter
from pipe.nested import flatten, map_distinct, unflatten
from pipe.torch_private.autograd import hidden_hooks

__all__ = ["CellExecutor", "requires"]


class CellExecutor:
    """Runs the cells of a model's tapes: cells are recomputed, except those in ``graphs`` of a tape."""

    def __init__(
        self,
        runners: Sequence[ShardRunner],
        *,
        device: torch.device,
        meter: Meter,
        param_dtype: torch.dtype | None,
    ) -> None:
        self._runners = runners
        #: By shard.
        self.shards = ShardRunners.by_shard(runners)
        self._device = device
        self._meter = meter
        self._param_dtype = param_dtype

    def renumber(self) -> None:
        """Updates the numbers of shards after runners were put in another order. Idempotent."""
        self.shards[:] = ShardRunners.by_shard(self._runners)

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(self, tape: CellRecords, cell: Cell, boundary: Any) -> Any:
        """The detached output of a cell, or of a step of it; records in the tape what its backward needs."""
        runner = self._runners[cell.j]
        output_fn = self._output_fn(tape, cell)
        j = runner.shard.index
        keeps = tape.records and j >= tape.first and (j, cell.i) in tape.graphs
        with self._metered("K" if keeps else "F", cell, tape.rows[cell.i]):
            runner.gets_copies = tape.glue is not None and tape.records
            if not tape.records or j < tape.first or cell in tape.graphless:
                return map_distinct(Tensor.detach, runner.forward(boundary, output_fn))
            source, value = _source(tape, cell, boundary)
            rows = tape.rows[cell.i]
            saved_tensors: Sequence[SavedTensor] | None
            if not keeps:
                output, tape.cells[cell] = runner.forward_recorded(value, output_fn)
                saved_tensors = runner.saved_tensors
                if runner.graph_bytes is not None:
                    runner.graph_bytes_per_row = runner.graph_bytes / (rows or 1)
            else:
                output, saved_tensors = runner.forward_with_graph(
                    value, output_fn, cheap_recompute=tape.cheap_recompute
                )
                tape.kept[cell] = KeptCell(source, *flatten(output))
            if saved_tensors is not None:
                continues = cell.j > self.shards[j].steps[0]
                self._meter.record_memory_profile(
                    j, MemoryProfile(rows, saved_tensors), keeps=keeps, continues=continues
                )
            leaves = flatten(output)[0]
            if tape.glue is not None:
                reaches = runner.check_graph(source, leaves, tape.glue.flags)
                tape.glue.note_outside_use(cell.i, cell.j, runner.other_parameters, reaches=reaches)
            tape.requires[Cell(cell.j + 1, cell.i)] = requires(leaves)
            return map_distinct(Tensor.detach, output)

    def _metered(self, kind: str, step: Cell, rows: float) -> contextlib.AbstractContextManager[None]:
        """Counts the time of a cell, or of a step of it."""
        runners = self.shards[self._runners[step.j].shard.index]
        steps = runners.steps[::-1] if kind in "BG" else runners.steps
        return self._meter.cell(kind, runners.shard.index, step.i, rows, step=steps.index(step.j), steps=len(steps))

    def end_visit(
        self, tape: Tape, j: int, microbatches: Sequence[int], inputs_of: Callable[[Cell], list[Any]]
    ) -> list[int]:
        """Returns the positions of the parameters that layers wrote, after all forward cells of a shard's visit.

        Where a recomputation would write other values than the cells did, their graphs are kept. For that the cells run
        again; ``inputs_of`` returns the inputs of the steps of a cell once more.
        """
        runners = self.shards[j]
        shard = runners.shard
        in_place = shard.bound_in_place
        compare = not in_place and runners.compares_weights()
        written = find_writes(shard, compare=compare)
        if written:
            entered: dict[Cell, Any] = {}
            for i in microbatches:
                steps = [Cell(step, i) for step in runners.steps]
                if any(step in tape.cells for step in steps):
                    found = zip(steps, inputs_of(Cell(j, i)), strict=True)
                    entered.update((step, value) for step, value in found if step in tape.cells)
            for step, runner in zip(runners.steps, runners.runners, strict=True):
                runner.writes_weights = True
                recorded = [cell for cell in entered if cell.j == step]
                if recorded and runner.repeats_writes is None:
                    runner.repeats_writes = self._repeats_writes(tape, recorded[0], entered[recorded[0]])
            if entered and not runners.repeats_writes and in_place:
                raise RuntimeError(
                    f"the layers of shard {j} wrote their own parameters while they ran, for the first time after "
                    f"forwards in which they did not, and a recomputation would write other values; discard this "
                    f"forward, restore the parameters and run it again: the shard is copied before each use from now "
                    f"on. Or use checkpoint_activation=False"
                )
            if entered and not runners.repeats_writes:
                set_values(shard, values_at_home(shard))  # the values before this visit
                for cell, boundary in entered.items():
                    self._run_again_with_graph(tape, cell, boundary)
        return written

    @contextlib.contextmanager
    def storing_writes_on_failure(self, j: int, streamer: Streamer) -> Iterator[None]:
        """A context for the forward cells of a visit: if a layer fails, earlier writes into parameters are stored.

        So they are as durable as writes into buffers. An interrupt counts as a failure of the layers.
        """
        runners = self.shards[j]
        runners.begin()
        try:
            yield
        except BaseException as error:
            if runners.failed or not isinstance(error, Exception):
                with contextlib.suppress(Exception):  # the first error counts
                    written = find_writes(runners.shard, compare=True)
                    streamer.store_written_weights(j, written)
            raise

    def _repeats_writes(self, tape: Tape, cell: Cell, boundary: Any) -> bool:
        """Whether a recomputation of a cell whose forward wrote parameters leaves them unchanged."""
        runner = self._runners[cell.j]
        after = values_in_slot(runner.shard)
        with torch.no_grad():
            runner.recompute(_source(tape, cell, boundary)[1], tape.cells[cell], self._output_fn(tape, cell))
        same = has_values(runner.shard, after)
        set_values(runner.shard, after)
        return same

    def _run_again_with_graph(self, tape: Tape, cell: Cell, boundary: Any) -> None:
        """Repeats a recorded forward and keeps its graph, so that backward need not recompute it."""
        runner = self._runners[cell.j]
        source, value = _source(tape, cell, boundary)
        recorder = MemoryProfileRecorder(runner.shard)
        with weights_by_reference(runner.shard, recorder):
            output = runner.repeat(value, tape.cells.pop(cell), self._output_fn(tape, cell))
        tape.kept[cell] = KeptCell(source, *flatten(output))
        tape.graphs |= {Cell(runner.shard.index, cell.i)}

    # --- backward -----------------------------------------------------------------------------------------------

    def backward(
        self,
        tape: CellRecords,
        cell: Cell,
        boundary: Any,
        given: Sequence[Any],
        *,
        consume: bool,
        only: Collection[nn.Parameter] | None = None,
        to_boundary: bool = True,
    ) -> list[Any]:
        """Propagates ``given``, gradients or None of a cell's flat output, to the flat ``boundary``.

        ``consume`` frees a kept graph, which needs no ``boundary``. ``only`` these parameters take gradients (None: all
        that require one), and with it the boundary only if ``to_boundary``.
        """
        runner = self._runners[cell.j]
        j = runner.shard.index
        keeps_graph = (j, cell.i) in tape.graphs
        kind = "G" if keeps_graph else "B"
        with self._metered(kind, cell, tape.rows[cell.i]), runner.until_backward() as until:
            if cell in tape.graphless:
                return [None] * len(tape.requires[cell])
            if not keeps_graph:
                source, value = _source(tape, cell, boundary)
                outputs = flatten(runner.recompute(value, tape.cells[cell], self._output_fn(tape, cell), until))[0]
                _check_same(tape, cell, outputs)
                if runner.shard.bound_in_place and runner.shard.versions() != tape.versions[j]:
                    raise RuntimeError(
                        f"the layers of shard {j} wrote their own parameters while they were recomputed, unlike "
                        f"in their forward; the writes stay. Use checkpoint_activation=False"
                    )
                if runner.writes_weights and differs_from_home(runner.shard):
                    raise RuntimeError(
                        f"the layers of shard {j} write their own parameters while they run, and the "
                        f"recomputation wrote other values than the forward, unlike in the first step; use "
                        f"checkpoint_activation=False"
                    )
            else:
                kept = tape.kept[cell]
                source, outputs = kept.source, kept.outputs
                if consume:
                    del tape.kept[cell]
            # Gradients of outputs that take none (an integer, a constant) are dropped.
            pairs = [
                (y, fitting(g, y))
                for y, g in zip(outputs, given, strict=True)
                if isinstance(y, Tensor) and y.requires_grad and g is not None
            ]
            roots, gradients = [y for y, _ in pairs], [g for _, g in pairs]
            # A kept graph belongs to the tape, which autograd frees unless the user's graph is retained.
            retain = keeps_graph and not consume
            back: list[Tensor | None] = [None] * len(source.leaves)
            if roots and only is None:
                with source.expecting():
                    runner.push_back(roots, gradients, retain_graph=retain)
                back = source.take()
            elif roots:
                entered = source if to_boundary else None
                back = self._take(runner.shard, roots, gradients, entered, only or (), retain) or back
            # Writes of a layer into its own weights (an embedding with max_norm) count once, in forward.
            runner.shard.written |= runner.shard.versions() != tape.versions[j]
            runner.shard.set_versions(tape.versions[j])
            return back

    def repeat(self, tape: CellRecords, cell: Cell, boundary: Any) -> Any:
        """The detached output of a cell that ran forward before: runs it again without a graph."""
        with torch.no_grad():
            output = tape.cells[cell].repeat(self._runners[cell.j].call(self._output_fn(tape, cell)), boundary)
        return map_distinct(Tensor.detach, output)

    @staticmethod
    def _take(
        shard: Shard,
        roots: list[Tensor],
        gradients: list[Any],
        source: CellInput | None,
        only: Collection[nn.Parameter],
        retain: bool,
    ) -> list[Tensor | None] | None:
        """Propagates gradients to the boundary, if ``source`` is given, and to some parameters only."""
        wanted = [] if source is None else source.wanted
        parameters = [p for p in dict.fromkeys(shard.parameters) if p in only]
        if not wanted and not parameters:
            return None
        with hidden_hooks(parameters):
            found = torch.autograd.grad(
                roots, [*wanted, *parameters], gradients, retain_graph=retain, allow_unused=True
            )
        for p, gradient in zip(parameters, found[len(wanted) :], strict=True):
            if gradient is not None:
                p.grad = gradient if p.grad is None else p.grad + gradient
        shard.widen_gradients()
        return None if source is None else source.take(found[: len(wanted)])

    # --- inputs and checks of changes -----------------------------------------------------------------------------

    def inputs_of(self, tape: CellRecords, cell: Cell) -> list[Any]:
        """The inputs of the steps of a cell, as far as they ran forward."""
        if tape.glue is None:
            return [self.input_of(tape, cell)]
        return [tape.glue.entered(cell.i, stored) for stored in tape.boundaries.get(cell)]

    def input_of(self, tape: CellRecords, cell: Cell) -> Any:
        """The input of a cell. The boundaries of the first shard are the user's inputs, which are not copied."""
        if cell.j > 0 or cell in tape.boundaries:
            return tape.boundaries.get(cell)
        leaves = tape.inputs[cell.i]
        if versions_of(leaves) != tape.input_versions[cell.i]:
            raise RuntimeError(
                f"an input of the model (micro-batch {cell.i}) was changed in place between the forward and its "
                f"backward; clone it before changing it"
            )
        if len(leaves) == 1 and isinstance(leaves[0], LazyInput):
            return leaves[0].entering(self._brought)
        moved = [self._brought(x) if isinstance(x, Tensor) else x for x in leaves]
        return unflatten(moved, tape.input_specs[cell.i])

    def _brought(self, x: Tensor) -> Tensor:
        """An input on the compute device, in the type that layers compute in."""
        dtype = self._param_dtype if x.is_floating_point() and self._param_dtype is not None else x.dtype
        # Without this, a copy from page-locked memory runs on after the call and reads what a loader has written there
        # since. From other memory the source is read when the call returns.
        goes_on = x.layout is torch.strided and x.is_pinned()
        return x.detach().to(self._device, dtype, non_blocking=not goes_on)

    def _output_fn(self, tape: CellRecords, cell: Cell) -> OutputFn | None:
        return tape.output_fns[cell.i] if cell.j == len(self._runners) - 1 else None


def _check_same(tape: CellRecords, cell: Cell, outputs: Sequence[Any]) -> None:
    expected = tape.requires[Cell(cell.j + 1, cell.i)] if tape.glue is None else tape.returned[cell]
    if requires(outputs) != expected:
        raise RuntimeError(
            f"recomputing cell {cell} (shard.micro-batch) returned {requires(outputs)} for which outputs need a "
            f"gradient, but its forward returned {expected}; make its layers deterministic, or use "
            f"checkpoint_activation=False"
        )


def _source(tape: CellRecords, cell: Cell, boundary: Any) -> tuple[CellInput, Any]:
    """A new first node for a cell's graph, and the boundary with its tensors replaced by outputs of that node."""
    leaves, spec = flatten(boundary)
    source = CellInput(leaves, tape.requires.get(cell, [False] * len(leaves)), cell.j)
    return source, unflatten(list(source.leaves), spec)


def requires(leaves: Sequence[Any]) -> list[bool]:
    """Whether each leaf needs a gradient."""
    return [isinstance(x, Tensor) and x.requires_grad for x in leaves]
