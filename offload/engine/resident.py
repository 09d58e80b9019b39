"""Cells of layers whose parameters stay where they compute: nothing to load, to evict, or to send home.

To the engine such a layer is a shard as any other. What differs is its storage:

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
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.boundary_store import versions_in
from offload.engine.cell import OutputFn, ReplayableShard
from offload.engine.tables import rows_in_place, tables_of
from offload.planning.memory_profile import SavedTensor
from offload.streaming.shard import Shard
from pipe.nested import flatten, unflatten
from pipe.recompute.replay import devices_of
from pipe.recompute.rerun import Rerun

__all__ = ["Push", "ResidentRunner", "ResidentStore"]

#: Pushes gradients through the graph of some outputs, into ``.grad`` of its leaves.
Push = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
_CPU = torch.device("cpu")
_NO_SLOT = torch.empty(0, dtype=torch.uint8)


class ResidentShard(Shard):
    """One layer, where it is."""

    slot = _NO_SLOT
    bound = True

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that the layer uses."""
        return list(self.layers[0].parameters())

    @property
    def memory(self) -> set[StorageWeakRef]:
        """That of the parameters themselves."""
        return {StorageWeakRef(parameter.untyped_storage()) for parameter in self.parameters}

    def set_versions(self, versions: tuple[int, ...]) -> None:
        """What was written stays written."""


class ResidentRunner(ReplayableShard):
    """Runs the cells of one layer.

    Args:
        index: of the layer.
        layer: the layer.
        push: the way of gradients into ``.grad``.
    """

    def __init__(self, index: int, layer: nn.Module, push: Push) -> None:
        super().__init__(ResidentShard(index, index, [layer]), [str(index)], _CPU, measures_graphs=True)
        self.measures = False
        self._push = push
        self._tables = tables_of(layer)

    def surveyed(self, boundary: Any, output_fn: OutputFn | None = None) -> tuple[Any, Rerun]:
        """A recorded forward that measures, see :meth:`forward_recorded`."""
        self.measures = True
        try:
            return self.forward_recorded(boundary, output_fn)
        finally:
            self.measures = False

    def forward_with_graph(
        self, boundary: Any, output_fn: OutputFn | None = None, *, cheap_recompute: bool = False
    ) -> tuple[Any, Sequence[SavedTensor]]:
        """See :class:`ReplayableShard`."""
        with rows_in_place(self._tables):
            return super().forward_with_graph(boundary, output_fn, cheap_recompute=cheap_recompute)

    @contextlib.contextmanager
    def until_backward(self) -> Iterator[contextlib.ExitStack]:
        """Around a recomputation and its backward, which meets modules as the forward did: each chunk counts once."""
        with contextlib.ExitStack() as stack:
            if self._tables:
                stack.enter_context(rows_in_place(self._tables))
            yield stack

    def push_back(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool) -> None:
        """Backward through a cell's graph, which is used once."""
        self._push(roots, gradients)

    def _first_run(self, boundary: Any, output_fn: OutputFn | None, *around: Any, **noted: Any) -> tuple[Any, Any]:
        if torch.accelerator.is_available():
            # Draws and casts may happen on the devices of the layer, and of what enters it.
            self.layers.devices = self.watched.devices | devices_of(boundary)
        return super()._first_run(boundary, output_fn, *around, **noted)

    def _out_of_slot(self, output: Any) -> Any:
        return output


class ResidentStore:
    """Nested values by key, at rest in host memory; or where they are."""

    def __init__(self, *, stays: bool = False) -> None:
        self._stays = stays
        self._values: dict[Hashable, tuple[list[Any], Any, list[Any], tuple[int, ...]]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._values))

    def put(self, key: Hashable, value: Any) -> None:
        """Keeps a value. What stays stays the same tensors, on the CPU in any case."""
        leaves, spec = flatten(value)
        devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
        kept = [leaf.cpu() if isinstance(leaf, Tensor) and not self._stays else leaf for leaf in leaves]
        self._values[key] = kept, spec, devices, versions_in(kept)

    def take(self, key: Hashable) -> Any:
        """:meth:`get`, for the last time."""
        value = self.get(key)
        self.drop(key)
        return value

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
