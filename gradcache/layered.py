"""The layered walk: a plain ``nn.Sequential`` in memory, with what enters each layer kept between the two passes.

::

    pass 1    for group of chunks g:            for layer j:            value = layer_j(value), no graph; value is kept
    pass 2    for group of chunks g, reversed:  for layer j, reversed:  layer_j again with a graph, gradient through it

Two passes over a checkpointed model run every layer three times forward. Here what entered each layer in pass 1 serves
pass 2, and it is two times; or one, for the cells (layer j, group g) at the end of pass 1 whose graphs are kept.

Guarantees
    * Only one layer's activations of one chunk are alive at a time, and besides them no more than ``boundary_bytes``.
    * These bytes first hold what enters layers. A chunk that finds no room keeps no more, and in pass 2 runs forward
      once more from the last thing that it kept; what enters its layers then exists beyond the budget, for one chunk
      at a time. Where room is left, chunks run together (see ``grouping``), and the cells that pass 2 begins with keep
      their graphs (see ``pipe.lean``). The two never need the room at the same time: kept graphs are gone when pass 2
      recomputes.
    * Kept values rest in host memory if the model is on an accelerator.
    * Of a chunk that ``input_fn`` makes, no more is kept than of any other; see ``entering``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradcache import grouping
from gradcache.entering import Entering, InputFn
from gradcache.layered_tape import LayeredTape
from pipe.guard import Watched
from pipe.nested import tensors_in
from pipe.replay import autocast_without_cache, devices_of
from pipe.tail import Tail

__all__ = ["LayeredModel", "Profile", "is_plain_sequential"]

OutputFn = Callable[[Any], Any]


@dataclass(frozen=True)
class Profile:
    """What the first chunk taught about all chunks of its kind; bytes are those of that chunk."""

    rows: int
    together: int
    """Chunks that may run at a time: whose layers keep no more than the whole model does for one chunk."""
    layer_bytes: int
    """What the largest layer's graph keeps, besides what entered it."""
    entering_bytes: tuple[int, ...]
    """What enters each layer, where it is to be kept."""
    graph_bytes: tuple[int, ...]
    """What each layer's lean graph keeps, with what entered it."""
    tails: tuple[Tail | None, ...]
    """What each layer's recomputation may leave out."""

    def scaled(self, nbytes: int, rows: int) -> int:
        """As many bytes of ``rows`` rows as ``nbytes`` are of the first chunk."""
        return -(-nbytes * rows // max(self.rows, 1))


def is_plain_sequential(model: nn.Module) -> bool:
    """Whether running the layers one after the other is all that the module does."""
    own_forward = type(model).forward is nn.Sequential.forward
    return isinstance(model, nn.Sequential) and len(model) > 0 and own_forward and not model._forward_hooks


class LayeredModel:
    """A plain ``nn.Sequential`` as a :class:`gradcache.streamed.StreamedModel`.

    Args:
        model: the layers.
        boundary_bytes: bytes that may be kept between the passes of one step.
        regroup: whether chunks may run together.

    The object remembers from step to step what it learnt about the layers.
    """

    def __init__(self, model: nn.Sequential, boundary_bytes: int, regroup: bool = True) -> None:
        self.layers: list[nn.Module] = list(model)
        self.boundary_bytes = boundary_bytes
        self.regroup = regroup
        self.parameters = list(model.parameters())
        self.watched = [Watched(layer) for layer in self.layers]
        self.writes_input: list[bool | None] = [None] * len(self.layers)
        self._profiles: dict[str, Profile] = {}
        self._may_group: dict[tuple[bool, ...], bool] = {}

    def forward_chunks(
        self, chunks: Sequence[Any], output_fn: OutputFn | None = None, input_fn: InputFn | None = None
    ) -> tuple[list[Any], LayeredTape]:
        """Detached outputs in chunk order, and the tape."""
        entering = Entering(chunks, input_fn, self.parameters)
        wants_input = input_fn is None and any(tensor.requires_grad for tensor in tensors_in(entering.known))
        tape = LayeredTape(self, entering, output_fn, torch.is_grad_enabled(), wants_input)
        with autocast_without_cache(devices_of(list(chunks), self.parameters)):
            outputs = tape.run_forward()
        return outputs, tape

    def call(self, j: int, value: Any) -> Any:
        """Layer ``j`` on what enters it: (args, kwargs) for the first, one value for every other."""
        if j == 0:
            args, kwargs = value
            return self.layers[0](*args, **kwargs)
        return self.layers[j](value)

    def profile_of(self, chunk: Any) -> Profile | None:
        """What is known about chunks of this kind, in the modes that the layers are in."""
        return self._profiles.get(self._key(chunk))

    def learn(
        self,
        chunk: Any,
        saved: Sequence[tuple[int, int]],
        entering_bytes: Sequence[int],
        tails: Sequence[Tail | None],
        pair: Sequence[Any],
    ) -> None:
        """Notes the profile of a chunk that just ran.

        Args:
            chunk: what entered the first layer.
            saved: what each layer's graph keeps, without and with what entered it.
            entering_bytes: what enters each layer, where it is to be kept.
            tails: see :class:`Profile`.
            pair: two further chunks for a trial, if chunks may run together at all.
        """
        together = 1
        alone = [nbytes for nbytes, _ in saved]
        if self.regroup and grouping.runs_of_like_chunks(pair, 2) == [[0, 1]]:
            modes = self._modes()
            if modes not in self._may_group:
                self._may_group[modes] = grouping.can_group(self.call, self.layers, *pair)
            if self._may_group[modes]:
                together = max(sum(alone) // max(*alone, 1), 1)
        self._profiles[self._key(chunk)] = Profile(
            rows=grouping.rows_in(chunk),
            together=together,
            layer_bytes=max(*alone, 1),
            entering_bytes=tuple(entering_bytes),
            graph_bytes=tuple(nbytes for _, nbytes in saved),
            tails=tuple(tails),
        )

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for watched in self.watched for _, module in watched.modules)

    def _key(self, chunk: Any) -> str:
        return repr((grouping.kind_of(chunk), self._modes()))
