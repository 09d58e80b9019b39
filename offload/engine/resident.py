"""Runs layers whose parameters stay in memory as cells: shards without a load, an eviction or a gradient offload.

===================  ==============================================================================================
parameters           are not copied; writes of layers into their own parameters stay
gradients            are added to ``.grad`` by autograd itself, chunk by chunk, which runs hooks; those of embedding
                     tables are added in place (:mod:`offload.engine.tables`)
boundaries           are kept in host memory, whatever their device; each layer may be on its own device
===================  ==============================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.cell import OutputFn, ShardRunner
from offload.engine.tables import rows_in_place, tables_of
from offload.planning.memory_profile import SavedTensor
from offload.streaming.shard import Shard
from pipe.recompute.replay import devices_of
from pipe.recompute.rerun import Rerun

__all__ = ["Push", "ResidentRunner"]

#: Pushes gradients through the graph of some outputs, into ``.grad`` of its leaves.
Push = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class ResidentShard(Shard):
    """One layer, on its own device."""

    slot = torch.empty(0, dtype=torch.uint8)
    bound = True

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that the layer uses."""
        return list(self.layers[0].parameters())

    @property
    def memory(self) -> set[StorageWeakRef]:
        """The storages of the parameters."""
        return {StorageWeakRef(parameter.untyped_storage()) for parameter in self.parameters}

    def set_versions(self, versions: tuple[int, ...]) -> None:
        """Does nothing: writes into parameters keep their versions."""


class ResidentRunner(ShardRunner):
    """Runs the cells of one layer; ``push`` runs backward through a graph, into ``.grad``."""

    def __init__(self, index: int, layer: nn.Module, push: Push) -> None:
        super().__init__(ResidentShard(index, index, [layer]), [str(index)], torch.device("cpu"), measures_graphs=True)
        self.measures = False
        self._push = push
        self._tables = tables_of(layer)

    def surveyed(self, boundary: Any, output_fn: OutputFn | None = None) -> tuple[Any, Rerun]:
        """A recorded forward that measures, see :meth:`forward_recorded`."""
        self.measures = True
        self._graphs_measured.clear()
        try:
            return self.forward_recorded(boundary, output_fn)
        finally:
            self.measures = False

    def forward_with_graph(
        self, boundary: Any, output_fn: OutputFn | None = None, *, cheap_recompute: bool = False
    ) -> tuple[Any, Sequence[SavedTensor] | None]:
        """See :class:`ShardRunner`."""
        with rows_in_place(self._tables):
            return super().forward_with_graph(boundary, output_fn, cheap_recompute=cheap_recompute)

    @contextlib.contextmanager
    def until_backward(self) -> Iterator[contextlib.ExitStack]:
        """A context for a recomputation and its backward, in which modules keep their state of the forward."""
        with contextlib.ExitStack() as stack:
            if self._tables:
                stack.enter_context(rows_in_place(self._tables))
            yield stack

    def push_back(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool) -> None:
        """Backward through a cell's graph, which is used once."""
        self._push(roots, gradients)

    def _first_run(self, boundary: Any, output_fn: OutputFn | None, *around: Any, **options: Any) -> tuple[Any, Any]:
        if torch.accelerator.is_available():
            # Random numbers and casts may be on the devices of the layer, and of its input.
            self.layers.devices = self.watched.devices | devices_of(boundary)
        return super()._first_run(boundary, output_fn, *around, **options)

    def _out_of_slot(self, output: Any) -> Any:
        return output
