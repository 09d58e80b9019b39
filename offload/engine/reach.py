"""How far a backward goes: for requested gradients (``inputs=``, ``autograd.grad``) no further than autograd would.

Shards and blocks that no requested gradient needs are skipped, since their backward hooks must not run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from offload.engine.glue import Glue
from offload.engine.shard_runners import ShardRunners
from pipe.torch_private.autograd import has_hooks
from pipe.torch_private.modules import has_backward_hooks

__all__ = ["Reach"]


@dataclass(frozen=True)
class Reach:
    """The first shard and block that a backward runs, from the last one down."""

    #: The first shard that runs; the number of shards if none does.
    shard: int
    #: The first block that runs: 0, or one inside that shard.
    block: int = 0
    #: The first block whose input needs its gradient.
    entered: int = 0

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardRunners],
        first: int,
        glue: Glue | None,
        requested: Collection[nn.Parameter] | None,
        *,
        to_inputs: bool,
    ) -> Reach:
        """The reach of a backward; ``first``: the first shard of its forward with a graph.

        ``requested``: the only parameters that get a gradient; None: all get one. ``to_inputs``: the inputs, too.
        Raises RuntimeError where hooks of modules would run that autograd does not run.
        """
        _refuse_others(shards, requested)
        count = shards[-1].steps.stop
        # The first block to which code leads that uses requested parameters.
        entered = count if glue is None else glue.begin_backward(requested, to_inputs)
        if requested is None or to_inputs:
            return cls(first)
        if glue is not None:
            _refuse_hooks(shards, glue, entered)
        storing = (each.shard.index for each in shards if not {*each.shard.parameters}.isdisjoint(requested))
        leading = (each.shard.index for each in shards if entered in each.steps)
        asked, led = min(storing, default=len(shards)), min(leading, default=len(shards))
        return cls(min(asked, led), entered if led < asked else 0, entered)

    def needs_input(self, j: int, steps: range) -> bool:
        """Whether shard ``j``, of these blocks, computes the gradient of what enters it."""
        return j > self.shard or self.entered <= steps[0]


def _refuse_hooks(shards: Sequence[ShardRunners], glue: Glue, entered: int) -> None:
    """Refuses backward hooks that would also run for gradients that plain autograd does not compute.

    A block computes the gradients of all that enters it; autograd, only of what leads to requested parameters.
    """
    for each in shards:
        for block, runner in zip(each.steps, each.runners, strict=True):
            if block >= entered and glue.several_enter(block) and has_backward_hooks(_modules(runner.modules)):
                raise RuntimeError(
                    f"gradients of parameters around blocks were requested (inputs=, torch.autograd.grad), and modules "
                    f"of block {block}, which several tensors enter, have backward hooks: these would run for all of "
                    f"them; remove the hooks, or call backward() without inputs="
                )


def _refuse_others(shards: Sequence[ShardRunners], requested: Collection[nn.Parameter] | None) -> None:
    """Refuses hooks on, and requests for, gradients of parameters that blocks use by no argument.

    Autograd adds these to ``.grad`` block by block, so that a hook or a request would see only a part.
    """
    for runner in (runner for each in shards for runner in each.runners):
        for p in runner.other_parameters if runner.others else ():
            if has_hooks(p) or (requested is not None and p in requested):
                raise RuntimeError(
                    f"a parameter of the shape {tuple(p.shape)} has hooks or its gradient was requested (inputs=, "
                    f"torch.autograd.grad), and block {runner.names[0]} uses it though it is none of its arguments (an "
                    f"attribute, a closure, a module that it got): only a part of the gradient would be seen. Pass it "
                    f"to the block as an argument, such as block(x, self.table.weight)"
                )


def _modules(layers: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for layer in layers for module in layer.modules()]
