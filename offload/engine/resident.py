"""Cells of layers whose parameters stay where they compute: nothing to load, to evict, or to send home.

To the executor such a layer is a shard as any other. What differs is its storage:

===================  ==============================================================================================
parameters           are not copied; what layers write into their own parameters stays written
gradients            are added to ``.grad`` by autograd itself, chunk by chunk, and hooks see them come; those of
                     embedding tables in place (:mod:`offload.engine.tables`)
boundaries           rest in host memory, whatever device they come from; a layer may be on a device of its own
===================  ==============================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.boundary_store import versions_in
from offload.engine.cell import OutputFn, ReplayableShard
from offload.engine.cell_executor import CellExecutor
from offload.engine.saved_bytes import SavedBytes
from offload.engine.tables import rows_in_place, tables_of
from offload.planning.memory_profile import SavedTensor
from offload.streaming.shard import Shard
from offload.telemetry.statistics import Meter
from pipe.nested import flatten, map_tensors, tensors_in, unflatten
from pipe.recompute.cheap_ops import CheapRecompute
from pipe.recompute.dead_code import DeadCode, Listener
from pipe.recompute.replay import devices_of
from pipe.recompute.rerun import Rerun

__all__ = ["ResidentCells", "ResidentStore", "Survey", "make_resident"]

#: Pushes gradients through the graph of some outputs, into ``.grad`` of its leaves.
Push = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class ResidentShard(Shard):
    """One layer, where it is."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that the layer uses."""
        return list(self.layers[0].parameters())

    def set_versions(self, versions: tuple[int, ...]) -> None:
        """What was written stays written."""

    def widen_gradients(self) -> None:
        """Whoever owns the parameters sums their gradients as they like."""

    @property
    def bound(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Survey:
    """What one forward of a layer shows; bytes of its graph, besides parameters."""

    activation_bytes: int
    """What its graph keeps."""
    graph_bytes: int
    """What a lean graph keeps, with what entered it, but without its result."""
    dead_code: DeadCode | None
    """What a recomputation may leave out."""
    moves_buffers: bool
    """Whether it wrote a buffer."""


class ResidentRunner(ReplayableShard):
    """Runs the cells of one layer.

    Args:
        shard: the layer.
        name: of it.
        push: the way of gradients into ``.grad``.
    """

    def __init__(self, shard: ResidentShard, name: str, push: Push) -> None:
        self._push = push
        self._tables = tables_of(shard.layers[0])
        self._parameters = shard.parameters
        super().__init__(shard, [name], torch.device("cpu"))

    def forward_recorded(self, boundary: Any, output_fn: OutputFn | None = None) -> tuple[Any, Rerun]:
        """Runs the cell without keeping activations; its output tells what needs a gradient."""
        self._follow(boundary)
        output, _, rerun = self._recorded(boundary, output_fn, _dropped)
        return output, rerun

    def forward_with_graph(
        self, boundary: Any, output_fn: OutputFn | None = None, *, cheap_recompute: bool = True
    ) -> tuple[Any, Sequence[SavedTensor]]:
        """Runs the cell once and for all, with a lean graph."""
        self._follow(boundary)
        # What is learnt of buffers here is of use to other cells, whose recomputations must not meet its writes.
        rerun, recipes = self.layers.rerun(), CheapRecompute(changing=self.watched.changing())
        hooks = torch.autograd.graph.saved_tensors_hooks(recipes.pack, recipes.unpack)
        with rerun.first(), torch.enable_grad(), hooks, rows_in_place(self._tables):
            return self._first_run(boundary, output_fn, recipes)[0], ()

    def survey(self, boundary: Any, output_fn: OutputFn | None, *, callers_own: bool, last: bool) -> tuple[Any, Survey]:
        """Runs the cell, and counts what a graph would keep. Its result is returned as leaves of a new graph.

        Args:
            boundary: what enters it, as leaves.
            output_fn: see :meth:`forward_recorded`.
            callers_own: whether what enters is kept by the caller in any case.
            last: whether the result enters no other layer.
        """
        self._follow(boundary)
        listener, cheap_recompute, graph = Listener(), CheapRecompute(), SavedBytes(self._parameters)
        activations = SavedBytes(self._parameters)

        def saved(tensor: Tensor) -> None:
            listener.saved(tensor)
            activations.count(tensor)
            if not cheap_recompute.knows(tensor):
                graph.count(tensor)

        output, given, rerun = self._recorded(boundary, output_fn, saved, cheap_recompute, listener=listener)
        # A result enters the next layer, and is counted there.
        for tensor in tensors_in((given, boundary if rerun.copies_input else ())):
            graph.count(tensor)
        for tensor in tensors_in(given) if callers_own and not rerun.copies_input else ():
            graph.forget(tensor)
        for tensor in () if last else tensors_in(output):
            graph.forget(tensor)
        moves_buffers = rerun.module_state is not None and rerun.module_state.moved
        return map_tensors(_as_leaf, output), Survey(
            activations.total, graph.total, listener.dead_code(), moves_buffers
        )

    @contextlib.contextmanager
    def until_backward(self) -> Iterator[contextlib.ExitStack]:
        """Around a recomputation and its backward, which meets buffers and modes as the forward did."""
        with rows_in_place(self._tables), contextlib.ExitStack() as stack:
            yield stack

    def push_back(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool) -> None:
        """Backward through a cell's graph, which is used once."""
        self._push(roots, gradients)

    def _follow(self, boundary: Any) -> None:
        """Draws and casts may happen on the devices of the layer, and of what enters it."""
        self.layers.devices = self.watched.devices | devices_of(boundary)

    def _own_memory(self, tensor: Tensor) -> Tensor:
        return tensor


class ResidentStore:
    """Nested values by key, at rest in host memory."""

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[list[Any], Any, list[Any], tuple[int, ...]]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def put(self, key: Hashable, value: Any) -> None:
        """Keeps a value. One on the CPU stays the same tensors."""
        leaves, spec = flatten(value)
        devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
        kept = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._values[key] = kept, spec, devices, versions_in(kept)

    def get(self, key: Hashable) -> Any:
        """The value, where it came from.

        Raises:
            RuntimeError: if one of its tensors was changed in place since.
        """
        kept, spec, devices, versions = self._values[key]
        if versions_in(kept) != versions:
            raise RuntimeError(
                f"the activation that enters layer {key} was changed in place after the forward that needs it for its "
                f"backward; clone it before changing it"
            )
        pairs = zip(kept, devices, strict=True)
        return unflatten([x if device is None else x.to(device) for x, device in pairs], spec)

    def drop(self, key: Hashable) -> None:
        """Forgets a value, if it is there."""
        self._values.pop(key, None)

    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(x.nbytes for kept, *_ in self._values.values() for x in kept if isinstance(x, Tensor))

    def close(self) -> None:
        """Forgets everything."""
        self._values.clear()


@dataclass
class ResidentCells:
    """The layers of a model, as shards that are always where they compute."""

    replayables: list[ResidentRunner]
    cell_executor: CellExecutor


def make_resident(layers: Sequence[nn.Module], push: Push) -> ResidentCells:
    """One shard for each layer; ``push`` brings gradients into ``.grad``."""
    shards = [ResidentShard(j, j, [layer]) for j, layer in enumerate(layers)]
    replayables = [ResidentRunner(shard, str(shard.index), push) for shard in shards]
    device = torch.device("cpu")
    cell_executor = CellExecutor(replayables, device=device, meter=Meter(device), recompute=True, param_dtype=None)
    return ResidentCells(replayables, cell_executor)


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _dropped(tensor: Tensor) -> None:
    """The graph of a first run only tells which outputs need a gradient."""
