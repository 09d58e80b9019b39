"""A plain ``nn.Sequential`` in memory as a streamed model: the engine's cells, over layers that stay where they are.

::

    pass 1    for group of chunks g:            for layer j:             value = layer_j(value), no graph; value is kept
    pass 2    for layer j, reversed:            for group of chunks g:   layer_j again with a graph, gradient through it

Two passes over a checkpointed model run every layer three times forward. Here what entered each layer in pass 1 serves
pass 2, and it is two times; or one, for the cells (layer j, group g) at the end of pass 1 whose graphs are kept. Since
nothing has to be loaded, chunks go through all layers one group after the other, so that the boundaries of a whole
batch are never there at once.

Guarantees
    * Only one layer's activations of one chunk are alive at a time, and besides them no more than ``boundary_bytes``.
    * These bytes first hold what enters layers. A chunk that finds no room keeps no more, and in pass 2 runs forward
      once more from the last thing that it kept; what enters its layers then exists beyond the budget, for one group
      at a time, when what was kept is gone. Where room is left, chunks run together (see ``profiles``), and the cells
      that pass 2 begins with keep their graphs (see ``pipe.recompute.cheap_ops``). The two never need the room at the
      same time: kept graphs are gone when pass 2 recomputes.
    * What was kept for a layer goes as the gradients of its parameters come: the two share their memory.
    * On the CPU the gradient of an ``nn.Embedding`` exists once, whatever the number of chunks;
      ``offload.engine.tables`` says where that is not so.
    * Kept values rest in host memory if the model is on an accelerator.
    * Of a chunk that ``input_fn`` makes, no more is kept than of any other; see ``entering``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradcache import representations
from gradcache.distributed.sharded import is_sharded
from gradcache.entering import Entering, InputFn
from gradcache.profiles import Profile, Profiles
from offload.engine.cell import Cell
from offload.engine.raw_chunk import MadeInput
from offload.engine.regroup import joined, rows_in, runs_alike, split_output
from offload.engine.resident import ResidentStore, Survey, make_resident
from offload.engine.tape import CellNotes
from pipe.nested import flatten, map_tensors, tensors_in
from pipe.recompute.module_state import ModuleState
from pipe.recompute.replay import Replay, devices_of

__all__ = ["SequentialModel", "is_plain_sequential"]

OutputFn = Callable[[Any], Any]


def is_plain_sequential(model: nn.Module) -> bool:
    """Whether running the layers one after the other is all that the module does."""
    own_forward = type(model).forward is nn.Sequential.forward
    plain = isinstance(model, nn.Sequential) and len(model) > 0 and own_forward and not model._forward_hooks
    return plain and not is_sharded(model)


class SequentialModel:
    """A plain ``nn.Sequential`` as a :class:`gradcache.streamed.StreamedModel`. Learns from step to step.

    Args:
        model: the layers.
        boundary_bytes: bytes that may be kept between the passes of one step.
        regroup: whether chunks may run together.
    """

    def __init__(self, model: nn.Sequential, boundary_bytes: int, regroup: bool = True) -> None:
        self.layers = list(model)
        self.boundary_bytes = boundary_bytes
        self.parameters = list(model.parameters())
        self.cells = make_resident(self.layers, representations.push)
        self.profiles = Profiles(self.cells.replayables, regroup)

    def forward_chunks(
        self, chunks: Sequence[Any], output_fn: OutputFn | None = None, input_fn: InputFn | None = None
    ) -> tuple[list[Any], SequentialTape]:
        """Detached outputs in chunk order, and the tape."""
        tape = SequentialTape(self, Entering(chunks, input_fn, self.parameters), output_fn)
        return tape.run_forward(), tape


@dataclass
class _Group(MadeInput):
    """Chunks that run together, with the rows of each; cells from layer ``graphs_from`` on keep their graphs."""

    source: Entering
    chunks: list[int]
    counts: list[int]
    profile: Profile | None
    graphs_from: int
    #: Leaves of the output of each chunk.
    leaves: list[int] = field(default_factory=list)
    #: What entered the first layer, while a backward needs it more than once.
    entered: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = sum(self.counts)

    def entering(self, bring: Callable[[Tensor], Tensor]) -> Any:
        """What enters the first layer, made again as it was made first."""
        if not self.entered:
            self.entered.append(joined([self.source.take(i) for i in self.chunks]))
        return self.entered[0]


class SequentialTape:
    """What one forward leaves behind for its backward.

    Args:
        model: the layers, and what is known about them.
        entering: the chunks.
        output_fn: a part of the last layer, applied to each chunk's output.
    """

    def __init__(self, model: SequentialModel, entering: Entering, output_fn: OutputFn | None) -> None:
        self._model = model
        self._crossing = model.cells.cell_executor
        self._entering = entering
        self._output_fn = output_fn
        self._records = torch.is_grad_enabled()
        known = [flatten(chunk)[0] for chunk in entering.known or ()]
        self._wants_input = any(isinstance(x, Tensor) and x.requires_grad for leaves in known for x in leaves)
        self._inputs = known
        wants = [replayable.shard.trainable for replayable in model.cells.replayables]
        wants[0] = wants[0] or self._wants_input
        #: The first layer that a backward has to reach.
        self._first = wants.index(True) if True in wants else len(wants)
        self._groups: list[_Group] = []
        self._store = ResidentStore()
        layers: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(wants)), ())
        self._notes = CellNotes(records=self._records, first=0, boundaries=self._store, versions=layers)
        self._bytes_left = model.boundary_bytes

    # -- pass 1 -------------------------------------------------------------------------------------------------------

    def run_forward(self) -> list[Any]:
        """Runs all chunks. A first chunk of its kind runs once before, to learn from it."""
        entering, outputs = self._entering, [None] * len(self._entering)
        if self._records and len(entering) > 1 and self._model.profiles.of(entering.look(0)) is None:
            self._explore()
        profile = self._model.profiles.of(entering.look(0))
        together = 1
        if profile is not None:
            together = profile.chunks_together(len(entering), self._bytes_left if self._records else None)
        most_rows = together * profile.rows if profile is not None else 0
        runs = self._planned_runs(together, most_rows)
        graphs_from = [len(self._model.layers)] * len(runs)
        if profile is not None and self._records:
            graphs_from = profile.graphs_from([len(run) for run in runs], self._first, self._bytes_left)
        for run, begin in zip(runs, graphs_from, strict=True):
            values = [entering.take(i) for i in run]
            for part in runs_alike(values, most_rows):
                group = self._new_group([run[k] for k in part], [values[k] for k in part], begin)
                value = [joined([values[k] for k in part])]
                if part[-1] + 1 == len(run):
                    values.clear()  # what was joined is not kept a second time
                for i, output in zip(group.chunks, self._run_group(len(self._groups) - 1, value), strict=True):
                    outputs[i] = representations.detached(output)
        return outputs

    def _planned_runs(self, together: int, most_rows: int) -> list[list[int]]:
        """Neighbours that may run together, as far as one can tell before they are processed."""
        known = self._entering.known
        if known is not None:
            return runs_alike(known, most_rows)
        numbers = list(range(len(self._entering)))
        return [numbers[k : k + together] for k in range(0, len(numbers), together)]

    def _new_group(self, chunks: list[int], values: list[Any], graphs_from: int) -> _Group:
        counts = [rows_in(value) or 0 for value in values]
        group = _Group(self._entering, chunks, counts, self._model.profiles.of(values[0]), graphs_from)
        notes, g = self._notes, len(self._groups)
        self._groups.append(group)
        notes.inputs.append([group])
        notes.input_versions.append([])
        notes.rows.append(group.rows)
        notes.output_fns = [*notes.output_fns, partial(_by_chunk, self._output_fn, counts)]
        if self._wants_input:
            columns = zip(*(self._inputs[i] for i in chunks), strict=True)
            notes.requires[Cell(0, g)] = [any(getattr(x, "requires_grad", False) for x in column) for column in columns]
        return group

    def _run_group(self, g: int, entering: list[Any]) -> Any:
        """The outputs of a group's chunks. Takes what enters the first layer out of the list."""
        value, group, notes = entering.pop(), self._groups[g], self._notes
        for j, replayable in enumerate(self._model.cells.replayables):
            cell = Cell(j, g)
            if self._keeps_graph(j, group):
                notes.graphs |= {cell}
            elif self._records and j >= max(self._first, 1) and self._takes(_nbytes_of(value)):
                self._store.put((j, g), value)
            value = self._crossing.forward(notes, cell, value)
            # What one chunk's recomputation may leave out is a guess for the others.
            if cell in notes.cells and group.profile is not None and replayable.leaves_out:
                notes.cells[cell].dead_code = group.profile.dead_code[j]
        group.leaves = [len(flatten(output)[0]) for output in value]
        return value

    def _keeps_graph(self, j: int, group: _Group) -> bool:
        if not self._records or group.profile is None or j < group.graphs_from:
            return False
        return self._takes(group.profile.graph_bytes_of(j, group.rows))

    def _takes(self, nbytes: int) -> bool:
        """Takes bytes out of the budget, if they are left."""
        fits = nbytes <= self._bytes_left
        self._bytes_left -= nbytes if fits else 0
        return fits

    def _explore(self) -> None:
        """Runs the first chunk and leaves no trace.

        It runs again with the others: kept apart from them, it would have gradients of its own beside their sum.
        """
        entering, replayables = self._entering, self._model.cells.replayables
        chunk = value = entering.look(0)
        surveys: list[Survey] = []
        entering_bytes: list[int] = []
        with contextlib.ExitStack() as stack:
            for replayable in replayables:
                stack.enter_context(ModuleState(replayable.watched, attributes=True).trial())
            held = [generator for replayable in replayables for generator in replayable.watched.generators]
            stack.enter_context(Replay.capture(devices_of(chunk, self._model.parameters), held).again())
            value = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), value)
            for j, replayable in enumerate(replayables):
                entering_bytes.append(_nbytes_of(value) if j >= max(self._first, 1) else 0)
                last = j + 1 == len(replayables)
                output_fn = partial(_by_chunk, self._output_fn, [rows_in(chunk) or 0]) if last else None
                callers_own = j == 0 and entering.known is not None
                value, survey = replayable.survey(value, output_fn, callers_own=callers_own, last=last)
                surveys.append(survey)
        further = range(1, min(3, len(entering)))
        self._model.profiles.learn(chunk, surveys, entering_bytes, lambda: [entering.look(k) for k in further])

    # -- pass 2 -------------------------------------------------------------------------------------------------------

    def backward(self, output_gradients: Sequence[Any]) -> None:
        """Pushes one gradient per chunk, of its output's structure or None, through the layers.

        Raises:
            RuntimeError: if the tape was used before, or its forward ran without gradients.
            ValueError: for another number of gradients.
        """
        if not self._records:
            raise RuntimeError("expected a tape of a forward with gradients, used once; run forward_chunks again")
        if len(output_gradients) != len(self._entering):
            raise ValueError(f"expected {len(self._entering)} gradients, one per chunk, got {len(output_gradients)}")
        self._records = False
        links: list[tuple[Tensor, Tensor]] = []
        groups = range(len(self._groups))
        complete = [g for g in groups if not self._missing(g)]
        # Layer by layer, what was kept for a layer is gone before gradients of the next one's parameters are made. A
        # group that did not keep everything makes it again, beyond the budget; such groups go one at a time.
        for together in [complete, *([g] for g in groups if self._missing(g))]:
            self._push_back(together, output_gradients, links)
        if links:
            representations.push([tensor for tensor, _ in links], [gradient for _, gradient in links])

    def _push_back(
        self, groups: list[int], output_gradients: Sequence[Any], links: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Takes groups through all layers, side by side; ``links`` gets what the chunks themselves are to receive."""
        # Gradients wait where other kept values rest; that of a group that goes alone goes on at once.
        waiting = _Waiting(ResidentStore() if len(groups) > 1 else None)
        for g in groups:
            if waiting.put(g, self._flat(g, output_gradients)):
                self._find_again(g)
        for j in range(len(self._model.layers) - 1, self._first - 1, -1):
            for g in waiting.groups:
                waiting.put(g, self._back_through(Cell(j, g), waiting.take(g)))
        for g in waiting.groups if self._wants_input else ():
            group, gradients = self._groups[g], waiting.take(g)
            parts = [
                x.split(group.counts) if isinstance(x, Tensor) and len(group.chunks) > 1 else [x] for x in gradients
            ]
            for k, i in enumerate(group.chunks):
                pairs = zip(self._inputs[i], [part[k % len(part)] for part in parts], strict=True)
                links += [(x, x_grad) for x, x_grad in pairs if isinstance(x_grad, Tensor) and x.requires_grad]
        for g in groups:
            self._forget(g)

    def _flat(self, g: int, output_gradients: Sequence[Any]) -> list[Any]:
        """Gradients of a group's outputs, flat."""
        group = self._groups[g]
        found: list[Any] = []
        for i, count in zip(group.chunks, group.leaves, strict=True):
            leaves = [None] * count if output_gradients[i] is None else flatten(output_gradients[i])[0]
            if len(leaves) != count:
                raise ValueError(f"chunk {i}: expected gradients of the output's {count} leaves, got {len(leaves)}")
            found += leaves
        return found

    def _back_through(self, cell: Cell, given: list[Any]) -> list[Any]:
        """The gradient of what entered a cell, None for each leaf where it has none. The cell is used up."""
        kept = self._crossing.keeps_graph(self._notes, cell)
        boundary = None if kept else self._crossing.enter(self._notes, cell)
        back = self._crossing.backward(self._notes, cell, boundary, given, consume=True)
        self._store.drop((cell.j, cell.i))
        self._notes.cells.pop(cell, None)
        return back

    def _missing(self, g: int) -> list[int]:
        """The layers that a backward reaches where what entered them was not kept."""
        layers = range(max(self._first, 1), len(self._model.layers))
        return [j for j in layers if Cell(j, g) not in self._notes.kept and (j, g) not in self._store]

    def _find_again(self, g: int) -> None:
        """Computes what was not kept, from the last thing that was."""
        missing = self._missing(g)
        if not missing:
            return
        notes, store = self._notes, self._store
        value: Any = None
        start = max((j for j in range(missing[0]) if Cell(j, g) in notes.kept or (j, g) in store), default=0)
        for j in range(start, missing[-1]):
            cell = Cell(j, g)
            if cell in notes.kept:
                value = map_tensors(Tensor.detach, notes.kept[cell].output())
            else:
                if j == 0 or (j, g) in store:
                    value = self._crossing.enter(notes, cell)
                value = self._crossing.again(notes, cell, value)
            if j + 1 in missing:
                store.put((j + 1, g), value)

    def _forget(self, g: int) -> None:
        """Frees what a group left."""
        self._groups[g].entered.clear()
        for j in range(len(self._model.layers)):
            cell = Cell(j, g)
            self._store.drop((j, g))
            self._notes.cells.pop(cell, None)
            self._notes.kept.pop(cell, None)


class _Waiting:
    """Gradients of groups between layers, of those that have any."""

    def __init__(self, store: ResidentStore | None) -> None:
        self._store = store
        self._alone: list[Any] = []
        self._groups: dict[int, None] = {}

    @property
    def groups(self) -> list[int]:
        """The groups that have a gradient."""
        return list(self._groups)

    def put(self, g: int, gradients: list[Any]) -> bool:
        """Keeps the gradients of a group, and returns whether there is any."""
        if not tensors_in(gradients):
            return False
        self._groups[g] = None
        if self._store is None:
            self._alone = gradients
        else:
            self._store.put(g, gradients)
        return True

    def take(self, g: int) -> list[Any]:
        """Gives them back, once."""
        del self._groups[g]
        if self._store is None:
            gradients, self._alone = self._alone, []
            return gradients
        found: list[Any] = self._store.get(g)
        self._store.drop(g)
        return found


def _by_chunk(output_fn: OutputFn | None, counts: Sequence[int], output: Any) -> list[Any]:
    """The outputs of the chunks in a group, each through ``output_fn``."""
    pieces = split_output(output, counts)
    return pieces if output_fn is None else [output_fn(piece) for piece in pieces]


def _cut(gradients: list[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Gradients of what entered a group, for each of its chunks."""
    if len(counts) == 1:
        return [gradients]
    columns = [x.split(counts) if isinstance(x, Tensor) else [None] * len(counts) for x in gradients]
    return [[column[k] for column in columns] for k in range(len(counts))]


def _nbytes_of(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
