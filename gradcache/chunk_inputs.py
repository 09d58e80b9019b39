"""Runs ``process_fn`` on each chunk as a part of a streamed model's first shard, without keeping the results.

Processed chunks (decoded images, padded tokens) may be much larger than raw ones. So only the one that is passed to the
first layer exists at a time; the recomputation processes its chunk again, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradcache.chunks import call_arguments
from gradcache.nested import tensors_in

__all__ = ["has_graph", "processing"]

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
