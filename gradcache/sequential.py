"""Runs the two passes of GradCache over a plain ``nn.Sequential`` in memory, layer by layer, within a memory budget.

Two passes over a checkpointed model run every layer three times forward. Here the inputs of the layers in pass 1 are
kept for pass 2, so each layer runs twice; or once, for the last cells of pass 1, whose graphs are kept. The engine runs
the cells (:mod:`offload.engine.chunks_in_turn`) with resident shards; this module decides which chunks run together,
and which values are kept.

Guarantees
    * Only one layer's activations of one chunk are alive at a time, and besides them no more than ``boundary_bytes``.
    * These bytes first hold the inputs of layers. If they are used up, a chunk keeps no further inputs, and in pass 2
      runs forward again from its last kept input; these recomputed inputs exceed the budget, for one group at a time,
      after the kept ones were freed. If bytes are left, chunks run together (see ``profiles``), and the cells that
      pass 2 begins with keep their graphs (see ``pipe.recompute.cheap_ops``). Both use the same bytes: kept graphs are
      freed before pass 2 recomputes.
    * The kept inputs of a layer are freed before the gradients of the next layer's parameters are allocated.
    * On the CPU the gradient of an ``nn.Embedding`` exists once, for any number of chunks; the exceptions are in
      ``offload.engine.tables``.
    * Kept values are in host memory if the model is on an accelerator.
    * The result of ``input_fn`` for a chunk is not kept; see ``chunk_inputs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradcache import representations
from gradcache.chunk_inputs import ChunkInputs, InputFn
from gradcache.distributed.sharded import is_sharded
from gradcache.profiles import LayerProfile, Profile, Profiles
from offload.engine.chunks_in_turn import ChunksInTurn, ResidentLayers, nbytes_of
from offload.engine.raw_chunk import LazyInput
from offload.engine.regroup import joined, rows_in, runs_alike, split_output
from pipe.nested import flatten, map_tensors, tensors_in
from pipe.recompute.replay import devices_of
from pipe.recompute.rerun import trial

__all__ = ["SequentialModel", "is_plain_sequential"]

OutputFn = Callable[[Any], Any]


def is_plain_sequential(model: nn.Module) -> bool:
    """Whether the forward of the module is that of ``nn.Sequential``, without forward hooks and without FSDP."""
    own_forward = type(model).forward is nn.Sequential.forward
    plain = isinstance(model, nn.Sequential) and len(model) > 0 and own_forward and not model._forward_hooks
    return plain and not is_sharded(model)


class SequentialModel:
    """A plain ``nn.Sequential`` as a :class:`gradcache.streamed.StreamedModel`. Keeps measurements between steps.

    ``boundary_bytes`` may be kept between the passes of one step; ``join_chunks``: see :class:`~offload.MemoryPolicy`.
    """

    def __init__(self, model: nn.Sequential, boundary_bytes: int, join_chunks: bool | None = None) -> None:
        self.layers = list(model)
        self.boundary_bytes = boundary_bytes
        self.parameters = list(model.parameters())
        self.resident = ResidentLayers(self.layers, representations.push)
        self.profiles = Profiles(self.resident.runners, join_chunks)

    def forward_chunks(
        self, chunks: Sequence[Any], output_fn: OutputFn | None = None, input_fn: InputFn | None = None
    ) -> tuple[list[Any], SequentialTape]:
        """Detached outputs in chunk order, and the tape."""
        tape = SequentialTape(self, ChunkInputs(chunks, input_fn, self.parameters), output_fn)
        return tape.run_forward(), tape


@dataclass
class _Group(LazyInput):
    """Chunks that run together, with the rows of each; their input is made again from the step's chunks when needed."""

    source: ChunkInputs
    chunks: list[int]
    counts: list[int]
    #: Leaves of the output of each chunk.
    leaves: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = sum(self.counts)

    def entering(self, bring: Callable[[Tensor], Tensor]) -> Any:
        """The input of the first layer."""
        return joined([self.source.take(i) for i in self.chunks])


