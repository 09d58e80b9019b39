"""Forward and backward of chunks through resident layers, as :mod:`offload.planning.in_memory` plans them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.boundary_store import BoundaryStore
from offload.engine.cell import Cell, OutputFn
from offload.engine.cell_executor import CellExecutor
from offload.engine.follow import Follower
from offload.engine.raw_chunk import LazyInput
from offload.engine.resident import Push, ResidentRunner
from offload.engine.tape import CellRecords
from offload.planning.in_memory import InMemory
from offload.planning.plan import BACKWARD_CELLS, FORWARD_CELLS, Kind
from offload.telemetry.statistics import Meter
from pipe.nested import map_tensors, tensors_in

__all__ = ["ChunksInTurn", "ResidentLayers", "nbytes_of"]


class _NoMeter(Meter):
    """A meter without cells: their times serve no plan, and measuring takes as long as a small layer."""

    @contextlib.contextmanager
    def cell(
        self, kind: str, shard: int, microbatch: int, rows: float, *, step: int = 0, steps: int = 1
    ) -> Iterator[None]:
        """Does nothing."""
        yield


class ResidentLayers:
    """Layers as shards that stay in memory. ``push`` runs backward through a graph, into ``.grad``."""

    def __init__(self, layers: Sequence[nn.Module], push: Push) -> None:
        self.runners = [ResidentRunner(j, layer, push) for j, layer in enumerate(layers)]
        device = torch.device("cpu")
        self.cell_executor = CellExecutor(self.runners, device=device, meter=_NoMeter(device), param_dtype=None)


class ChunksInTurn:
    """One forward of some chunks through resident layers, and its backward, as :class:`InMemory` plans them.

    Inputs and graphs take at most ``keep_bytes`` between the two; backward has to reach layer ``first``.
    """

    def __init__(self, layers: ResidentLayers, first: int, keep_bytes: int) -> None:
        self._runners = layers.runners
        self._cell_executor = layers.cell_executor
        self.first = first
        records = torch.is_grad_enabled()
        count = len(layers.runners)
        self.plan = InMemory(count, first if records else count, keep_bytes)
        self.store = BoundaryStore(on_host=True)
        self._output_fns: list[OutputFn | None] = []
        # Layers before the first are recorded as well: the input of the first may have to be recomputed.
        self._tape = CellRecords(
            records=records,
            first=0,
            boundaries=self.store,
            versions=dict.fromkeys(range(count), ()),
            graphs=self.plan.graphs,
            cheap_recompute=True,
            output_fns=self._output_fns,
        )
        self._gradients = BoundaryStore()

    # --- forward ------------------------------------------------------------------------------------------------

    def add(self, source: LazyInput, requires: Sequence[bool] | None, output_fn: OutputFn | None) -> int:
        """Adds a chunk: its lazy input, whether each leaf of that needs a gradient, a function of its output."""
        tape = self._tape
        tape.inputs.append([source])
        tape.input_versions.append(())
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
    ) -> Any:
        """The detached output of chunk ``i``, whose input is removed from the list ``entering``.

        Layers in ``graph_bytes`` keep their graphs, of so many bytes, if these fit.
        """
        tape, value = self._tape, entering.pop()

        def run(cell: Cell) -> None:
            nonlocal value
            if cell in self.plan.inputs:
                self.store.put(cell, value)
            value = self._cell_executor.forward(tape, cell, value)

        actions = self.plan.forward(i, graph_bytes, lambda: nbytes_of(value))
        Follower(dict.fromkeys(FORWARD_CELLS, run)).follow(actions)
        return value

    # --- backward -----------------------------------------------------------------------------------------------

    def backward(self, output_gradients: Mapping[int, list[Any]]) -> dict[int, list[Any]]:
        """Flat gradients of the first layer's input, for chunks that have any, from those of outputs; frees all."""
        found: dict[int, list[Any]] = {}
        chunks = [i for i, gradients in output_gradients.items() if tensors_in(gradients)]
        follower = Follower({**dict.fromkeys(BACKWARD_CELLS, self._backward), Kind.REPEAT: self._repeat})
        self._forget(output_gradients.keys() - set(chunks))
        for together in self.plan.groups(chunks):
            # Gradients are kept in host memory, as boundaries are; that of a single chunk is used at once.
            self._gradients = BoundaryStore(on_host=len(together) > 1)
            for i in together:
                self._gradients.put((len(self._runners), i), output_gradients[i])
            follower.follow(self.plan.backward(together))
            self._forget(together)
            entered = [Cell(self.first, i) for i in together]
            found |= {cell.i: self._gradients.get(cell) for cell in entered if cell in self._gradients}
        self._gradients = BoundaryStore()
        return found

    def _repeat(self, cell: Cell) -> None:
        """Recomputes the input of the next layer."""
        tape = self._tape
        if cell in tape.kept:
            output = map_tensors(Tensor.detach, tape.kept[cell].output())
        else:
            value = self._cell_executor.input_of(tape, cell)
            if cell.j == self.first == 0:
                self.store.put(cell, value)  # it is needed again, and may be expensive
            output = self._cell_executor.repeat(tape, cell, value)
        if cell.j < self.first:
            self.store.drop(cell)
        self.store.put((cell.j + 1, cell.i), output)

    def _backward(self, cell: Cell) -> None:
        tape, after = self._tape, Cell(cell.j + 1, cell.i)
        if after in self._gradients:
            given = self._gradients.get(after)
            self._gradients.drop(after)
            boundary = None if cell in tape.kept else self._cell_executor.input_of(tape, cell)
            back = self._cell_executor.backward(tape, cell, boundary, given, consume=True)
            if tensors_in(back):
                self._gradients.put(cell, back)
        self.store.drop(cell)
        tape.cells.pop(cell, None)

    def _forget(self, chunks: Iterable[int]) -> None:
        for cell in (Cell(j, i) for i in chunks for j in range(len(self._runners))):
            self.store.drop(cell)
            self._tape.cells.pop(cell, None)
            self._tape.kept.pop(cell, None)


def nbytes_of(value: Any) -> int:
    """Bytes of all tensors in a value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
