"""Finds writes of a block into lists and dicts of its arguments, which are copies where a backward follows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipe.nested import flatten

__all__ = ["ContainerWrites"]

_IMMUTABLE = (Tensor, bool, int, float, str, type(None))


class ContainerWrites:
    """The contents of lists and dicts in an (args, kwargs) pair before a block ran."""

    def __init__(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        args, kwargs = call
        self._containers = [x for x in (*args, *kwargs.values()) if not isinstance(x, _IMMUTABLE)]
        self._before = flatten(self._containers) if self._containers else None

    def refuse(self, block: str) -> None:
        """Raises RuntimeError if the contents have changed."""
        if self._before is None:
            return
        leaves, spec = flatten(self._containers)
        before, spec_before = self._before
        if spec != spec_before or any(x is not y for x, y in zip(leaves, before, strict=True)):
            raise RuntimeError(
                f"block {block} changed a list or a dict that it got as an argument; with gradients a block gets a "
                f"copy, since it runs again in backward, so its caller would not see the change. Let the block return "
                f"what it adds, and the code that calls it add that"
            )
