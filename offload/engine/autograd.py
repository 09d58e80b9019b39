"""Attaches a forward of an ``OffloadModel`` to autograd: all shards are one node of the user's graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offload.engine.cell import Cell
from offload.engine.executor import Executor
from offload.engine.state_before import StateBefore
from offload.engine.tape import Tape
from pipe.checkpoint import refuse_double_backward
from pipe.microbatch import gather_nested
from pipe.nested import flatten, tensors_in, unflatten
from pipe.phony import get_phony
from pipe.torch_private.autograd import (
    accumulates_everywhere,
    has_hooks,
    is_requested,
    keeps_graph,
    run_hooks_with_gradient_only,
)
from pipe.torch_private.dispatch import with_subclasses

__all__ = ["attach"]


class _Node:
    """One forward: maps the nested values of the user to the flat tensors of autograd."""

    def __init__(self, executor: Executor, tape: Tape, outputs: Sequence[Any]) -> None:
        self.executor = executor
        self.saved: Tape | None = tape
        self.held: list[Tape] = []
        #: For each micro-batch, the rows of each leaf of its output; None if it is not a tensor.
        self.rows = [[_rows(leaf) for leaf in flatten(output)[0]] for output in outputs]
        leaves, self.spec = flatten(gather_nested(list(outputs)))
        # A leaf that needs a gradient in one micro-batch needs it in the gathered output.
        n = len(executor.runners)
        columns = zip(*(tape.requires[Cell(n, i)] for i in range(tape.microbatches)), strict=True)
        wanted = [k for k, column in enumerate(columns) if any(column)]
        # A tensor that occurs more than once in the output is one result.
        first: dict[int, int] = {}
        self.same_as = {k: first.setdefault(id(leaves[k]), k) for k in wanted}
        self.differentiable = list(dict.fromkeys(self.same_as.values()))
        self.results: list[Tensor] = [leaves[k] for k in self.differentiable]
        self.leaves = leaves
        tape.state.parameters = tape.trainable

    # Autograd frees saved tensors as soon as backward is done, unless the graph is retained. The tape replaces a saved
    # tensor, so it has the same lifetime. Without this it would live until the user deletes the loss, at the same time
    # as the tape of the next step.

    def pack(self, tensor: Tensor) -> Any:
        """Saves the tape in place of the one tensor that the node saves."""
        tape, self.saved = self.saved, None
        return tensor if tape is None else tape

    def unpack(self, saved: Any) -> Tensor:
        """Passes the tape to the running backward."""
        if isinstance(saved, Tape):
            self.held.append(saved)
            return torch.empty(0)
        assert isinstance(saved, Tensor)
        return saved


def _split(gradient: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    if gradient.layout is torch.strided:
        parts: Sequence[Tensor] = gradient.split(sizes)
        return parts
    ends = itertools.accumulate(sizes)
    return [gradient.narrow_copy(0, end - size, size) for size, end in zip(sizes, ends, strict=True)]


def _rows(leaf: Any) -> int | None:
    return leaf.size(0) if isinstance(leaf, Tensor) and leaf.dim() else None


class _Offload(torch.autograd.Function):
    """Returns the outputs of a forward; its backward is the backward of the executor.

    Its inputs are the user's and then the parameters, so that ``autograd.grad`` for parameters alone reaches it.
    Requested parameters, and those with hooks, get their gradient from autograd, which runs the hooks once on the whole
    gradient. The others get None from autograd: their stored gradients are added to shard by shard.
    """

    @staticmethod
    def forward(ctx: Any, node: _Node, phony: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.node = node
        ctx.save_for_backward(phony.detach())
        results, node.results = node.results, []
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_double_backward("an OffloadModel")
        node: _Node = ctx.node
        _ = ctx.saved_tensors  # raises torch's own error if the graph was freed
        tape = node.held.pop()
        if tape.used:
            raise RuntimeError(
                "a backward through this forward failed before, and what it needs is freed; run the forward again"
            )
        for kept in tape.kept.values():
            kept.source.refuse_other_ways(kept.outputs)
        output_gradients: list[list[Any]] = [[None] * len(row) for row in node.rows]
        for k, gradient in zip(node.differentiable, gradients, strict=True):
            if gradient is None:
                continue
            sizes = [row[k] for row in node.rows]
            parts = [gradient] if len(sizes) == 1 else _split(gradient, [size or 0 for size in sizes])
            for row, part in zip(output_gradients, parts, strict=True):
                row[k] = part
        everywhere = accumulates_everywhere()
        parameters = tape.state.parameters
        to_inputs = True
        if everywhere:
            returned = [p for p in parameters if has_hooks(p)]
        else:
            requested = [edge is not None and is_requested(edge) for edge, _ in ctx.next_functions]
            first = len(requested) - len(parameters)
            returned = [p for p, asked in zip(parameters, requested[first:], strict=True) if asked]
            to_inputs = any(requested[1:first])  # after the phony
        node.executor.public.refuse_requests(returned)
        # Without consuming, the whole tape would stay in memory until the end of backward; plain autograd, too, frees
        # saved tensors one by one, unless the graph is retained.
        try:
            with with_subclasses():
                back, taken = node.executor.backward(
                    tape,
                    output_gradients,
                    consume=not keeps_graph(),
                    accumulate=everywhere,
                    returned=returned,
                    to_inputs=to_inputs,
                )
        except BaseException as error:
            # After an interrupt, boundaries of the tape may be half copied. After an error of the disk a loop repeats
            # the whole batch, while the traceback still holds this forward: no later backward waits for it.
            if tape.used or isinstance(error, OSError) or not isinstance(error, Exception):
                tape.discard()
            raise
        for parameter in returned if everywhere else ():
            if parameter not in taken:
                run_hooks_with_gradient_only(parameter)
        inputs = _joined(back, tape, ctx.needs_input_grad[2 : len(ctx.needs_input_grad) - len(parameters)])
        return (None, None, *inputs, *(taken.get(p) for p in parameters))


def _joined(back: list[list[Any]], tape: Tape, needed: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of the inputs, from those of their micro-batches."""
    joined: list[Tensor | None] = []
    positions = [k for k, leaf in enumerate(tape.inputs[0]) if isinstance(leaf, Tensor)]
    for k, wanted in zip(positions, needed, strict=True):
        gradients = [row[k] for row in back]
        if not wanted or all(gradient is None for gradient in gradients):
            joined.append(None)
            continue
        inputs = [row[k] for row in tape.inputs]
        parts = [torch.zeros_like(x) if g is None else g.to(x) for g, x in zip(gradients, inputs, strict=True)]
        if len(parts) == 1:
            joined.append(parts[0])
        elif inputs[0].dim() == 0:  # every micro-batch got it whole
            joined.append(torch.stack(parts).sum(0))
        else:
            joined.append(torch.cat(parts))
    return joined


def attach(executor: Executor, tape: Tape, outputs: Sequence[Any], inputs: Any) -> Any:
    """The gathered output of a forward as a result of ``inputs``, the user's nested arguments, in the user's graph.

    ``outputs``: one for each micro-batch, detached.
    """
    before = StateBefore(executor.device)
    try:
        node = _Node(executor, tape, outputs)
        leaves = list(node.leaves)
        if node.differentiable:
            phony = get_phony(executor.device, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(node.pack, node.unpack):
                parameters = executor.public.for_autograd(tape.state.parameters)
                results = _Offload.apply(node, phony, *tensors_in(inputs), *parameters)  # type: ignore[no-untyped-call]
            made = dict(zip(node.differentiable, results, strict=True))
            for k, first in node.same_as.items():
                leaves[k] = made[first]
        node.leaves = []
        return unflatten(leaves, node.spec)
    except BaseException:
        before.restore()
        tape.discard()
        raise
