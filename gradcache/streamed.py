"""The streamed walk: all chunks past each shard in one visit, for a model that can walk its shards itself.

GradCache is checkpointing whose outermost boundary is the representation, so its second pass *is* the recomputation of
a checkpointed backward: nothing runs twice for it, and each shard is loaded twice per step for any number of chunks.
Towers that are one and the same model send their chunks in one call, so they share the visits.

``gradcache`` knows such a model by the two methods below and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from gradcache import representations
from gradcache.audit import LayerAudit
from gradcache.chunks import call_arguments
from gradcache.entering import processing
from pipe.nested import tensors_in

__all__ = ["StreamedModel", "StreamedWalk", "Tape"]


class Tape(Protocol):
    """What one streamed forward leaves behind for its backward."""

    def backward(self, output_gradients: Sequence[Any]) -> None:
        """Pushes one gradient per chunk (None: no gradient), in chunk order, through the model; usable once."""


@runtime_checkable
class StreamedModel(Protocol):
    """A model whose forward and backward visit each shard once, whatever the number of chunks."""

    def forward_chunks(
        self,
        chunks: Sequence[Any],
        output_fn: Callable[[Any], Any] | None = None,
        input_fn: Callable[[Any], Any] | None = None,
    ) -> tuple[list[Any], Tape]:
        """Detached outputs in chunk order, and the tape.

        A chunk is a tensor or ``(args, kwargs)``; or anything that ``input_fn`` makes that of, as part of the first
        shard's work. ``output_fn`` is applied to each chunk's output as part of the last shard's work, so it is
        recomputed and differentiated with it.
        """


class StreamedWalk:
    """The towers that are one streamed model, walked together."""

    def __init__(
        self,
        model: StreamedModel,
        towers: Sequence[Sequence[Any]],
        output_fn: Callable[[Any], Any],
        process_fn: Callable[[Any], Any] | None = None,
        audit: Sequence[nn.Module] | None = None,
    ) -> None:
        """
        Args:
            model: of the towers.
            towers: the chunks of each tower.
            output_fn: picks the representations from an output.
            process_fn: turns a chunk into the model's input; it runs when the chunk enters the model, in both passes.
            audit: compare what these layers, and ``output_fn``, return in the two passes.
        """
        self._model = model
        chunks = [chunk for tower in towers for chunk in tower]
        self._calls = [call_arguments(chunk) for chunk in chunks] if process_fn is None else chunks
        self._input = {} if process_fn is None else {"input_fn": processing(process_fn)}
        self._sizes = [len(chunks) for chunks in towers]
        self._audit = LayerAudit(audit or ())
        self._output_fn = output_fn if audit is None else self._noted(output_fn)
        self._passes: tuple[list[Any], list[Any]] = ([], [])
        self._in_backward = False
        self._wants_gradient = torch.is_grad_enabled()
        self._rows: list[list[int]] = []
        self._tape: Tape | None = None

    def encode(self, trainable: bool) -> list[Any]:
        """The representations of each tower, all chunks together.

        Raises:
            ValueError: if the model has nothing to train, but ``output_fn`` has.
        """
        keeps_tape = trainable and torch.is_grad_enabled()
        output_fn = self._output_fn if keeps_tape else self._without_parameters
        with torch.set_grad_enabled(keeps_tape), self._audit.first_pass():
            outputs, tape = self._model.forward_chunks(self._calls, output_fn=output_fn, **self._input)
        self._calls = []
        self._tape = tape if keeps_tape else None
        remaining = iter(outputs)
        encoded: list[Any] = []
        for size in self._sizes:
            mine = [representations.detached(next(remaining)) for _ in range(size)]
            self._rows.append([representations.rows_in(output) for output in mine])
            encoded.append(representations.concatenated(mine))
        return encoded

    def _without_parameters(self, output: Any) -> Any:
        """``output_fn`` of a pass that has no second one: says so, should it have something to train."""
        with torch.enable_grad():
            representation = self._output_fn(output)
        if any(tensor.requires_grad for tensor in tensors_in(representation)) and self._wants_gradient:
            raise ValueError(
                "expected get_rep_fn without trainable parameters over a streamed model that is frozen; make the "
                "trainable part a layer of the model, or pass it as the loss's"
            )
        return representation

    def backward(self, gradients: Sequence[Any]) -> None:
        """Pushes the gradient of each tower's representations through the model, in one visit of each shard."""
        tape, self._tape = self._tape, None
        if tape is None or not any(representations.has_gradient(gradient) for gradient in gradients):
            return
        per_chunk: list[Any] = []
        for gradient, rows in zip(gradients, self._rows, strict=True):
            for part in representations.split_gradients(gradient, rows):
                per_chunk.append(part if representations.has_gradient(part) else None)
        self._in_backward = True
        with self._audit.second_pass():
            tape.backward(per_chunk)

    def _noted(self, output_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(output: Any) -> Any:
            representation = output_fn(output)
            self._passes[self._in_backward].append(representations.detached(representation))
            return representation

        return noted

    @property
    def greatest_difference(self) -> float:
        """Greatest difference between the passes, of the chunks that ran in both. Only with ``audit``.

        A model may walk the chunks in another order backward, so each second representation is held against the one
        first representation of its shape that is nearest.
        """
        first, second = self._passes
        worst = self._audit.greatest_difference
        for output in second:
            shapes = [tensor.shape for tensor in tensors_in(output)]
            alike = [other for other in first if [tensor.shape for tensor in tensors_in(other)] == shapes]
            worst = max(worst, min((representations.greatest_difference(o, output) for o in alike), default=0.0))
        return worst
