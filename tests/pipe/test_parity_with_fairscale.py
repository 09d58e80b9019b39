"""Where fairscale's Pipe is right, ours agrees with it: changing the import is the whole migration."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from pipe import Pipe

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fairscale.nn import Pipe as FairscalePipe


@pytest.mark.filterwarnings("ignore:fairscale.nn.Pipe has been upstreamed:DeprecationWarning")
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_same_arguments_same_outputs_and_gradients(checkpoint: str, chunks: int) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    arguments = {"balance": [2, 2], "devices": ["cpu", "cpu"], "chunks": chunks, "checkpoint": checkpoint}
    theirs, ours = FairscalePipe(copy.deepcopy(bare), **arguments), Pipe(bare, **arguments)
    x = torch.randn(7, 4)
    outputs, gradients = [], []
    for model in (theirs, ours):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.pow(2).sum().backward()
        outputs.append(y.detach())
        gradients.append([leaf.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)
