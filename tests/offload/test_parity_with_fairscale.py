"""Where fairscale's OffloadModel is right, ours agrees with it: changing the import is the whole migration.

Its checks ask for CUDA although nothing in its arithmetic needs it; stand-ins let it run on the CPU here.
"""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

from offload import OffloadModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fairscale.experimental.nn import OffloadModel as FairscaleOffloadModel


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    for method in ("cuda", "pin_memory"):
        monkeypatch.setattr(torch.Tensor, method, lambda tensor, *args, **kwargs: tensor)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("checkpoint_activation", "num_microbatches"), [(True, 1), (True, 3), (False, 1)])
def test_same_arguments_same_outputs_and_gradients(
    on_cpu: None, checkpoint_activation: bool, num_microbatches: int
) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())))
    arguments = {
        "device": torch.device("cpu"),
        "offload_device": torch.device("cpu"),
        "num_slices": 3,
        "checkpoint_activation": checkpoint_activation,
        "num_microbatches": num_microbatches,
    }
    theirs, ours = FairscaleOffloadModel(copy.deepcopy(bare), **arguments), OffloadModel(bare, **arguments)
    x = torch.randn(9, 6)
    outputs = []
    for model in (theirs, ours):
        y = model(x.clone().requires_grad_())
        y.pow(2).sum().backward()
        outputs.append(y.detach())
    torch.testing.assert_close(*outputs)
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
