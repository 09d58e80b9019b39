"""Runs ``process_fn`` on each chunk directly before the model needs it, in both passes, without keeping the results.

Processed chunks (decoded images, padded tokens) may be much larger than raw ones. So only those that are passed to the
first layer together exist at a time; the second pass processes its chunk again, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradcache.chunks import call_arguments
from gradcache.nested import map_tensors, tensors_in
from pipe.recompute.replay import Replay, devices_of

__all__ = ["ChunkInputs", "InputFn", "has_graph", "processing"]

InputFn = Callable[[Any], Any]


def has_graph(process_fn: InputFn | None, chunks: Sequence[Any]) -> bool:
    """Whether the results of ``process_fn`` need a gradient, so that it must run once, with its graph kept."""
    trained = isinstance(process_fn, nn.Module) and any(p.requires_grad for p in process_fn.parameters())
    return trained or any(tensor.requires_grad for tensor in tensors_in(list(chunks)))


def processing(process_fn: InputFn) -> InputFn:
    """A function from a raw chunk to the first layer's (args, kwargs); raises ValueError if these need a gradient."""

    def process(chunk: Any) -> Any:
        with torch.enable_grad():
            call = call_arguments(process_fn(chunk))
        if any(tensor.requires_grad for tensor in tensors_in(call)):
            raise ValueError(
                "expected a process_fn without trainable parameters of its own, since it runs again in the second "
                "pass over layers; make it an nn.Module, or a layer of the model"
            )
        return call

    return process


class ChunkInputs:
    """The chunks of one forward as (args, kwargs), by number.

    With ``input_fn``, each is made when it is requested, and made again with the same random numbers when it is
    requested again.
    """

    def __init__(self, chunks: Sequence[Any], input_fn: InputFn | None, devices_from: Sequence[Any]) -> None:
        self._input_fn = input_fn
        self._chunks = list(chunks) if input_fn is not None else [call_arguments(chunk) for chunk in chunks]
        self._devices = devices_of(self._chunks, list(devices_from)) if input_fn is not None else set()
        self._replays: dict[int, Replay] = {}
        self._ahead: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def known(self) -> Sequence[Any] | None:
        """All chunks, or None with ``input_fn``."""
        return self._chunks if self._input_fn is None else None

    def look(self, i: int) -> Any:
        """Chunk ``i``, kept until :meth:`take` returns it."""
        if self._input_fn is None:
            return self._chunks[i]
        if i not in self._ahead:
            self._ahead[i] = self.take(i)
        return self._ahead[i]

    def take(self, i: int) -> Any:
        """Chunk ``i``, detached from any graph."""
        if self._input_fn is None:
            return map_tensors(torch.Tensor.detach, self._chunks[i])
        if i in self._ahead:
            return self._ahead.pop(i)
        if i in self._replays:
            with self._replays[i].again():
                return self._input_fn(self._chunks[i])
        replay = Replay.capture(self._devices)
        value = self._input_fn(self._chunks[i])
        self._replays[i] = replay.record_changes()
        return value
