"""Forward and backward of chunks through resident layers: forward chunk by chunk, backward layer by layer.

::

    forward     for chunk i:            for layer j:        value = layer_j(value); input kept if it fits
    backward    for layer j, reversed:  for chunk i:        layer_j again with a graph, gradient through it

Without loads the order is free. In forward, only the kept inputs of a layer exist for several chunks. In backward, the
inputs kept for a layer are freed before the gradients of the next layer's parameters are made. Inputs that did not
fit are recomputed from the last kept one, one chunk at a time, after all chunks whose inputs were kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.cell import Cell, OutputFn
from offload.engine.cell_executor import CellExecutor
from offload.engine.raw_chunk import MadeInput
from offload.engine.resident import Push, ResidentRunner, ResidentStore
from offload.engine.tape import CellRecords
from offload.telemetry.statistics import Meter
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.dead_code import DeadCode

__all__ = ["ChunksInTurn", "ResidentLayers", "nbytes_of"]


class _NoMeter(Meter):
    """A meter without cells: their times serve no plan, and measuring takes as long as a small layer."""

    @contextlib.contextmanager
    def cell(self, kind: str, shard: int, microbatch: int, rows: int, *, token: str | None = None) -> Iterator[None]:
        """Does nothing."""
        yield


class ResidentLayers:
    """Layers as shards that stay in memory. ``push`` runs backward through a graph, into ``.grad``."""

    def __init__(self, layers: Sequence[nn.Module], push: Push) -> None:
        self.replayables = [ResidentRunner(j, layer, push) for j, layer in enumerate(layers)]
        device = torch.device("cpu")
        self.cell_executor = CellExecutor(
            self.replayables, device=device, meter=_NoMeter(device), recompute=True, param_dtype=None
        )


class ChunksInTurn:
    """One forward of some chunks through resident layers, and its backward.

    Args:
        layers: the layers.
        first: the first layer that a backward has to reach.
        keep_bytes: for inputs of layers and graphs, between forward and backward.
    """

    def __init__(self, layers: ResidentLayers, first: int, keep_bytes: int) -> None:
        self._layers = layers
        self._cell_executor = layers.cell_executor
        self._count = len(layers.replayables)
        self.first = first
        self._bytes_left = keep_bytes
        self.store = ResidentStore()
        # Layers before the first are recorded as well: the input of the first may have to be recomputed.
        versions: dict[int, tuple[int, ...]] = dict.fromkeys(range(self._count), ())
        records = torch.is_grad_enabled()
        self._graphs: set[Cell] = set()
        self._output_fns: list[OutputFn | None] = []
        self._tape = CellRecords(
            records=records,
            first=0,
            boundaries=self.store,
            versions=versions,
            graphs=self._graphs,
            output_fns=self._output_fns,
        )

    # --- forward ------------------------------------------------------------------------------------------------

    def add(self, source: MadeInput, requires: Sequence[bool] | None, output_fn: OutputFn | None) -> int:
        """Adds a chunk: its lazy input, whether each leaf of that needs a gradient, a function of its output.

        Returns the index of the chunk.
        """
        tape = self._tape
        tape.inputs.append([source])
        tape.input_versions.append([])
        tape.rows.append(source.rows)
        self._output_fns.append(output_fn)
        i = len(tape.rows) - 1
        if requires is not None:
            tape.requires[Cell(0, i)] = list(requires)
        return i

    def forward(
        self,
        i: int,
        entering: list[Any],
        graph_bytes: Mapping[int, int],
        dead_code: Sequence[DeadCode | None] | None,
    ) -> Any:
        """The detached output of chunk ``i``.

        Args:
            i: index of the chunk.
            entering: a list with the input of the first layer, which is removed from it.
            graph_bytes: the layers that keep their graphs if these fit, with their bytes.
            dead_code: of the recomputation of each layer; None if unknown.
        """
        value, tape = entering.pop(), self._tape
        for j, replayable in enumerate(self._layers.replayables):
            cell = Cell(j, i)
            if tape.records and j in graph_bytes and self._reserve(graph_bytes[j]):
                self._graphs.add(cell)
            elif tape.records and j >= max(self.first, 1) and self._reserve(nbytes_of(value)):
                self.store.put(cell, value)
            value = self._cell_executor.forward(tape, cell, value)
            if dead_code is not None and cell in tape.cells and replayable.leaves_out:
                tape.cells[cell].dead_code = dead_code[j]
        return value

    def _reserve(self, nbytes: int) -> bool:
        """Takes bytes from the budget; False if too few are left."""
        fits = nbytes <= self._bytes_left
        self._bytes_left -= nbytes if fits else 0
        return fits

    # --- backward -----------------------------------------------------------------------------------------------

    def backward(self, output_gradients: Mapping[int, list[Any]]) -> dict[int, list[Any]]:
        """Propagates flat gradients of the chunks' outputs back through all layers, and frees the forward.

        Returns:
            Flat gradients of the first layer's input, for the chunks that have any.
        """
        found: dict[int, list[Any]] = {}
        chunks = range(len(self._tape.rows))
        complete = [i for i in chunks if not self._missing(i)]
        for together in [complete, *([i] for i in chunks if self._missing(i))]:
            found |= self._backward_by_layer(together, output_gradients)
        return found

    def _backward_by_layer(
        self, chunks: Iterable[int], output_gradients: Mapping[int, list[Any]]
    ) -> dict[int, list[Any]]:
        chunks = list(chunks)
        # Gradients are kept in host memory, as boundaries are; that of a single chunk is used at once.
        waiting = ResidentStore(stays=len(chunks) == 1)
        for i in chunks:
            if tensors_in(output_gradients[i]):
                waiting.put(i, output_gradients[i])
                self._recompute_inputs(i)
        for j in range(self._count - 1, self.first - 1, -1):
            for i in waiting:
                back = self._cell_backward(Cell(j, i), waiting.take(i))
                if tensors_in(back):
                    waiting.put(i, back)
        self._forget(chunks)
        return {i: waiting.get(i) for i in waiting}

    def _cell_backward(self, cell: Cell, given: list[Any]) -> list[Any]:
        tape = self._tape
        boundary = None if cell in tape.kept else self._input_of(cell)
        back = self._cell_executor.backward(tape, cell, boundary, given, consume=True)
        self.store.drop(cell)
        tape.cells.pop(cell, None)
        return back

    def _input_of(self, cell: Cell) -> Any:
        return self.store.get(cell) if cell in self.store else self._cell_executor.enter(self._tape, cell)

    def _missing(self, i: int) -> list[int]:
        """The layers of a backward whose input was not kept."""
        return [j for j in range(max(self.first, 1), self._count) if not self._kept(j, i)]

    def _kept(self, j: int, i: int) -> bool:
        return Cell(j, i) in self._tape.kept or Cell(j, i) in self.store

    def _recompute_inputs(self, i: int) -> None:
        """Recomputes the missing inputs of layers, from the last kept one."""
        missing = self._missing(i)
        if not missing:
            return
        tape = self._tape
        value: Any = None
        start = max((j for j in range(missing[0]) if self._kept(j, i)), default=0)
        for j in range(start, missing[-1]):
            cell = Cell(j, i)
            if cell in tape.kept:
                value = map_tensors(Tensor.detach, tape.kept[cell].output())
            else:
                if j == 0 or cell in self.store:
                    value = self._input_of(cell)
                if j == self.first == 0:
                    self.store.put(cell, value)  # it is needed again, and may be expensive
                value = self._cell_executor.repeat(tape, cell, value)
            if j + 1 in missing:
                self.store.put(Cell(j + 1, i), value)

    def _forget(self, chunks: Iterable[int]) -> None:
        for cell in (Cell(j, i) for i in chunks for j in range(self._count)):
            self.store.drop(cell)
            self._tape.cells.pop(cell, None)
            self._tape.kept.pop(cell, None)


def nbytes_of(value: Any) -> int:
    """Bytes of all tensors in a value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
