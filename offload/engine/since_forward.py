"""Compares what a backward meets with its forward: buffers that a recomputation reads, and frozen parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from offload.streaming.shard import Shard
from pipe.recompute.rerun import refuse_cached_parametrizations

if TYPE_CHECKING:
    from offload.engine.tape import Tape

__all__ = ["buffers_of", "check_buffers", "frozen", "frozen_again", "refuse_unrepeatable"]


def refuse_unrepeatable(shards: Sequence[Shard]) -> None:
    """Raises RuntimeError before a forward with gradients whose backward would not be that of the bare model."""
    refuse_cached_parametrizations(m for shard in shards for layer in shard.layers for m in layer.modules())
    if any(getattr(p, "_in_backward_optimizers", None) for shard in shards for p in shard.parameters):
        raise RuntimeError(
            "parameters of an OffloadModel have optimizers of _apply_optimizer_in_backward(), which would step before "
            "gradients are stored; use OffloadOptimizer(update_in_backward=True), or step in a hook of "
            "register_post_accumulate_grad_hook()"
        )


def buffers_of(shards: Sequence[Shard]) -> list[Tensor]:
    """The present buffers of all layers: a recomputation reads those of its forward, also if they were replaced."""
    return [b for shard in shards for layer in shard.layers for b in layer.buffers()]


def check_buffers(tape: Tape) -> None:
    """Raises RuntimeError if a buffer that a recomputation reads was written in place since the forward."""
    for cell, rerun in tape.cells.items():
        written = rerun.buffers_written_since if cell.j >= tape.first else []
        if written:
            raise RuntimeError(
                f"buffer {', '.join(written[:3])} of shard {cell.j} was written in place between the forward and its "
                f"backward, which runs the layers again: they would read the new value. Write it after the backward, "
                f"assign a new tensor instead, or use checkpoint_activation=False"
            )


def frozen(shards: Sequence[Shard]) -> list[nn.Parameter]:
    """The parameters that take no gradient now."""
    return [p for p in dict.fromkeys(p for shard in shards for p in shard.parameters) if not p.requires_grad]


@contextlib.contextmanager
def frozen_again(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context in which parameters are frozen, as they were in the forward: a recomputation gives them no gradient."""
    thawed = [p for p in parameters if p.requires_grad]
    for p in thawed:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in thawed:
            p.requires_grad_(True)
