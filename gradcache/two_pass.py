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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcache import representations
from gradcache.buffers import BufferStates, BufferTrace
from gradcache.context_managers import RandContext
from pipe.nested import map_tensors, tensors_in

__all__ = ["ChunkState", "InputGradients", "backward", "encode", "is_trainable"]

Encoder = Callable[[Any], Any]


class ChunkState(RandContext):
    """What one chunk's first pass leaves behind for its second. Entered as a context it replays the random states."""

    def __init__(self, *tensors: Any) -> None:
        super().__init__(*tensors)
        self.buffers = BufferStates([])
        self.rows = 0
        self.requires_grad = True
        self.copy_input = False
        self.first: Any = None

    @contextlib.contextmanager
    def around_backward(self) -> Iterator[None]:
        """The chunk's buffers; they stay until its backward is done, which may read them."""
        with self.buffers.again():
            yield


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
            torch.autograd.backward([tensor for tensor, _ in links], [grad for _, grad in links])


def is_trainable(model: nn.Module, chunks: Sequence[Any]) -> bool:
    """Whether the model's parameters or its input want a gradient."""
    wanted = any(parameter.requires_grad for parameter in model.parameters())
    return wanted or any(tensor.requires_grad for tensor in tensors_in(list(chunks)))


def _copied(chunk: Any) -> Any:
    return map_tensors(torch.clone, chunk)


def encode(
    model: nn.Module, chunks: Sequence[Any], encoder: Encoder, tensors_of: Callable[[Any], list[Tensor]], audit: bool
) -> tuple[Any, list[ChunkState]]:
    """The first pass: all representations, detached, and one state per chunk.

    A model without a trainable parameter runs its first chunk with a graph (which then saves nothing) to learn whether
    ``get_rep_fn`` brings trainable parameters of its own; if not, ``requires_grad`` is False in all states.
    """
    frozen = torch.is_grad_enabled() and not is_trainable(model, chunks)
    requires_grad = not frozen
    copy_input = False
    trace = BufferTrace(model)
    parameters = list(model.parameters())
    outputs: list[Any] = []
    states: list[ChunkState] = []
    for i, chunk in enumerate(chunks):
        state = ChunkState(tensors_of(chunk), parameters)
        trace.before_chunk()
        # The first chunk runs on a copy: should the model write over it, the original is still there to learn from.
        given = _copied(chunk) if copy_input or i == 0 else chunk
        versions = [tensor._version for tensor in tensors_in(given)]
        with torch.set_grad_enabled(frozen and i == 0):
            output = encoder(given)
        if frozen and i == 0:
            requires_grad = any(tensor.requires_grad for tensor in tensors_in(output))
        written = versions != [tensor._version for tensor in tensors_in(given)]
        copy_input = copy_input or (written and i == 0)
        if written and not copy_input:
            raise ValueError(
                f"expected a model that treats all chunks alike, but chunk {i} was changed in place and chunk 0 was "
                f"not; pass a process_fn that clones what the model writes over"
            )
        state.seal()
        state.buffers = trace.after_chunk()
        state.copy_input = copy_input
        outputs.append(representations.detached(output))
        state.rows = representations.rows_in(outputs[-1])
        state.first = outputs[-1] if audit else None
        states.append(state)
    for state in states:
        state.requires_grad = requires_grad
    return representations.concatenated(outputs), states


def backward(
    chunks: Sequence[Any],
    gradients: Sequence[Any],
    states: Sequence[Any],
    encoder: Encoder,
    inputs: InputGradients,
) -> float:
    """The second pass: each chunk again with a graph, and its rows' gradient through it.

    Returns:
        The greatest difference between the two passes' representations, where the states kept the first (else 0).
    """
    difference = 0.0
    for chunk, gradient, state in zip(chunks, gradients, states, strict=True):
        if not representations.has_gradient(gradient):
            continue
        # States of a user's own forward_no_grad know random states only.
        known = state if isinstance(state, ChunkState) else None
        with known.around_backward() if known is not None else contextlib.nullcontext(), torch.enable_grad():
            given = inputs.cut(chunk)
            if known is not None and known.copy_input:
                given = _copied(given)
            with state:
                output = encoder(given)
            if known is not None and known.first is not None:
                difference = max(difference, representations.greatest_difference(known.first, output))
                known.first = None
            representations.backward(output, gradient)
    return difference
