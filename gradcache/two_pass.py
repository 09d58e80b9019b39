"""The two-pass walk: any module, chunk by chunk, first without a graph and then once more with one.

::

    pass 1    for chunk i:   rep[i] = model(chunk[i])            no graph; replay and moved buffers kept
    loss      d(loss)/d(rep) for every row of the big batch
    pass 2    for chunk i:   rep[i] = model(chunk[i]) again      one chunk's graph, freed by its backward

Invariant: pass 2 computes what pass 1 computed. It sees the same random numbers (also those drawn after the model, in
``get_rep_fn``), the same autocast, the same buffers and the same input, even if the model writes over its input.
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
from pipe.input_writes import InputWrites
from pipe.recompute.module_state import WatchedModule
from pipe.recompute.rerun import RepeatableLayers, Rerun

__all__ = ["ChunkState", "FirstPass", "InputGradients", "backward", "encode", "is_trainable"]

Encoder = Callable[[Any], Any]
Check = Callable[[Any, Any], None]


class InputGradients:
    """Gradients of the inputs themselves, pushed into whatever computed them once, when all chunks are done.

    Each chunk is a view of the user's tensor. Run through one by one, the graph before the towers would be freed by the
    first chunk's backward; and each chunk would write a gradient of the whole input's size.
    """

    def __init__(self) -> None:
        self._links: list[tuple[Tensor, Tensor]] = []

    def cut(self, chunk: Any) -> Any:
        """The chunk with its graph cut off; the cut tensors collect gradients."""

        def leaf_of(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            self._links.append((tensor, leaf))
            return leaf

        return map_tensors(leaf_of, chunk)

    def flow(self) -> None:
        """Pushes the collected gradients on, in one backward."""
        links = [(tensor, leaf.grad) for tensor, leaf in self._links if leaf.grad is not None]
        self._links.clear()
        if links:
            representations.push([tensor for tensor, _ in links], [grad for _, grad in links])


class ChunkState(RandContext):
    """What one chunk's first pass leaves behind for its second. Entered as a context it replays the random states."""

    def __init__(self, rerun: Rerun) -> None:
        super().__init__(replay=rerun.replay)
        self._rerun = rerun
        self.rows = 0
        self.requires_grad = True
        self.first: Any = None

    def second_pass(self, chunk: Any, encoder: Encoder, gradient: Any, check: Check | None = None) -> float:
        """The chunk again with a graph, and ``gradient`` through it, after ``check(output, chunk)``.

        Returns:
            The greatest difference from the first pass's representations, where they were kept (else 0).
        """
        # Buffers stay as they were until backward is done, which may read them.
        with contextlib.ExitStack() as until_backward, torch.enable_grad():
            output = self._rerun.repeat(encoder, chunk, until=until_backward)
            difference = 0.0 if self.first is None else representations.greatest_difference(self.first, output)
            self.first = None
            if check is not None:
                check(output, chunk)
            representations.backward(output, gradient)
        return difference


class FirstPass:
    """Runs the chunks of one model without a graph and notes what each second pass needs."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        inputs = InputWrites(f"the model ({type(model).__name__})", map_tensors, tensors_in)
        self._layers = RepeatableLayers(WatchedModule(model), (), inputs)

    def run(
        self, chunk: Any, encoder: Encoder, tensors: Any = None, with_graph: bool = False
    ) -> tuple[Any, ChunkState]:
        """One chunk's representation, detached, and its state. ``with_graph``: tell whether it wants a gradient."""
        layers = self._layers
        # Wherever a wrapper may move the chunk to.
        layers.devices = devices_in_use(tensors_in(chunk) if tensors is None else tensors, self._parameters)
        rerun = layers.rerun()
        with rerun.first(), torch.set_grad_enabled(with_graph):
            output, _ = layers.run(encoder, chunk, rerun=rerun)
        state = ChunkState(rerun)
        if with_graph:
            state.requires_grad = any(tensor.requires_grad for tensor in tensors_in(output))
        output = representations.detached(output)
        state.rows = representations.rows_in(output)
        return output, state


def is_trainable(model: nn.Module, chunks: Sequence[Any]) -> bool:
    """Whether the model's parameters or its input want a gradient."""
    wanted = any(parameter.requires_grad for parameter in model.parameters())
    return wanted or any(tensor.requires_grad for tensor in tensors_in(list(chunks)))


def encode(
    model: nn.Module, chunks: Sequence[Any], encoder: Encoder, tensors_of: Callable[[Any], list[Tensor]], audit: bool
) -> tuple[Any, list[ChunkState]]:
    """The first pass: all representations, detached, and one state per chunk.

    A model without a trainable parameter runs its first chunk with a graph (which then saves nothing) to learn whether
    ``get_rep_fn`` brings trainable parameters of its own; if not, ``requires_grad`` is False in all states.
    """
    frozen = torch.is_grad_enabled() and not is_trainable(model, chunks)
    first_pass = FirstPass(model)
    outputs: list[Any] = []
    states: list[ChunkState] = []
    for i, chunk in enumerate(chunks):
        output, state = first_pass.run(chunk, encoder, tensors_of(chunk), with_graph=frozen and i == 0)
        state.first = output if audit else None
        state.requires_grad = states[0].requires_grad if states else state.requires_grad
        outputs.append(output)
        states.append(state)
    return representations.concatenated(outputs), states


def backward(
    chunks: Sequence[Any],
    gradients: Sequence[Any],
    states: Sequence[Any],
    encoder: Encoder,
    inputs: InputGradients,
    check: Check | None = None,
) -> float:
    """The second pass over all chunks, of which ``check`` sees the first one's graph.

    Returns the greatest difference between the passes, see ``ChunkState``.
    """
    difference = 0.0
    for chunk, gradient, state in zip(chunks, gradients, states, strict=True):
        if not representations.has_gradient(gradient):
            continue
        chunk = inputs.cut(chunk)
        if isinstance(state, ChunkState):
            difference = max(difference, state.second_pass(chunk, encoder, gradient, check))
            check = None
            continue
        with torch.enable_grad():  # a state of a user's own forward_no_grad knows random states only
            with state:
                output = encoder(chunk)
            representations.backward(output, gradient)
    return difference