class SequentialTape:
    """The state of one forward for its backward. ``output_fn`` is applied to each chunk's output of the last layer."""

    def __init__(self, model: SequentialModel, entering: ChunkInputs, output_fn: OutputFn | None) -> None:
        self._model = model
        self._entering = entering
        self._output_fn = output_fn
        self._records = torch.is_grad_enabled()
        #: The leaves of each chunk; empty with ``input_fn``, which makes them when needed.
        self._inputs = [flatten(chunk)[0] for chunk in entering.known or ()]
        self._wants_input = any(tensor.requires_grad for tensor in tensors_in(self._inputs))
        wants = [runner.shard.trainable for runner in model.resident.runners]
        wants[0] = wants[0] or self._wants_input
        first = wants.index(True) if True in wants else len(wants)
        self._groups: list[_Group] = []
        self._walk = ChunksInTurn(model.resident, first, model.boundary_bytes)

    # -- pass 1 -------------------------------------------------------------------------------------------------------

    def run_forward(self) -> list[Any]:
        """Runs all chunks. The first chunk of a new kind runs once before, to measure it."""
        entering, budget = self._entering, self._model.boundary_bytes
        outputs: list[Any] = [None] * len(entering)
        if self._records and len(entering) > 1 and self._model.profiles.of(entering.look(0)) is None:
            self._explore()
        profile, together = self._model.profiles.of(entering.look(0)), 1
        if profile is not None:
            together = profile.chunks_together(len(entering), budget if self._records else None)
        most_rows = together * profile.rows if profile is not None and together > 1 else 0
        runs = self._planned_runs(together, most_rows)
        graphs_from = [len(self._model.layers)] * len(runs)
        if profile is not None and self._records:
            graphs_from = profile.graphs_from([len(run) for run in runs], self._walk.first, budget)
        for run, begin in zip(runs, graphs_from, strict=True):
            values = [entering.take(i) for i in run]
            for part in runs_alike(values, most_rows):
                group = _Group(entering, [run[k] for k in part], [rows_in(values[k]) or 0 for k in part])
                kind, value = self._model.profiles.of(values[part[0]]), [joined([values[k] for k in part])]
                if part[-1] + 1 == len(run):
                    values.clear()  # frees the single chunks, which were concatenated
                for i, output in zip(group.chunks, self._run_group(group, value, kind, begin), strict=True):
                    outputs[i] = representations.detached(output)
        return outputs

    def _planned_runs(self, together: int, most_rows: int) -> list[list[int]]:
        """Consecutive chunks that may run together, as far as known before ``input_fn`` runs."""
        known = self._entering.known
        if known is not None:
            return runs_alike(known, most_rows)
        numbers = list(range(len(self._entering)))
        return [numbers[k : k + together] for k in range(0, len(numbers), together)]

    def _run_group(self, group: _Group, entering: list[Any], profile: Profile | None, graphs_from: int) -> Any:
        """The outputs of a group's chunks; layers from ``graphs_from`` on keep graphs. Empties ``chunk_inputs``."""
        self._groups.append(group)
        requires = None
        if self._wants_input:
            columns = zip(*(self._inputs[i] for i in group.chunks), strict=True)
            requires = [any(getattr(x, "requires_grad", False) for x in column) for column in columns]
        g = self._walk.add(group, requires, partial(_by_chunk, self._output_fn, group.counts))
        if profile is None:
            outputs = self._walk.forward(g, entering, {})
        else:
            graph_bytes = {j: profile.graph_bytes(j, group.rows) for j in range(graphs_from, len(profile.layers))}
            outputs = self._walk.forward(g, entering, graph_bytes)
        group.leaves = [len(flatten(output)[0]) for output in outputs]
        return outputs

    def _explore(self) -> None:
        """Measures the layers in a trial run of the first chunk, whose side effects are undone.

        The chunk runs again with the others; reusing this run would need memory for separate gradients.
        """
        entering, runners = self._entering, self._model.resident.runners
        chunk = entering.look(0)
        value = map_tensors(_as_leaf, chunk)
        layers: list[LayerProfile] = []
        runners[0].callers_input = entering.known is not None
        with trial([runner.layers.watched for runner in runners], devices_of(chunk, self._model.parameters)):
            for j, runner in enumerate(runners):
                entering_bytes = nbytes_of(value) if j >= max(self._walk.first, 1) else 0
                last = j + 1 == len(runners)
                output_fn = partial(_by_chunk, self._output_fn, [rows_in(chunk) or 0]) if last else None
                output, rerun = runner.surveyed(value, output_fn)
                layers.append(LayerProfile.of(runner, rerun, entering_bytes))
                value = map_tensors(_as_leaf, output)
                del output
        further = range(1, min(3, len(entering)))
        self._model.profiles.learn(chunk, layers, lambda: [entering.look(k) for k in further])

    # -- pass 2 -------------------------------------------------------------------------------------------------------

    def backward(self, output_gradients: Sequence[Any]) -> None:
        """Runs backward, once, from one gradient per chunk, which has the structure of its output or is None."""
        if not self._records:
            raise RuntimeError("expected a tape of a forward with gradients, used once; run forward_chunks again")
        if len(output_gradients) != len(self._entering):
            raise ValueError(f"expected {len(self._entering)} gradients, one per chunk, got {len(output_gradients)}")
        self._records = False
        entered = self._walk.backward({g: self._flat(g, output_gradients) for g in range(len(self._groups))})
        links: list[tuple[Tensor, Tensor]] = []
        for g, gradients in entered.items() if self._wants_input else ():
            group = self._groups[g]
            for i, parts in zip(group.chunks, split_output(gradients, group.counts), strict=True):
                pairs = zip(self._inputs[i], parts, strict=True)
                links += [(x, part) for x, part in pairs if isinstance(part, Tensor) and x.requires_grad]
        if links:
            representations.push([tensor for tensor, _ in links], [gradient for _, gradient in links])

    def _flat(self, g: int, output_gradients: Sequence[Any]) -> list[Any]:
        """The gradients of a group's outputs as a flat list."""
        group = self._groups[g]
        found: list[Any] = []
        for i, count in zip(group.chunks, group.leaves, strict=True):
            leaves = [None] * count if output_gradients[i] is None else flatten(output_gradients[i])[0]
            if len(leaves) != count:
                raise ValueError(f"chunk {i}: expected gradients of the output's {count} leaves, got {len(leaves)}")
            found += leaves
        return found


def _by_chunk(output_fn: OutputFn | None, counts: Sequence[int], output: Any) -> list[Any]:
    """The outputs of the chunks in a group, each through ``output_fn``."""
    pieces = split_output(output, counts)
    return pieces if output_fn is None else [output_fn(piece) for piece in pieces]


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
