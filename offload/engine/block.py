"""What is known of one block, or of consecutive layers that run as one: what its runs write, draw and cast.

It is learned in the first runs of each combination of modes, so that later ones look at less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from offload.engine.weights import Bound, Weights
from pipe.nested import map_tensors
from pipe.recompute.replay import Layers, Modes

__all__ = ["RUNS_NOTED", "Block", "Known", "has_cache"]

#: Runs of each combination of modes in which it is found out what a block writes.
RUNS_NOTED = 2


class Known:
    """What is known of a block in one combination of modes."""

    __slots__ = ("draws", "modes", "runs")

    def __init__(self, modes: Modes) -> None:
        self.modes = modes
        self.runs = 0
        #: Whether a run drew random numbers; None if there was none with a graph yet.
        self.draws: bool | None = None


class Block:
    """The layers of a block, and what is known of them.

    Args:
        weights: of its shard.
        region: its modules.
        name: for errors.
        place: its place among the blocks of the shard, and their number.
        select: operations whose results are kept where the block is recomputed, see :mod:`.selected`.
    """

    def __init__(
        self,
        weights: Weights,
        region: Layers,
        name: str,
        *,
        place: tuple[int, int] = (0, 1),
        select: str | Collection[Any] = (),
    ) -> None:
        self.weights, self.region, self.name, self.place, self.select = weights, region, name, place, select
        #: Whether its graph is always kept, since a second run would write its weights again.
        self.keeps = False
        #: Whether a run has written weights.
        self.writes = False
        self.inputs = region.inputs
        self._known: dict[Modes, Known] = {}

    def known(self) -> Known:
        """What is known of it in its present modes."""
        modes = self.region.modes
        found = self._known.get(modes)
        if found is None:
            found = self._known[modes] = Known(modes)
        return found

    def protected(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Arguments of the user, or copies where the block may write into them in place."""
        # Tensors that are made in inference mode count no writes.
        if torch.is_inference_mode_enabled() or self.inputs.copies(self.known().modes):
            return map_tensors(Tensor.clone, (args, kwargs))
        return args, kwargs

    def run(
        self, call: Callable[..., Any], weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of ``call``, in which its modules have these weights; none: they have their own."""
        with Bound(self.weights, weights):
            output = call(*args, **kwargs)
        if not weights:
            return output
        slot = weights[0].untyped_storage().data_ptr()

        def own(value: Tensor) -> Tensor:
            # Without the copy, an output that is a view of the slot would change with the next load.
            in_slot = value.layout is torch.strided and value.untyped_storage().data_ptr() == slot
            return value.clone() if in_slot else value

        return own(output) if isinstance(output, Tensor) else map_tensors(own, output)


def has_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a block gets a cache of keys and values, into which a second run would write again."""
    every = (*args, *kwargs.values())
    objects = [x for x in every if not isinstance(x, (Tensor, NoneType, bool, int, float, str, tuple, list, dict))]
    return any(hasattr(x, "get_seq_length") and hasattr(x, "update") for x in objects)
