"""What a step has to do at the least: arithmetic counted from shapes, and bytes that shapes or an OffloadModel count.

A limit made of these is one of the task and not of a way: a forward and a backward with nothing recomputed, every
parameter touched once. A way that recomputes stands further from it by exactly what that costs, and no way can be
nearer than nought.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["adamw_bytes", "block_flops", "counted_between", "engine_bytes", "gradient_bytes"]

#: What an OffloadModel counts of its traffic: the fields of ``offload.Statistics`` that a step's line tells.
COUNTED = ("bytes_loaded", "bytes_stored", "bytes_spilled", "update_bytes_read", "update_bytes_written", "wait_seconds")


def block_flops(dim: int, tokens: int, positions: int) -> float:
    """Of the matrix products of one transformer block's forward, multiply-adds two each; a backward is twice that.

    Four square matrices of attention and eight of the perceptron see every token; scores and what they select are two
    products over the ``positions`` tokens of its row.
    """
    return float(tokens) * (24 * dim**2 + 4 * positions * dim)


def gradient_bytes(parameters: float, itemsize: int = 4) -> float:
    """Copied at the least by a forward and a backward: each parameter is read, and its gradient is written."""
    return float(itemsize * parameters)


def adamw_bytes(parameters: float) -> float:
    """Copied at the least by AdamW in float32, where a copied byte is one read and one written.

    A parameter, its gradient and both moments are read: 16 bytes. All but the gradient are written: 12.
    """
    return 14.0 * parameters


def counted_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """What was counted from one moment to another; nothing where nobody counts."""
    return {name: after[name] - before[name] for name in COUNTED if name in after}


def engine_bytes(step: Mapping[str, Any]) -> tuple[float, float]:
    """What an OffloadModel counts of a step: loaded from its home and stored there, by passes and by updates.

    What is spilled is stored once and comes back.
    """
    spilled = step.get("bytes_spilled", 0)
    loaded = step.get("bytes_loaded", 0) + step.get("update_bytes_read", 0) + spilled
    return loaded, step.get("bytes_stored", 0) + step.get("update_bytes_written", 0) + spilled
