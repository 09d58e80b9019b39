"""Models with blocks on a CUDA device. The twins of these tests are in ``test_own_forward``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import OffloadModel, OffloadOptimizer
from tests.offload.blocks.towers import loss_of, make, words
from tests.offload.side_by_side import close

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_steps_are_those_of_the_plain_model(home: str, tmp_path: Path) -> None:
    bare = make(dropout=0.0)
    model: Any = OffloadModel(
        copy.deepcopy(bare),
        "cuda",
        tmp_path if home == "disk" else "cpu",
        checkpoint_activation=True,
        blocks="encoder.layer",
    )
    bare.cuda()
    assert model.words.weight.is_cuda
    assert not model.encoder.layer[0].linear.weight.is_cuda
    plain = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
    ours = OffloadOptimizer(model, torch.optim.SGD, max_norm=0.5, lr=0.05, momentum=0.9)
    for seed in range(3):
        plain.zero_grad()
        ours.zero_grad()
        for each in (bare, model):
            # The words are on the host: the model brings them to its device.
            loss_of(each(words(seed=seed).to("cpu" if each is model else "cuda"))).backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
        plain.step()
        ours.step()
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        assert close(p.detach().cpu(), q.detach().cpu())
