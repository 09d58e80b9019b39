"""Frozen parameters take no room for gradients, whenever they were frozen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from tests.offload.blocks.towers import assert_equal

WIDTH, RANK = 64, 2


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank update, which comes last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(folder: Path, layers: int = 4, **more: Any) -> tuple[nn.Sequential, OffloadModel]:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Adapted() for _ in range(layers)))
    model = OffloadModel(
        copy.deepcopy(plain), "cpu", f"{folder}/", num_slices=layers, checkpoint_activation=True, **more
    )
    return plain, model


def backward(plain: nn.Module, model: nn.Module, seed: int) -> None:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
    for one in (plain, model):
        one(x).pow(2).mean().backward()


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("keep", [False, True], ids=["none", "kept"])
@pytest.mark.parametrize("most", [None, 2000], ids=["whole", "pieces"])
def test_freezing_and_thawing_between_steps_is_that_of_the_plain_model(
    tmp_path: Path, max_norm: float | None, keep: bool, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are kept over such a switch go on being added to, and the room for others shrinks and grows."""
    if most is not None:
        monkeypatch.setattr("offload.optim.update_blocks.MAX_BLOCK_BYTES", most)
    plain, model = adapted(tmp_path)
    optimizer = OffloadOptimizer(model, torch.optim.Adam, lr=0.01, fused=False, max_norm=max_norm)
    expected = torch.optim.Adam(plain.parameters(), lr=0.01, foreach=False)
    for step, thawed in enumerate([False, True, True, False, False, True]):
        for one in (plain, model):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(thawed if "base" in name else not (thawed and "1.up" in name))
        backward(plain, model, step)
        assert_equal(plain, model)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, foreach=False)
        for one in (optimizer, expected):
            one.step()
        if not keep:
            for one in (optimizer, expected):
                one.zero_grad()
            if not thawed:
                backward(plain, model, step)
                sizes = {p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None}
                assert sizes == {2 * WIDTH * RANK * 4}
                for one in (optimizer, expected):
                    one.zero_grad()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
