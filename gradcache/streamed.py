"""Runs all chunks of towers that are an ``OffloadModel`` in one forward and one backward per step.

Such a model runs all chunks on each shard while that shard is loaded. GradCache is checkpointing whose outermost
boundary is the representation, so its second pass *is* the recomputation of a checkpointed backward: nothing is
recomputed in addition, and each shard is loaded twice per step for any number of chunks. Towers that are the same model
pass their chunks in one call, so each shard is loaded for all of them at once.

``process_fn`` runs on each chunk as a part of the first shard. Processed chunks (decoded images, padded tokens) may be
much larger than raw ones, so only the one that is passed to the first layer exists at a time; the recomputation
processes its chunk again, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from gradcache import representations
from gradcache.chunks import call_arguments
from gradcache.contract import StepOwner
from gradcache.two_pass import InputGradients, is_trainable
from offload import OffloadModel
from pipe.nested import tensors_in

__all__ = ["StreamedTowers", "Tower"]


@dataclass(eq=False)
class Tower:
    """One model with its chunks and results in a step."""

    model: nn.Module
    chunks: list[Any]
    encoded: Any = None
    #: One per chunk; None if the tower is run together with others.
    states: list[Any] | None = None
    #: Of each chunk's representation.
    rows: list[int] = field(default_factory=list)
    #: Whether its representations need a gradient, and that gradient.
    wants_gradient: bool = True
    gradient: Any = None

    def join(self, joined: representations.Joined, parts: Iterable[Any]) -> None:
        """Writes the representations of all chunks from those of each, detached."""
        for part in parts:
            joined.add(part)
        self.rows, self.encoded = joined.rows, joined.value()

    def split_gradient(self) -> list[Any]:
        """The gradient of each chunk's representation; None if it has none."""
        return representations.split_gradients(self.gradient, self.rows)


class StreamedTowers:
    """Runs all towers of a step that are the same streamed model together."""

    def __init__(self, owner: StepOwner, model: OffloadModel, towers: Sequence[Tower], inputs: InputGradients) -> None:
        self._owner = owner
        self._model = model
        self._towers = towers
        self._inputs = inputs
        #: The representations of all chunks with their graph.
        self._graph: list[Any] = []

    def encode(self) -> None:
        """The first pass: writes the representations of each tower."""
        owner = self._owner
        chunks = [chunk for tower in self._towers for chunk in tower.chunks]
        process = owner.process_fn
        # What needs a gradient is processed once, and keeps its graph.
        lazy = (process is not None or owner.replaced("processed")) and not is_trainable(process, chunks)
        if not lazy:
            chunks = [self._inputs.as_leaves(owner.processed(chunk)) for chunk in chunks]
        calls = chunks if lazy else [call_arguments(chunk) for chunk in chunks]
        input_fn = partial(_first_call, owner.processed) if lazy else None
        with owner.autocast(self._model):
            outputs = self._model.forward_chunks(calls, output_fn=owner.representation_of, input_fn=input_fn)
        trainable = any(tensor.requires_grad for tensor in tensors_in(outputs))
        self._graph = outputs if trainable else []
        remaining = map(representations.detached, outputs)
        for tower in self._towers:
            tower.join(owner.joined(tower.chunks), islice(remaining, len(tower.chunks)))
            tower.wants_gradient = trainable

    def backward(self) -> None:
        """Runs the model's backward from the gradients of all towers' representations, loading each shard once."""
        graph, self._graph = self._graph, []
        if graph:
            representations.backward(graph, [part for tower in self._towers for part in tower.split_gradient()])


def _first_call(process: Callable[[Any], Any], chunk: Any) -> Any:
    """The first layer's (args, kwargs) of a raw chunk; raises ValueError if these need a gradient."""
    with torch.enable_grad():
        call = call_arguments(process(chunk))
    if any(tensor.requires_grad for tensor in tensors_in(call)):
        raise ValueError(
            "expected a process_fn without trainable parameters of its own, since it runs again in the second pass "
            "over layers; make it an nn.Module, or a layer of the model"
        )
    return call
