"""Runs all chunks of towers that are streamed models (``OffloadModel``) in one forward and one backward per step.

Such a model runs all chunks on each shard while that shard is loaded. GradCache is checkpointing whose outermost
boundary is the representation, so its second pass *is* the recomputation of a checkpointed backward: nothing is
recomputed in addition, and each shard is loaded twice per step for any number of chunks. Towers that are the same model
pass their chunks in one call, so each shard is loaded for all of them at once.

``gradcache`` uses such a model only through the two protocols below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from gradcache import representations
from gradcache.audit import LayerAudit
from gradcache.chunk_inputs import has_graph, processing
from gradcache.chunks import call_arguments
from gradcache.two_pass import InputGradients, is_trainable
from pipe.nested import tensors_in

if TYPE_CHECKING:
    from gradcache.grad_cache import GradCache

__all__ = ["StreamedModel", "StreamedTowers", "Tower"]


@runtime_checkable
class StreamedModel(Protocol):
    """A model whose forward and backward load each shard once, for any number of chunks."""

    def forward_chunks(
        self,
        chunks: Sequence[Any],
        output_fn: Callable[[Any], Any] | None = None,
        input_fn: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Outputs in chunk order, with one graph, through which a backward from all of them loads each shard once.

        A chunk is a tensor or ``(args, kwargs)``; or any value that ``input_fn`` converts to one of these, as part of
        the first shard. ``output_fn`` is applied to each chunk's output as part of the last shard, so it is recomputed
        and differentiated with it.
        """


@dataclass(eq=False)
class Tower:
    """One model with its chunks and results in a step."""

    model: nn.Module
    chunks: list[Any]
    encoded: Any = None
    #: One per chunk; None if the tower is run together with others.
    states: list[Any] | None = None
    #: Whether its representations need a gradient, and that gradient.
    wants_gradient: bool = True
    gradient: Any = None


class StreamedTowers:
    """Runs all towers of a step that are the same streamed model together."""

    def __init__(self, owner: GradCache, model: StreamedModel, towers: Sequence[Tower], inputs: InputGradients) -> None:
        self._owner = owner
        self._model = model
        self._towers = towers
        self._inputs = inputs
        self._audit = LayerAudit(list(towers[0].model.children()) if owner.audit else (), owner.representation_of)
        self._output_fn = self._audit.output_fn if owner.audit else owner.representation_of
        self._wants_gradient = torch.is_grad_enabled()
        self._rows: list[list[int]] = []
        #: The representations of all chunks with their graph.
        self._graph: list[Any] = []

    def encode(self) -> None:
        """The first pass: writes the representations of each tower."""
        owner, module = self._owner, self._towers[0].model
        chunks = [tower.chunks for tower in self._towers]
        lazy = (owner.process_fn is not None or owner.replaced("processed")) and not has_graph(owner.process_fn, chunks)
        if not lazy:
            chunks = [[self._inputs.as_leaves(owner.processed(chunk)) for chunk in tower] for tower in chunks]
        trainable = is_trainable(module, () if lazy else chunks)
        calls = [chunk if lazy else call_arguments(chunk) for tower in chunks for chunk in tower]
        input_fn = {"input_fn": processing(owner.processed)} if lazy else {}
        graph = trainable and self._wants_gradient
        output_fn = self._output_fn if graph else self._without_parameters
        with owner.autocast(module), torch.set_grad_enabled(graph), self._audit.listening(compares=False):
            outputs = self._model.forward_chunks(calls, output_fn=output_fn, **input_fn)
        self._graph = outputs if graph else []
        remaining = iter(outputs)
        for tower in self._towers:
            joined = owner.joined(tower.chunks)
            for _ in tower.chunks:
                joined.add(representations.detached(next(remaining)))
            self._rows.append(joined.rows)
            tower.encoded, tower.wants_gradient = joined.value(), trainable

    def _without_parameters(self, output: Any) -> Any:
        """``output_fn`` of a forward without a second pass; raises ValueError if it has trainable parameters."""
        with torch.enable_grad():
            representation = self._output_fn(output)
        if any(tensor.requires_grad for tensor in tensors_in(representation)) and self._wants_gradient:
            raise ValueError(
                "expected get_rep_fn without trainable parameters over a streamed model that is frozen; make the "
                "trainable part a layer of the model, or pass it as the loss's"
            )
        return representation

    def backward(self) -> None:
        """Runs the model's backward from the gradients of all towers' representations, loading each shard once."""
        graph, self._graph = self._graph, []
        if not graph or not any(representations.has_gradient(tower.gradient) for tower in self._towers):
            return
        split = map(representations.split_gradients, (tower.gradient for tower in self._towers), self._rows)
        with self._audit.listening(compares=True):
            representations.backward(graph, (part for parts in split for part in parts))

    @property
    def greatest_difference(self) -> float:
        """Greatest difference between the passes, of the chunks that ran in both. Only with ``audit``."""
        return self._audit.greatest_difference
