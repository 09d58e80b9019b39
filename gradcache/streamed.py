"""Runs all chunks of towers that are streamed models (``OffloadModel``) in one forward and one backward per step.

Such a model runs all chunks on each shard while that shard is loaded. GradCache is checkpointing whose outermost
boundary is the representation, so its second pass *is* the recomputation of a checkpointed backward: nothing is
recomputed in addition, and each shard is loaded twice per step for any number of chunks. Towers that are the same model
pass their chunks in one call, so each shard is loaded for all of them at once.

``gradcache`` uses such a model only through the two protocols below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from gradcache import representations
from gradcache.audit import LayerAudit
from gradcache.chunk_inputs import processing
from gradcache.chunks import call_arguments
from pipe.microbatch import gather_nested
from pipe.nested import tensors_in

__all__ = ["StreamedModel", "StreamedTowers", "Tape"]


class Tape(Protocol):
    """The state of one streamed forward that its backward needs."""

    def backward(self, output_gradients: Sequence[Any]) -> None:
        """Runs the model's backward from one gradient per chunk (None: no gradient), in chunk order; usable once."""


@runtime_checkable
class StreamedModel(Protocol):
    """A model whose forward and backward load each shard once, for any number of chunks."""

    def forward_chunks(
        self,
        chunks: Sequence[Any],
        output_fn: Callable[[Any], Any] | None = None,
        input_fn: Callable[[Any], Any] | None = None,
    ) -> tuple[list[Any], Tape]:
        """Detached outputs in chunk order, and the tape.

        A chunk is a tensor or ``(args, kwargs)``; or any value that ``input_fn`` converts to one of these, as part of
        the first shard. ``output_fn`` is applied to each chunk's output as part of the last shard, so it is recomputed
        and differentiated with it.
        """


class StreamedTowers:
    """Runs all towers that are the same streamed model together."""

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
            model: the model of the towers.
            towers: the chunks of each tower.
            output_fn: selects the representations from an output.
            process_fn: converts a chunk to the model's input directly before the model runs, in both passes.
            audit: compare the outputs of these layers, and of ``output_fn``, in the two passes.
        """
        self._model = model
        chunks = [chunk for tower in towers for chunk in tower]
        self._calls = [call_arguments(chunk) for chunk in chunks] if process_fn is None else chunks
        self._input = {} if process_fn is None else {"input_fn": processing(process_fn)}
        self._sizes = [len(chunks) for chunks in towers]
        self._audit = LayerAudit(audit or (), output_fn)
        self._output_fn = output_fn if audit is None else self._audit.output_fn
        self._wants_gradient = torch.is_grad_enabled()
        self._rows: list[list[int]] = []
        self._tape: Tape | None = None

    def encode(self, trainable: bool) -> list[Any]:
        """The representations of each tower, all chunks together.

        Raises:
            ValueError: if the model has no trainable parameters, but ``output_fn`` has.
        """
        keeps_tape = trainable and torch.is_grad_enabled()
        output_fn = self._output_fn if keeps_tape else self._without_parameters
        with torch.set_grad_enabled(keeps_tape), self._audit.listening(compares=False):
            outputs, tape = self._model.forward_chunks(self._calls, output_fn=output_fn, **self._input)
        self._calls = []
        self._tape = tape if keeps_tape else None
        remaining = iter(outputs)
        encoded: list[Any] = []
        for size in self._sizes:
            mine = [representations.detached(next(remaining)) for _ in range(size)]
            self._rows.append([representations.rows_in(output) for output in mine])
            encoded.append(gather_nested(mine))
        return encoded

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

    def backward(self, gradients: Sequence[Any]) -> None:
        """Runs the model's backward from the gradients of all towers' representations, loading each shard once."""
        tape, self._tape = self._tape, None
        if tape is None or not any(representations.has_gradient(gradient) for gradient in gradients):
            return
        split = map(representations.split_gradients, gradients, self._rows)
        with self._audit.listening(compares=True):
            tape.backward([part for parts in split for part in parts])

    @property
    def greatest_difference(self) -> float:
        """Greatest difference between the passes, of the chunks that ran in both. Only with ``audit``."""
        return self._audit.greatest_difference
