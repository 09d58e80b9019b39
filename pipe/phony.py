"""Phonies: empty tensors that exist only to carry an edge of the autograd graph.

Autograd orders two operations only if one uses a tensor of the other. A phony is that tensor where there is no value
to pass: it costs no memory and no arithmetic.

Source: torchgpipe (Kim et al., 2020), section 3.2.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pipe.torch_private.autograd import outside_inference_mode
from pipe.torch_private.dispatch import without_modes

__all__ = ["get_phony"]


@functools.cache
def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """The phony of a device: shape ``(0,)``, made once.

    Inside an autograd function return ``phony.detach()``: otherwise the function would become the producer
    (``grad_fn``) of the shared tensor.
    """
    # It outlives the call, so it must not depend on the modes of the first caller: an inference tensor can never be
    # part of a graph, and a fake tensor belongs to its mode.
    with outside_inference_mode(), without_modes():
        return torch.empty(0, device=device, requires_grad=requires_grad)
