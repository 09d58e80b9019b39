"""Autograd functions that copy tensors between stages on separate streams and synchronize streams, in both directions.

A copy on the compute stream would delay the computation of the next micro-batch. So :class:`Copy` runs on copy streams,
with a :class:`Wait` before and after it; each has its reverse as backward::

    forward:   compute ── Wait ──▶ copy stream ── Copy ──▶ copy stream ── Wait ──▶ compute
    backward:  compute ◀── Wait ── copy stream ◀── Copy ── copy stream ◀── Wait ── compute

Invariants
    * The copy of a tensor that needs no gradient needs none; a missing (None) gradient stays None.
    * No memory is reused while a stream that did not allocate it may still read it.

Source: torchgpipe (Kim et al., 2020), section 3.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipe.stream import AbstractStream, current_stream, get_device, record_stream, to_device, use_stream, wait_stream

__all__ = ["Copy", "Wait"]


def _moved(tensors: Any, source: AbstractStream, target: AbstractStream) -> list[Any]:
    """The tensors on the device of ``target``, copied on the two streams."""
    device = get_device(target)
    reader = current_stream(device)
    moved: list[Any] = []
    # Copies between two CUDA devices run on the current stream of the source and order that of the target after it.
    with use_stream(source), use_stream(target):
        for tensor in tensors:
            if tensor is None:
                moved.append(None)
                continue
            copied = tensor.detach() if tensor.device == device else to_device(tensor, device)
            # The tensor was allocated on the compute stream; without this, its memory may be reused during the copy.
            record_stream(tensor, source)
            # The copy was allocated on the copy stream, and is read on the compute stream.
            record_stream(copied, reader)
            moved.append(copied)
    return moved


def _outputs(ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, output: list[Any]) -> tuple[Any, ...]:
    ctx.set_materialize_grads(False)
    ctx.prev_stream, ctx.next_stream = prev_stream, next_stream
    ctx.mark_non_differentiable(*(x for x, needed in zip(output, ctx.needs_input_grad[2:], strict=True) if not needed))
    return tuple(output)


class Copy(torch.autograd.Function):
    """Copies tensors to the device of the next stream."""

    @staticmethod
    def forward(ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *input: Tensor) -> tuple[Any, ...]:
        """The tensors on the next device."""
        return _outputs(ctx, prev_stream, next_stream, _moved(input, prev_stream, next_stream))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor | None) -> tuple[Any, ...]:
        """The gradients on the previous device; copied from the last output to the first, as they were produced."""
        gradients = _moved(reversed(grad_output), ctx.next_stream, ctx.prev_stream)
        return (None, None, *reversed(gradients))


class Wait(torch.autograd.Function):
    """Makes the next stream wait for the previous one in forward, and the previous for the next in backward."""

    @staticmethod
    def forward(ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *input: Tensor) -> tuple[Any, ...]:
        """The same tensors."""
        wait_stream(next_stream, prev_stream)
        return _outputs(ctx, prev_stream, next_stream, [tensor.detach() for tensor in input])

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor | None) -> tuple[Any, ...]:
        """The same gradients."""
        wait_stream(ctx.prev_stream, ctx.next_stream)
        return (None, None, *grad_output)
