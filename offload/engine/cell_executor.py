"""Crossing a cell: what a forward leaves in its tape at each cell, and what its backward finds there.

===============  ====================================  ==========================================================
memory mode      forward leaves                        backward
===============  ====================================  ==========================================================
recompute        its replay; the boundary is stored    runs the cell again from its boundary, with a graph
keep the graph   the graph, weights by reference       uses the graph
nothing to do    nothing (before the first shard that  is never here
                 takes part, or without gradients)
===============  ====================================  ==========================================================

Either mode sees the same values: what was changed in between (an input, a parameter) is an error, never another result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.cell import Cell, OutputFn, ReplayableShard
from offload.engine.layouts import fitting
from offload.engine.memory_recorder import MemoryProfileRecorder
from offload.engine.raw_chunk import MadeInput
from offload.engine.saved_tensors import weights_by_reference
from offload.engine.source import CellInput
from offload.engine.tape import CellNotes, KeptCell, Tape
from offload.engine.weight_writes import (
    HomeWatch,
    differs_from_home,
    find_writes,
    holds,
    put_back,
    values_at_home,
    values_in_slot,
)
from offload.planning.memory_profile import MemoryProfile
from offload.streaming.shard import Shard
from offload.streaming.streamer import Streamer
from offload.telemetry.statistics import Meter
from pipe.nested import flatten, map_distinct, unflatten
from pipe.torch_private import hidden_hooks

__all__ = ["CellExecutor", "largest_rows", "requires", "versions_of"]


class CellExecutor:
    """Runs the cells of a model's tapes.

    Args:
        runners: one for each shard.
        device: where they compute.
        meter: of the model.
        recompute: whether cells are recomputed, but for those that a tape lists in ``graphs``.
        param_dtype: what floating-point inputs become, if they change.
    """

    def __init__(
        self,
        replayables: Sequence[ReplayableShard],
        *,
        device: torch.device,
        meter: Meter,
        recompute: bool,
        param_dtype: torch.dtype | None,
    ) -> None:
        self._replayables = replayables
        self._device = device
        self._meter = meter
        self._recompute = recompute
        self._param_dtype = param_dtype
        self._homes = [HomeWatch(replayable.shard) for replayable in replayables]
        self._lending = {loan.owner.index for replayable in replayables for loan in replayable.shard.loans}

    def keeps_graph(self, tape: CellNotes, cell: Cell) -> bool:
        """Whether a cell runs forward once and for all."""
        return cell in tape.graphs

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(self, tape: CellNotes, cell: Cell, boundary: Any) -> Any:
        """The detached output of a cell; the tape notes what backward needs of it."""
        replayable = self._replayables[cell.j]
        output_fn = self._output_fn(tape, cell)
        keeps = tape.records and cell.j >= tape.first and self.keeps_graph(tape, cell)
        with self._meter.cell("F", cell.j, cell.i, tape.rows[cell.i], token="K" if keeps else "F"):
            if not tape.records or cell.j < tape.first:
                return map_distinct(Tensor.detach, replayable.forward(boundary, output_fn))
            source, value = _source(tape, cell, boundary)
            if not keeps:
                output, tape.cells[cell] = replayable.forward_recorded(value, output_fn)
                self._meter.saw_activations(replayable.activation_bytes, tape.rows[cell.i])
                self._meter.saw_course(cell.j, MemoryProfile(tape.rows[cell.i], replayable.saved_tensors), keeps=False)
                replayable.graph_bytes_per_row = replayable.graph_bytes / max(tape.rows[cell.i], 1)
            else:
                output, saved_tensors = replayable.forward_with_graph(value, output_fn, cheap_recompute=self._recompute)
                self._meter.saw_course(cell.j, MemoryProfile(tape.rows[cell.i], saved_tensors), keeps=True)
                tape.kept[cell] = KeptCell(source, *flatten(output))
            tape.requires[Cell(cell.j + 1, cell.i)] = requires(flatten(output)[0])
            return map_distinct(Tensor.detach, output)

    def end_visit(self, tape: Tape, j: int, microbatches: Sequence[int], enter: Callable[[Cell], Any]) -> list[int]:
        """To be called when all cells of a shard's visit have run forward.

        Where a recomputation would write other values into parameters than the cells did, their graphs are kept.

        Args:
            tape: of the forward.
            j: which shard.
            microbatches: whose cells have run.
            enter: gives what enters a cell once more.

        Returns:
            Positions of the parameters that the layers wrote.
        """
        replayable = self._replayables[j]
        shard = replayable.shard
        compare = replayable.compares_weights()
        written = find_writes(shard, compare=compare)
        # Before what the layers wrote is sent home.
        looks = {owner for k in written if self._homes[owner := shard.owner_of(k)[0].index].watching}
        noted = compare and tape.records and (j >= tape.first or j in self._lending)
        for index in looks | {j} if noted else looks:
            self._homes[index].look()
        if noted:
            tape.homes[j] = self._homes[j].changes
        if written:
            replayable.writes_weights = True
            recorded = [Cell(j, i) for i in microbatches if Cell(j, i) in tape.cells]
            entered = {cell: enter(cell) for cell in recorded}
            if recorded and replayable.repeats_writes is None:
                replayable.repeats_writes = self._repeats_writes(tape, recorded[0], entered[recorded[0]])
            if recorded and not replayable.repeats_writes:
                put_back(shard, values_at_home(shard))  # which is still what there was before this visit
                for cell, boundary in entered.items():
                    self._run_again_with_graph(tape, cell, boundary)
        return written

    @contextlib.contextmanager
    def keeping_writes(self, j: int, streamer: Streamer) -> Iterator[None]:
        """Around the cells of a visit in a forward: what layers wrote before one failed stays, as their buffers do.

        What the engine refuses leaves no trace; an interrupt is a failure of the layers wherever it strikes.
        """
        replayable = self._replayables[j]
        replayable.failed = False
        try:
            yield
        except BaseException as error:
            if replayable.failed or not isinstance(error, Exception):
                with contextlib.suppress(Exception):  # the first error counts
                    written = find_writes(replayable.shard, compare=True)
                    streamer.store_written_weights(j, written)
                    self.leave_home(j, written)
            raise

    def leave_home(self, j: int, written: Sequence[int]) -> None:
        """To be called when what the layers of a shard wrote into their parameters has been sent home."""
        shard = self._replayables[j].shard
        for owner in {shard.owner_of(k)[0].index for k in written}:
            self._homes[owner].keep()

    def _repeats_writes(self, tape: Tape, cell: Cell, boundary: Any) -> bool:
        """After a forward that wrote parameters: whether a recomputation of the cell leaves them as they are."""
        replayable = self._replayables[cell.j]
        after = values_in_slot(replayable.shard)
        with torch.no_grad():
            replayable.recompute(_source(tape, cell, boundary)[1], tape.cells[cell], self._output_fn(tape, cell))
        same = holds(replayable.shard, after)
        put_back(replayable.shard, after)
        return same

    def _run_again_with_graph(self, tape: Tape, cell: Cell, boundary: Any) -> None:
        """Repeats a forward that was recorded, and keeps its graph, so that it need not be recomputed.

        It sees what the first run saw, :func:`~pipe.is_recomputing` included.
        """
        replayable = self._replayables[cell.j]
        source, value = _source(tape, cell, boundary)
        notes = MemoryProfileRecorder(replayable.shard)
        with weights_by_reference(replayable.shard, notes):
            output = replayable.repeat(value, tape.cells.pop(cell), self._output_fn(tape, cell))
        tape.kept[cell] = KeptCell(source, *flatten(output))
        tape.graphs |= {cell}

    # --- backward -----------------------------------------------------------------------------------------------

    def backward(
        self,
        tape: CellNotes,
        cell: Cell,
        boundary: Any,
        given: Sequence[Any],
        *,
        consume: bool,
        only: Collection[nn.Parameter] | None = None,
        onward: bool = True,
    ) -> list[Any]:
        """Pushes the gradients of a cell's output, ``given`` flat, through it.

        Args:
            tape: of the forward.
            cell: which.
            boundary: what entered it; not used where it kept its graph.
            given: a tensor or None for each leaf of its output.
            consume: give up a kept graph.
            only: the parameters that take gradients; None: all that require one.
            onward: where not all do, whether the boundary takes any.

        Returns:
            A gradient or None for each leaf of the boundary.
        """
        replayable = self._replayables[cell.j]
        keeps_graph = self.keeps_graph(tape, cell)
        metered = self._meter.cell("B", cell.j, cell.i, tape.rows[cell.i], token="G" if keeps_graph else "B")
        with metered, replayable.until_backward() as until:
            if not keeps_graph:
                source, value = _source(tape, cell, boundary)
                outputs = flatten(replayable.recompute(value, tape.cells[cell], self._output_fn(tape, cell), until))[0]
                _check_same(tape, cell, outputs)
                if replayable.writes_weights and differs_from_home(replayable.shard):
                    raise RuntimeError(
                        f"the layers of shard {cell.j} write their own parameters while they run, and the "
                        f"recomputation wrote other values than the forward, which it did not do at first; use "
                        f"checkpoint_activation=False"
                    )
            else:
                kept = tape.kept[cell]
                source, outputs = kept.source, kept.outputs
                if consume:
                    del tape.kept[cell]
            # A gradient that no output can take (an integer, a constant) is dropped together with its output.
            pairs = [
                (y, fitting(g, y))
                for y, g in zip(outputs, given, strict=True)
                if isinstance(y, Tensor) and y.requires_grad and g is not None
            ]
            roots, gradients = [y for y, _ in pairs], [g for _, g in pairs]
            # A kept graph is the tape's, which autograd frees together with the forward it belongs to.
            retain = keeps_graph and not consume
            back: list[Tensor | None] = [None] * len(source.leaves)
            if roots and only is None:
                with source.expecting():
                    replayable.push_back(roots, gradients, retain_graph=retain)
                back = source.take()
            elif roots:
                back = (
                    self._take(replayable.shard, roots, gradients, source if onward else None, only or (), retain)
                    or back
                )
            # A layer that writes its own weights (an embedding with max_norm) did so in forward; that counts once.
            replayable.shard.set_versions(tape.versions[cell.j])
            return back

    def again(self, tape: CellNotes, cell: Cell, boundary: Any) -> Any:
        """What a cell that ran forward returned then, detached: runs it once more without a graph."""
        with torch.no_grad():
            output = tape.cells[cell].repeat(self._replayables[cell.j].call(self._output_fn(tape, cell)), boundary)
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
        """Pushes gradients to the boundary, if it is given, and to some parameters: what leads elsewhere is not run."""
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

    # --- what enters, and what must not have changed --------------------------------------------------------------

    def enter(self, tape: CellNotes, cell: Cell) -> Any:
        """What enters a cell.

        The user's own inputs are not stored once more: they are the first shard's boundaries.

        Raises:
            RuntimeError: if it was changed in place since the forward began.
        """
        if cell.j > 0:
            return tape.boundaries.get(cell)
        leaves = tape.inputs[cell.i]
        if versions_of(leaves) != tape.input_versions[cell.i]:
            raise RuntimeError(
                f"an input of the model (micro-batch {cell.i}) was changed in place between the forward and its "
                f"backward; clone it before changing it"
            )
        if len(leaves) == 1 and isinstance(leaves[0], MadeInput):
            return leaves[0].entering(self._brought)
        moved = [self._brought(x) if isinstance(x, Tensor) else x for x in leaves]
        return unflatten(moved, tape.input_specs[cell.i])

    def _brought(self, x: Tensor) -> Tensor:
        """An input on the compute device, in the type that layers compute in."""
        dtype = self._param_dtype if x.is_floating_point() and self._param_dtype is not None else x.dtype
        # The caller did not ask for a copy that goes on after the call. Without this, one from page-locked memory does,
        # and reads what a loader has put there since. From other memory it is done with its source when it returns.
        goes_on = x.layout is torch.strided and x.is_pinned()
        return x.detach().to(self._device, dtype, non_blocking=not goes_on)

    def _output_fn(self, tape: CellNotes, cell: Cell) -> OutputFn | None:
        return tape.output_fns[cell.i] if cell.j == len(self._replayables) - 1 else None

    @staticmethod
    def check_unchanged(tape: Tape, shards: Sequence[Shard], assigned_at: Mapping[int, int]) -> None:
        """Raises if a parameter that the backward of a tape uses was changed since its forward.

        Args:
            tape: of the forward.
            shards: of the model.
            assigned_at: when other data of parameters, by identity, was brought home.
        """
        for j, versions in tape.versions.items():
            if j < tape.first:
                continue
            assigned = {id(s.parameter) for s in shards[j].assigned()}
            if assigned_at:
                assigned |= {id(p) for p in shards[j].parameters if assigned_at.get(id(p), 0) > tape.assignments}
            for s, then, now in zip(shards[j].slices, versions, shards[j].versions(), strict=True):
                if then != now or id(s.parameter) in assigned:
                    how = "changed in place" if then != now else "given other data"
                    raise RuntimeError(
                        f"parameter {s.name} of shard {j} was {how} between the forward and its backward, so the "
                        f"gradient would belong to neither value; step the optimizer after the backward"
                    )

    def check_homes(self, tape: Tape) -> None:
        """Raises if homes that the backward of a tape uses were written in a way that no version tells.

        Compares those that were compared at the end of their visits in the forward.
        """
        for j, changes in tape.homes.items():
            home = self._homes[j]
            home.look()
            if home.changes != changes:
                self._replayables[j].compares_always = True
                raise RuntimeError(
                    f"parameter {', '.join(home.changed[:3])} of shard {j} was written through .data (or an alias such "
                    f"as a NumPy array) between the forward and its backward: the gradient would mix activations of "
                    f"the old values with the new ones; write before the forward or after the backward"
                )


def _check_same(tape: CellNotes, cell: Cell, outputs: Sequence[Any]) -> None:
    expected = tape.requires[Cell(cell.j + 1, cell.i)]
    if requires(outputs) != expected:
        raise RuntimeError(
            f"recomputing cell {cell} (shard.micro-batch) returned {requires(outputs)} for which outputs need a "
            f"gradient, but its forward returned {expected}; make its layers deterministic, or use "
            f"checkpoint_activation=False"
        )


def _source(tape: CellNotes, cell: Cell, boundary: Any) -> tuple[CellInput, Any]:
    """The beginning of a cell's graph, and the boundary as that graph sees it."""
    leaves, spec = flatten(boundary)
    source = CellInput(leaves, tape.requires.get(cell, [False] * len(leaves)), cell.j)
    return source, unflatten(list(source.leaves), spec)


def requires(leaves: Sequence[Any]) -> list[bool]:
    """For each leaf, whether it needs a gradient."""
    return [isinstance(x, Tensor) and x.requires_grad for x in leaves]


def versions_of(leaves: Sequence[Any]) -> list[int]:
    """Counts of in-place changes of the tensors that count them."""
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def largest_rows(leaves: Sequence[Any]) -> int:
    """Rows of a micro-batch: the largest dimension 0, since not every input has one."""
    raw = (x.rows for x in leaves if isinstance(x, MadeInput))
    return max((*(x.size(0) for x in leaves if isinstance(x, Tensor) and x.dim()), *raw), default=1)
