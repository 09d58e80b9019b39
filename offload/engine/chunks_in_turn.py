"""Layers in memory: chunks go forward one after the other through all layers, and back side by side, layer by layer.

::

    forward     for chunk i:            for layer j:        value = layer_j(value); kept if there is room
    backward    for layer j, reversed:  for chunk i:        layer_j again with a graph, gradient through it

Nothing has to be loaded, so that the order is free: what enters a layer of a whole batch is never there at once. Back,
what was kept for a layer is gone before the gradients of the next one's parameters are made. What found no room is made
again, from the last that did, one chunk at a time, when all that was kept is gone.
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
from offload.engine.tape import CellNotes
from offload.telemetry.statistics import Meter
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.dead_code import DeadCode

__all__ = ["ChunksInTurn", "ResidentLayers", "nbytes_of"]


class _NoMeter(Meter):
    """Nothing is planned by the time of these cells, and a small layer takes no longer than to measure it."""

    @contextlib.contextmanager
    def cell(self, kind: str, shard: int, microbatch: int, rows: int, *, token: str | None = None) -> Iterator[None]:
        """Counts nothing."""
        yield


class ResidentLayers:
    """Layers as shards that are always where they compute. ``push`` brings gradients into ``.grad``."""

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
        keep_bytes: for what enters layers and for graphs, between forward and backward.
    """

    def __init__(self, layers: ResidentLayers, first: int, keep_bytes: int) -> None:
        self._layers = layers
        self._cell_executor = layers.cell_executor
        self._count = len(layers.replayables)
        self.first = first
        self._bytes_left = keep_bytes
        self.store = ResidentStore()
        # Layers before the first are noted as well: what enters that one may have to be made again.
        versions: dict[int, tuple[int, ...]] = dict.fromkeys(range(self._count), ())
        records = torch.is_grad_enabled()
        self._graphs: set[Cell] = set()
        self._output_fns: list[OutputFn | None] = []
        self._notes = CellNotes(
            records=records,
            first=0,
            boundaries=self.store,
            versions=versions,
            graphs=self._graphs,
            output_fns=self._output_fns,
        )

    # --- forward ------------------------------------------------------------------------------------------------

    def add(self, source: MadeInput, requires: Sequence[bool] | None, output_fn: OutputFn | None) -> int:
        """A further chunk: what makes its input, which leaves of that need a gradient, what is done to its output."""
        notes = self._notes
        notes.inputs.append([source])
        notes.input_versions.append([])
        notes.rows.append(source.rows)
        self._output_fns.append(output_fn)
        i = len(notes.rows) - 1
        if requires is not None:
            notes.requires[Cell(0, i)] = list(requires)
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
            i: which chunk.
            entering: what enters the first layer; it is taken out of the list.
            graph_bytes: the layers that are to keep their graphs if there is room, and what these take.
            dead_code: what recomputations may leave out, as far as is known.
        """
        value, notes = entering.pop(), self._notes
        for j, replayable in enumerate(self._layers.replayables):
            cell = Cell(j, i)
            if notes.records and j in graph_bytes and self._takes(graph_bytes[j]):
                self._graphs.add(cell)
            elif notes.records and j >= max(self.first, 1) and self._takes(nbytes_of(value)):
                self.store.put(cell, value)
            value = self._cell_executor.forward(notes, cell, value)
            if dead_code is not None and cell in notes.cells and replayable.leaves_out:
                notes.cells[cell].dead_code = dead_code[j]
        return value

    def _takes(self, nbytes: int) -> bool:
        """Takes bytes out of the budget, if they are left."""
        fits = nbytes <= self._bytes_left
        self._bytes_left -= nbytes if fits else 0
        return fits

    # --- backward -----------------------------------------------------------------------------------------------

    def backward(self, output_gradients: Mapping[int, list[Any]]) -> dict[int, list[Any]]:
        """Pushes flat gradients of the chunks' outputs back through all layers, and uses the forward up.

        Returns:
            Flat gradients of what entered the first layer, of the chunks that have any.
        """
        found: dict[int, list[Any]] = {}
        chunks = range(len(self._notes.rows))
        complete = [i for i in chunks if not self._missing(i)]
        for together in [complete, *([i] for i in chunks if self._missing(i))]:
            found |= self._side_by_side(together, output_gradients)
        return found

    def _side_by_side(self, chunks: Iterable[int], output_gradients: Mapping[int, list[Any]]) -> dict[int, list[Any]]:
        chunks = list(chunks)
        # Gradients wait where boundaries rest; that of a chunk that goes alone goes on at once.
        waiting = ResidentStore(stays=len(chunks) == 1)
        for i in chunks:
            if tensors_in(output_gradients[i]):
                waiting.put(i, output_gradients[i])
                self._find_again(i)
        for j in range(self._count - 1, self.first - 1, -1):
            for i in waiting:
                back = self._back_through(Cell(j, i), waiting.take(i))
                if tensors_in(back):
                    waiting.put(i, back)
        self._forget(chunks)
        return {i: waiting.get(i) for i in waiting}

    def _back_through(self, cell: Cell, given: list[Any]) -> list[Any]:
        notes = self._notes
        boundary = None if cell in notes.kept else self._entering(cell)
        back = self._cell_executor.backward(notes, cell, boundary, given, consume=True)
        self.store.drop(cell)
        notes.cells.pop(cell, None)
        return back

    def _entering(self, cell: Cell) -> Any:
        return self.store.get(cell) if cell in self.store else self._cell_executor.enter(self._notes, cell)

    def _missing(self, i: int) -> list[int]:
        """The layers that a backward reaches where what entered them was not kept."""
        return [j for j in range(max(self.first, 1), self._count) if not self._kept(j, i)]

    def _kept(self, j: int, i: int) -> bool:
        return Cell(j, i) in self._notes.kept or Cell(j, i) in self.store

    def _find_again(self, i: int) -> None:
        """Computes what was not kept, from the last thing that was."""
        missing = self._missing(i)
        if not missing:
            return
        notes = self._notes
        value: Any = None
        start = max((j for j in range(missing[0]) if self._kept(j, i)), default=0)
        for j in range(start, missing[-1]):
            cell = Cell(j, i)
            if cell in notes.kept:
                value = map_tensors(Tensor.detach, notes.kept[cell].output())
            else:
                if j == 0 or cell in self.store:
                    value = self._entering(cell)
                if j == self.first == 0:
                    self.store.put(cell, value)  # it is needed once more, and may have been dear to make
                value = self._cell_executor.again(notes, cell, value)
            if j + 1 in missing:
                self.store.put(Cell(j + 1, i), value)

    def _forget(self, chunks: Iterable[int]) -> None:
        for cell in (Cell(j, i) for i in chunks for j in range(self._count)):
            self.store.drop(cell)
            self._notes.cells.pop(cell, None)
            self._notes.kept.pop(cell, None)


def nbytes_of(value: Any) -> int:
    """Bytes of all tensors in a value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
