"""Runs any module chunk by chunk, first without a graph and then again with a graph (the two passes of GradCache).

::

    pass 1    for chunk i:   rep[i] = model(chunk[i])            no graph; random states and changed buffers kept
    loss      d(loss)/d(rep) for every row of the big batch
    pass 2    for chunk i:   rep[i] = model(chunk[i]) again      one chunk's graph, freed by its backward

Invariant: pass 2 computes the results of pass 1. It has the same random numbers (also those drawn after the model, in
``get_rep_fn``), the same autocast, the same buffers and the same input, even if the model writes into its input.

A second forward is the same function only if every generator that the first one drew from is rewound: the CPU's, each
device's (a wrapper may move CPU inputs to an accelerator, so the devices of inputs are not enough), Python's and
NumPy's. :class:`RandContext` is the interface of the package ``GradCache`` for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gradcache import representations
from offload.identities import identities_only
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.replay import Layers, Replay, devices_of

__all__ = [
    "ChunkState",
    "InputGradients",
    "RandContext",
    "device_of",
    "devices_in_use",
    "first_pass",
    "is_trainable",
    "repeatable",
]


def device_of(*owners: Any) -> torch.device:
    """The device that the first module computes on, or that the first tensor is on; the CPU if there is neither."""
    for owner in owners:
        stated = getattr(owner, "device", None) if isinstance(owner, nn.Module) else None
        if isinstance(stated, (torch.device, str)):  # an offloaded model's parameters are on another device
            return torch.device(stated)
        for tensor in owner.parameters() if isinstance(owner, nn.Module) else tensors_in(owner):
            return tensor.device
    return torch.device("cpu")


def devices_in_use(*values: Any) -> set[torch.device]:
    """Devices of the tensors in ``values``, and every device of an accelerator that this process has initialized.

    Saving the state of an unused generator costs a copy on the host; omitting one that is used gives another dropout
    mask in the second pass.
    """
    devices = devices_of(*values)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if not hasattr(module, "is_initialized") or module.is_initialized():
            devices |= {torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())}
    return devices


class RandContext:
    """The present random states and autocast settings, to be entered as a context around a second forward.

    Args:
        *tensors: inputs of the forward that is about to run; their devices are included besides those in use.
        replay: states that were saved already, to be used instead.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), section 3.
    """

    def __init__(self, *tensors: Any, replay: Replay | None = None) -> None:
        self._replay = Replay.capture(devices_in_use(*tensors)) if replay is None else replay
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._replay.again())

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


Encoder = Callable[[Any], Any]
Check = Callable[[Any, Any], None]


class InputGradients:
    """Collects the gradients of the inputs, and runs backward into the graph before the towers once, after all chunks.

    Each chunk is a view of the user's tensor. If each chunk ran backward into the graph before the towers, the first
    one would free that graph, and each would write a gradient of the size of the whole input.
    """

    def __init__(self) -> None:
        self._links: list[tuple[Tensor, Tensor]] = []

    def as_leaves(self, chunk: Any) -> Any:
        """The chunk with its tensors replaced by new leaves, whose gradients are collected."""

        def leaf_of(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            self._links.append((tensor, leaf))
            return leaf

        return map_tensors(leaf_of, chunk)

    def backward(self) -> None:
        """Runs one backward from the inputs, with the collected gradients."""
        links = [(tensor, leaf.grad) for tensor, leaf in self._links if leaf.grad is not None]
        self._links.clear()
        representations.push([tensor for tensor, _ in links], [grad for _, grad in links])


class ChunkState(RandContext):
    """The state of one chunk's first pass that its second pass needs. As a context it replays the random states."""

    def __init__(self, layers: Layers, replay: Replay) -> None:
        super().__init__(replay=replay)
        self._layers = layers
        self.rows = 0
        self.requires_grad = True

    def second_pass(self, chunk: Any, encoder: Encoder, gradient: Any, check: Check | None = None) -> None:
        """Runs the chunk again with a graph, calls ``check(output, chunk)``, and runs backward from ``gradient``."""
        # Buffers keep the values of the first pass until backward is done, which may read them.
        with contextlib.ExitStack() as until_backward, torch.enable_grad():
            output = self._layers.repeat(encoder, chunk, self._replay, until=until_backward)
            if check is not None:
                check(output, chunk)
            representations.backward([output], [gradient])


def repeatable(model: nn.Module) -> Layers:
    """A model that can run again; the devices of its chunks are not known yet."""
    return Layers(model, name=f"the model ({type(model).__name__})")


def first_pass(
    layers: Layers, chunk: Any, encoder: Encoder, tensors: Sequence[Tensor], with_graph: bool = False
) -> tuple[Any, ChunkState]:
    """One chunk's representation, detached, and the state that its second pass needs.

    ``tensors``: those of the chunk. ``with_graph``: find out whether the representation needs a gradient.
    """
    # All devices in use, since a wrapper may move the chunk to any of them.
    layers.devices = devices_in_use(tensors) | layers.own_devices
    replay = layers.begin()
    with replay.first(), torch.set_grad_enabled(with_graph):
        output = layers.run(encoder, chunk, replay)
    state = ChunkState(layers, replay)
    state.requires_grad = not with_graph or any(tensor.requires_grad for tensor in tensors_in(output))
    output = representations.detached(output)
    state.rows = representations.rows_in(output)
    return output, state


@identities_only()
def is_trainable(model: Any, chunks: Sequence[Any]) -> bool:
    """Whether any parameter of the model, if that is a module, or any input needs a gradient."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return any(parameter.requires_grad for parameter in parameters) or any(
        tensor.requires_grad for tensor in tensors_in(list(chunks))
    )
