"""Measures the time and memory of each layer of an ``nn.Sequential``.

Each layer is measured separately, on a copy, with a graph that begins at its input. Skip tensors are passed between
layers as in a model, but detached, since a graph that includes earlier layers would measure these again.

Invariant: the given module, its gradients, buffers and modes, and the generators are not changed.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipe.microbatch import split_nested
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.replay import Replay
from pipe.skip.tracker import SkipTracker, use_skip_tracker
from pipe.torch_private.tensors import memory_of

__all__ = ["profile_sizes", "profile_times"]

T = TypeVar("T")


def _cut(value: Any) -> Any:
    # A clone of the leaf, because an in-place layer may write neither into a leaf nor into the previous layer's output.
    return map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad).clone(), value)


def _on_device(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """A copy of each layer; tensors with a graph that it keeps (a weight of ``weight_norm``) have none there."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"expected nn.Sequential to balance, got {type(module).__name__}")
    for layer in module:
        kept = [tensor for part in layer.modules() for tensor in tensors_in(list(vars(part).values()))]
        copied = copy.deepcopy(layer, {id(t): t.detach().clone() for t in kept if not t.is_leaf}).to(device).train()
        copied.zero_grad(set_to_none=True)
        yield copied


def _measured(
    layers: Iterable[nn.Module],
    sample: Any,
    device: torch.device,
    measure: Callable[[nn.Module, Callable[[], list[Tensor]]], T],
) -> list[T]:
    """What ``measure(layer, run)`` returns for each layer; ``run()`` returns the tensors that it returns or stashes."""
    found = []
    value = map_tensors(lambda t: t.detach().to(device).requires_grad_(t.requires_grad), sample)
    replay, tracker = Replay.capture([device]), SkipTracker()
    with replay.again(), torch.enable_grad(), use_skip_tracker(tracker):
        for layer in layers:
            value = _cut(value)
            before = {key: _cut(tensor) for key, tensor in tracker.items()}
            tracker.update(before)

            def run(layer: nn.Module = layer, before: SkipTracker = before) -> list[Tensor]:
                nonlocal value
                value = layer(value)
                return tensors_in([value, [tensor for key, tensor in tracker.items() if key not in before]])

            found.append(measure(layer, run))
    return found


def profile_times(module: nn.Sequential, sample: Any, timeout: float, device: torch.device) -> list[int]:
    """Microseconds of forward and backward of each layer: the median over rounds begun within ``timeout`` seconds.

    There is at least one, after a warm-up round that is not counted.
    """

    def seconds() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def measure(layer: nn.Module, run: Callable[[], list[Tensor]]) -> float:
        begun = seconds()
        outputs = [t for t in run() if t.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        return seconds() - begun

    layers = list(_on_device(module, device))
    rounds: list[list[float]] = []
    begun = time.perf_counter()
    while len(rounds) < 2 or time.perf_counter() - begun < timeout:
        rounds.append(_measured(layers, sample, device, measure))
    return [max(1, round(1e6 * statistics.median(column))) for column in zip(*rounds[1:], strict=True)]


def profile_sizes(
    module: nn.Sequential, input: Any, chunks: int, param_scale: float, device: torch.device
) -> list[int]:
    """Bytes of each layer in training: activations of one micro-batch, parameters, gradients and optimizer state.

    Activations are counted, not measured: the distinct storages that a forward saves for backward or returns, without
    those of parameters and buffers.
    """

    def measure(layer: nn.Module, run: Callable[[], list[Tensor]]) -> int:
        storages: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storages[memory_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            outputs = run()
        for tensor in outputs:
            count(tensor)
        for tensor in [*layer.parameters(), *layer.buffers()]:
            storages.pop(memory_of(tensor), None)
        parameters = sum(p.numel() * p.element_size() for p in layer.parameters())
        return int(sum(storages.values()) + parameters * param_scale)

    return _measured(_on_device(module, device), split_nested(input, chunks)[0], device, measure)
