"""Runs any module chunk by chunk, first without a graph and then again with a graph (the two passes of GradCache).

::

    pass 1    for chunk i:   rep[i] = model(chunk[i])            no graph; random states and changed buffers kept
    loss      d(loss)/d(rep) for every row of the big batch
    pass 2    for chunk i:   rep[i] = model(chunk[i]) again      one chunk's graph, freed by its backward

Invariant: pass 2 computes the results of pass 1. It has the same random numbers (also those drawn after the model, in
``get_rep_fn``), the same autocast, the same buffers and the same input, even if the model writes into its input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcache import representations
from gradcache.context_managers import RandContext, devices_in_use
from gradcache.nested import map_tensors, tensors_in
from offload.identities import identities_only
from pipe.recompute.input_writes import InputWrites
from pipe.recompute.module_state import WatchedModule
from pipe.recompute.rerun import RepeatableLayers, Rerun

__all__ = ["ChunkState", "InputGradients", "backward", "encode", "first_pass", "is_trainable", "repeatable"]

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
        if links:
            representations.push([tensor for tensor, _ in links], [grad for _, grad in links])


class ChunkState(RandContext):
    """The state of one chunk's first pass that its second pass needs. As a context it replays the random states."""

    def __init__(self, rerun: Rerun) -> None:
        super().__init__(replay=rerun.replay)
        self._rerun = rerun
        self.rows = 0
        self.requires_grad = True
        self.first: Any = None

    def second_pass(self, chunk: Any, encoder: Encoder, gradient: Any, check: Check | None = None) -> float:
        """Runs the chunk again with a graph, calls ``check(output, chunk)``, and runs backward from ``gradient``.

        Returns the greatest difference from the first pass's representations, if they were kept (else 0).
        """
        # Buffers keep the values of the first pass until backward is done, which may read them.
        with contextlib.ExitStack() as until_backward, torch.enable_grad():
            output = self._rerun.repeat(encoder, chunk, until=until_backward)
            difference = 0.0 if self.first is None else representations.greatest_difference(self.first, output)
            self.first = None
            if check is not None:
                check(output, chunk)
            representations.backward([output], [gradient])
        return difference


def repeatable(model: nn.Module) -> RepeatableLayers:
    """A model that can run again; the devices of its chunks are not known yet."""
    inputs = InputWrites(f"the model ({type(model).__name__})", map_tensors, tensors_in)
    return RepeatableLayers(WatchedModule(model), (), inputs)


def first_pass(
    layers: RepeatableLayers, chunk: Any, encoder: Encoder, tensors: Any = None, with_graph: bool = False
) -> tuple[Any, ChunkState]:
    """One chunk's representation, detached, and the state that its second pass needs.

    ``with_graph``: find out whether the representation needs a gradient.
    """
    # All devices in use, since a wrapper may move the chunk to any of them.
    layers.devices = devices_in_use(tensors_in(chunk) if tensors is None else tensors) | layers.watched.devices
    rerun = layers.rerun()
    with rerun.first(), torch.set_grad_enabled(with_graph):
        output = layers.run(encoder, chunk, rerun)
    state = ChunkState(rerun)
    state.requires_grad = not with_graph or any(tensor.requires_grad for tensor in tensors_in(output))
    output = representations.detached(output)
    state.rows = representations.rows_in(output)
    return output, state


@identities_only()
def is_trainable(model: nn.Module, chunks: Sequence[Any]) -> bool:
    """Whether any parameter of the model or any input needs a gradient."""
    wanted = any(parameter.requires_grad for parameter in model.parameters())
    return wanted or any(tensor.requires_grad for tensor in tensors_in(list(chunks)))


def encode(
    model: nn.Module,
    chunks: Sequence[Any],
    encoder: Encoder,
    tensors_of: Callable[[Any], list[Tensor]],
    audit: bool,
    joined: representations.Joined,
) -> tuple[Any, list[Any]]:
    """The first pass: all representations, detached, ``joined``, and one state per chunk.

    A model without trainable parameters runs its first chunk with grad mode on (its graph then saves nothing) to find
    out whether ``get_rep_fn`` has trainable parameters; if not, ``requires_grad`` is False in all states.
    """
    frozen = torch.is_grad_enabled() and not is_trainable(model, chunks)
    layers = repeatable(model)
    states: list[Any] = []
    for i, chunk in enumerate(chunks):
        output, state = first_pass(layers, chunk, encoder, tensors_of(chunk), with_graph=frozen and i == 0)
        state.first = output if audit else None
        state.requires_grad = states[0].requires_grad if states else state.requires_grad
        joined.add(output)
        states.append(state)
    return joined.value(), states


def backward(
    chunks: Sequence[Any],
    gradients: Sequence[Any],
    states: Sequence[Any],
    encoder: Encoder,
    inputs: InputGradients,
    check: Check | None = None,
) -> float:
    """The second pass over all chunks; ``check`` is called for the first one.

    Returns the greatest difference between the passes, see ``ChunkState``.
    """
    difference = 0.0
    for chunk, gradient, state in zip(chunks, gradients, states, strict=True):
        if not representations.has_gradient(gradient):
            continue
        chunk = inputs.as_leaves(chunk)
        if isinstance(state, ChunkState):
            difference = max(difference, state.second_pass(chunk, encoder, gradient, check))
            check = None
        else:  # a state from a user's own forward_no_grad replays only random states
            with torch.enable_grad(), state:
                output = encoder(chunk)
            representations.backward([output], [gradient])
    return difference
