"""Measures layers in one chunk's forward, to decide for later chunks how many run together and which graphs are kept.

Measured are the bytes that graphs keep, the operations that a recomputation may leave out, and whether chunks may run
together. The results are valid for later steps with chunks of the same kind, until a ``training`` flag or a
``requires_grad`` changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.regroup import joined, kind_of, rows_in, runs_alike
from offload.engine.resident import ResidentRunner
from pipe.microbatch import rows_of
from pipe.nested import map_distinct, tensors_in
from pipe.recompute.replay import Replay, devices_of
from pipe.recompute.rerun import Rerun

__all__ = ["Profile", "Profiles"]


@dataclass(frozen=True)
class LayerProfile:
    """The measurements of one forward of a layer."""

    #: Bytes that its graph keeps, besides parameters.
    activation_bytes: int
    #: Bytes that a graph with cheap recomputation keeps, with its input, without an output that another layer reads.
    graph_bytes: int
    #: Bytes of its input, or 0 if that need not be kept.
    entering_bytes: int
    writes_buffers: bool
    #: Whether it draws random numbers.
    draws: bool

    @classmethod
    def of(cls, runner: ResidentRunner, rerun: Rerun, entering_bytes: int) -> LayerProfile:
        """The measurements of the layer that has just run."""
        writes = rerun.module_state is not None and rerun.module_state.moved
        assert runner.graph_bytes is not None  # it was surveyed
        return cls(
            runner.activation_bytes,
            runner.graph_bytes,
            entering_bytes,
            writes,
            bool(rerun.replay.drawn),
        )


@dataclass(frozen=True)
class Profile:
    """The measurements of the first chunk of a kind; bytes are those of that chunk."""

    rows: int
    together: int
    """Number of chunks that may run together: their largest layer keeps no more than the whole model for one chunk."""
    layers: Sequence[LayerProfile]

    @property
    def entering_bytes(self) -> int:
        """Bytes of the inputs of all layers that must be kept."""
        return sum(layer.entering_bytes for layer in self.layers)

    def graph_bytes(self, j: int, rows: int) -> int:
        """Bytes that layer ``j``'s graph keeps for so many rows."""
        return -(-self.layers[j].graph_bytes * rows // max(self.rows, 1))

    def chunks_together(self, chunks: int, budget: int | None) -> int:
        """How many of ``chunks`` run together: more than one only if the budget exceeds the layer inputs of all."""
        if budget is None:
            return self.together
        left = max(budget - chunks * self.entering_bytes, 0)
        return min(self.together, 1 + left // max(*(layer.activation_bytes for layer in self.layers), 1))

    def graphs_from(self, runs: Sequence[int], first: int, budget: int) -> list[int]:
        """For each run of so many chunks, the first layer from which on graphs are kept.

        Backward begins with these cells, so kept graphs are freed before it recomputes others.
        """
        plan = [len(self.layers)] * len(runs)
        left = budget - sum(runs) * self.entering_bytes
        for j in range(len(self.layers) - 1, first - 1, -1):
            layer = self.layers[j]
            for k, chunks in enumerate(runs):
                left -= chunks * (layer.graph_bytes - layer.entering_bytes)
                if left < 0:
                    return plan
                plan[k] = j
        return plan


class Profiles:
    """The profiles of the layers of one model, by kinds of chunks."""

    def __init__(self, runners: Sequence[ResidentRunner], join_chunks: bool | None) -> None:
        self._runners = runners
        self._modules = [module for runner in runners for _, module in runner.watched.modules]
        self._parameters = [parameter for runner in runners for parameter in runner.shard.parameters]
        self._join_chunks = join_chunks
        self._known: dict[str, Profile] = {}
        self._apart: dict[tuple[bool, ...], bool] = {}

    def of(self, chunk: Any) -> Profile | None:
        """The profile of chunks of this kind in the present ``training`` modes, or None."""
        return self._known.get(self._key(chunk))

    def learn(self, chunk: Any, layers: Sequence[LayerProfile], further: Callable[[], Sequence[Any]]) -> None:
        """Stores the profile of a chunk that has just run; ``further`` returns two other chunks for a trial."""
        alone = [layer.activation_bytes for layer in layers]
        together = max(sum(alone) // max(*alone, 1), 1) if self._may_join(layers, further) else 1
        self._known[self._key(chunk)] = Profile(rows_in(chunk) or 0, together, layers)

    def _may_join(self, layers: Sequence[LayerProfile], further: Callable[[], Sequence[Any]]) -> bool:
        if self._join_chunks is False or any(layer.writes_buffers for layer in layers):
            return False
        if self._join_chunks is None and any(layer.draws for layer in layers):
            return False  # together they would draw other numbers than apart
        pair = further()
        if runs_alike(pair, sum(rows_in(chunk) or 0 for chunk in pair)) != [[0, 1]]:
            return False
        modes = self._modes()
        if modes not in self._apart:
            calls = [runner.call(None) for runner in self._runners]
            generators = [generator for runner in self._runners for generator in runner.watched.generators]
            self._apart[modes] = _treats_rows_apart(calls, self._modules, generators, pair)
        return self._apart[modes]

    def _modes(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self._modules])

    def _key(self, chunk: Any) -> str:
        return repr((kind_of(chunk), self._modes(), [p.requires_grad for p in self._parameters]))


def _treats_rows_apart(
    calls: Sequence[Callable[[Any], Any]],
    modules: Sequence[nn.Module],
    generators: Sequence[torch.Generator],
    pair: Sequence[Any],
) -> bool:
    """Whether layers compute the same for a pair of chunks, concatenated, as for each of them separately.

    Layers do not declare this, so they run on both in evaluation mode, where none updates a buffer. A layer that mixes
    rows only in training is detected by the buffers that it updates (batch normalisation); one that updates none is not
    detected.
    """
    modes = [module.training for module in modules]
    rows = rows_of(pair[0]) + rows_of(pair[1])
    try:
        for module in modules:
            module.training = False
        parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
        with torch.no_grad(), Replay.capture(devices_of(list(pair), parameters), generators).again():
            alone = [map_distinct(Tensor.clone, chunk) for chunk in pair]
            together = map_distinct(Tensor.clone, joined(pair))
            for call in calls:
                alone, together = [call(value) for value in alone], call(together)
                if runs_alike(alone, rows) != [[0, 1]] or rows_in(together) != rows:
                    return False
                if not _close(joined(alone), together):
                    return False
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
    return True


def _close(a: Any, b: Any) -> bool:
    for x, y in zip(tensors_in(a), tensors_in(b), strict=True):
        if x.is_floating_point() or x.is_complex():
            # Kernels may add in another order for another shape; a layer that mixes rows differs by much more.
            tolerance = 16 * torch.finfo(x.dtype).eps ** 0.5
            if not torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True):
                return False
        elif not torch.equal(x, y):
            return False
    return True
