"""Runs layers that are called one after the other, over all micro-batches of one shard before the next shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from offload.calls import to_device
from offload.engine.engine import Engine
from offload.engine.recorder import Recorder
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.replay import trial

__all__ = ["measured_activations", "run_layers"]


def run_layers(
    engine: Engine,
    layers: Sequence[Sequence[nn.Module]],
    chunks: Sequence[Any],
    *,
    output_fns: Sequence[Callable[[Any], Any] | None] = (),
    input_fn: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
    dtype: torch.dtype | None = None,
) -> list[Any]:
    """The outputs of ``chunks``, arguments of the first layer, with one graph.

    Args:
        layers: of each shard.
        output_fns: applied to the output of each chunk, as a part of the last shard.
        input_fn: makes the arguments of a chunk, which then may be any object. What it makes gets no gradient.
        dtype: to which floating-point inputs are cast; None: as they are.
    """
    brought = partial(to_device, engine.device, dtype)
    if input_fn is None:
        values: list[Any] = list(map_tensors(brought, list(chunks)))
    else:  # made when the first layers run, and again when they run again
        values = [((chunk,), {}) for chunk in chunks]

    def run() -> None:
        engine.expect([tensors_in(chunk) for chunk in chunks])
        for j, several in enumerate(layers):
            first, last = j == 0, j == len(layers) - 1
            block = engine.blocks[j][0]
            for i, value in enumerate(values):
                output_fn = output_fns[i] if last and output_fns else None
                call = _in_turn(several, output_fn)
                if first and input_fn is not None:
                    call = _made(call, input_fn, brought)
                args, kwargs = block.protected(*value) if first else ((value,), {})
                values[i] = engine.run(block, call, args, kwargs, i)

    engine.forward(run)
    return values


def measured_activations(
    engine: Engine,
    layers: Sequence[Sequence[nn.Module]],
    call: Any,
    *,
    output_fn: Callable[[Any], Any] | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """The most bytes that autograd saves in one cell for a chunk (args, kwargs); 0 if no parameter takes a gradient.

    Runs a trial forward, which leaves buffers and generators unchanged.
    """
    recorders = [Recorder(several[0].weights.shard, None) for several in engine.blocks]
    watched = [block.region for several in engine.blocks for block in several]

    def run() -> None:
        with trial(watched):
            args, kwargs = map_tensors(partial(to_device, engine.device, dtype), call)
            for j, several in enumerate(layers):
                function = _in_turn(several, output_fn if j == len(layers) - 1 else None)
                with saved_tensors_hooks(partial(_recorded, recorders[j]), lambda saved: saved):
                    output = engine.run(engine.blocks[j][0], function, args, kwargs)
                args, kwargs = (map_tensors(_apart, output),), {}
                del output  # with the graph of the cell

    with torch.enable_grad():
        engine.forward(run, lambda j, i: True)
    return max(sum(recorder.nbytes.values()) for recorder in recorders)


def _recorded(recorder: Recorder, tensor: Tensor) -> Tensor:
    recorder.add(tensor)
    return tensor.detach()


def _apart(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()  # layers must not write leaves in place


def _made(
    call: Callable[..., Any], input_fn: Callable[[Any], Any], brought: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    def run(chunk: Any) -> Any:
        with torch.no_grad():
            args, kwargs = map_tensors(brought, input_fn(chunk))
        return call(*args, **kwargs)

    return run


def _in_turn(layers: Sequence[nn.Module], output_fn: Callable[[Any], Any] | None) -> Callable[..., Any]:
    if len(layers) == 1 and output_fn is None:
        return layers[0]

    def call(*args: Any, **kwargs: Any) -> Any:
        first, *rest = layers
        value = first(*args, **kwargs)
        for layer in rest:
            value = layer(value)
        return value if output_fn is None else output_fn(value)

    return call
