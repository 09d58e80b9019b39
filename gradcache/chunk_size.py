"""Chooses chunk sizes: as many rows as keep their saved activations within a memory budget.

Two small inputs run forward once, and the bytes that autograd saves for them are counted and extrapolated. The trial
restores generators and buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gradcache.chunks import call_arguments
from gradcache.context_managers import devices_in_use
from gradcache.nested import map_tensors, tensors_in
from pipe.microbatch import rows_of
from pipe.recompute.module_state import WatchedModule
from pipe.recompute.replay import Replay
from pipe.recompute.rerun import trial

__all__ = ["ChunkSizes", "kept_by_a_shard", "kept_bytes"]

Split = Callable[[int], Sequence[Any]]


class ChunkSizes:
    """Chooses chunk sizes, and caches the choice for inputs of the same trailing shapes."""

    def __init__(self) -> None:
        self._chosen: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()

    def rows_for(self, model: nn.Module, budget: int, split: Split, measure: Callable[[Any], int]) -> int:
        """Rows of a chunk whose graph keeps up to ``budget`` bytes; temporaries of layers need memory in addition.

        ``split(n)`` splits the input into chunks of n rows, ``measure`` returns the bytes that the graph of one keeps.
        """
        # At least two rows: a model with BatchNorm cannot train on one.
        probes = [split(2)[0], split(4)[0]]
        known = self._chosen.setdefault(model, {})
        key = repr([(t.dtype, t.shape[1:]) for t in tensors_in(probes[0])])
        if key not in known:
            known[key] = self._choose(budget, probes, measure)
        return known[key]

    @staticmethod
    def _choose(budget: int, probes: list[Any], measure: Callable[[Any], int]) -> int:
        rows = [rows_of(tensors_in(probe)) for probe in probes]
        sizes = [measure(probe) for probe in probes]
        per_row = sizes[1] / rows[1] if rows[0] == rows[1] else (sizes[1] - sizes[0]) / (rows[1] - rows[0])
        fixed = max(sizes[1] - per_row * rows[1], 0.0)
        fitting = int((budget - fixed) // max(per_row, 1.0))
        if fitting < 1:
            raise ValueError(
                f"expected a budget for at least one row, got {budget} bytes where one row keeps "
                f"{int(fixed + per_row)}; give it more memory, or checkpoint inside the model"
            )
        return fitting


def kept_bytes(model: nn.Module, chunk: Any, encoder: Callable[[Any], Any]) -> int:
    """Bytes that the graph of a chunk keeps besides parameters. A frozen model is measured as if it were trained."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # Storages are held, since the address of a freed one may be reused.
    kept: dict[int, torch.UntypedStorage] = {}

    def saved(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage

    def never(_: None) -> torch.Tensor:
        raise AssertionError("the graph of a forward that keeps no activations was used")

    devices = devices_in_use(tensors_in(chunk), list(model.parameters()))
    with _as_if_trained(model), trial([WatchedModule(model)], devices), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(saved, never):
            encoder(map_tensors(lambda tensor: tensor.detach().clone(), chunk))
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


def kept_by_a_shard(model: Any, chunk: Any, process: Callable[[Any], Any], output_fn: Callable[[Any], Any]) -> int:
    """The same for a model that streams its shards: bytes that the graph of one shard keeps for a chunk."""
    if not hasattr(model, "activation_bytes"):
        raise ValueError(
            f"expected a number of rows for a {type(model).__name__}, which has no activation_bytes(chunk) to choose "
            f"by, got chunk_sizes='auto'"
        )
    replay = Replay.capture(devices_in_use(tensors_in(chunk), list(model.parameters())))
    with _as_if_trained(model), replay.again():
        call = call_arguments(process(map_tensors(lambda tensor: tensor.detach().clone(), chunk)))
        return int(model.activation_bytes(call, output_fn=output_fn))


@contextlib.contextmanager
def _as_if_trained(model: nn.Module) -> Iterator[None]:
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
