"""Words that ranks compare: one for a parameter or for a step of an optimizer, equal on all ranks if that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from offload.mesh.parts import Part
    from offload.streaming.contract import ModelOptimizer

__all__ = ["described", "described_step"]


def described(part: Part) -> str:
    """A parameter in one word."""
    return f"{part.name}{list(part.shape)}{str(part.dtype).removeprefix('torch.')}".replace(" ", "")


def described_step(optimizer: ModelOptimizer, gradients: Sequence[int]) -> str:
    """Class and options of a step in one word; ``gradients``: of each group, how many parameters have one."""
    words = [optimizer.factory.kind.__name__, f"max_norm={optimizer.max_norm}"]
    for group, count in zip(optimizer.param_groups, gradients, strict=True):
        words.append(f"gradients={count}of{len(group['params'])}")
        words += [f"{key}={_plain(value)}" for key, value in sorted(group.items()) if key != "params"]
    return f"step({','.join(words)})".replace(" ", "")


def _plain(value: object) -> str:
    """A value that is the same text on all ranks if it is equal: the type only where the text may be an address."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_plain, value))})"
    known = value is None or isinstance(value, (bool, int, float, str))
    return str(value) if known else type(value).__name__
