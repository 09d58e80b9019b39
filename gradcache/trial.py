"""Tests whether layers treat rows independently, so that several chunks may run concatenated.

Layers do not declare this. So two chunks run through the layers separately and concatenated, in evaluation mode, and
the results are compared. A layer that mixes rows only in training is detected by the buffers that it updates (batch
normalisation); one that updates none is not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.regroup import joined, runs_alike
from pipe.microbatch import rows_of
from pipe.nested import tensors_in
from pipe.recompute.input_writes import copy_of
from pipe.recompute.replay import Replay, devices_of

__all__ = ["treats_rows_apart"]


def treats_rows_apart(calls: Sequence[Callable[[Any], Any]], modules: Sequence[nn.Module], pair: Sequence[Any]) -> bool:
    """Whether layers compute the same for two concatenated chunks as for each of them separately.

    Args:
        calls: the layers.
        modules: all modules in them.
        pair: two chunks that can be concatenated.

    Restores generators; must not be called if layers update buffers.
    """
    modes = [module.training for module in modules]
    rows = rows_of(pair[0]) + rows_of(pair[1])
    try:
        for module in modules:
            module.training = False
        parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
        with torch.no_grad(), Replay.capture(devices_of(list(pair), parameters)).again():
            alone, together = [copy_of(chunk) for chunk in pair], copy_of(joined(pair))
            for call in calls:
                alone, together = [call(value) for value in alone], call(together)
                if runs_alike(alone, rows) != [[0, 1]] or not _rows_are(together, rows):
                    return False
                if not _close(joined(alone), together):
                    return False
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
    return True


def _rows_are(value: Any, rows: int) -> bool:
    return all(tensor.dim() > 0 and tensor.size(0) == rows for tensor in tensors_in(value))


def _close(a: Any, b: Any) -> bool:
    for x, y in zip(tensors_in(a), tensors_in(b), strict=True):
        if x.is_floating_point() or x.is_complex():
            # Kernels may add in another order for another shape; a layer that mixes rows differs by much more.
            tolerance = 16 * torch.finfo(x.dtype).eps ** 0.5
            if not torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True):
                return False
        elif not torch.equal(x, y):
            return False
    return True
