"""Frozen parameters take no room for gradients, whenever they were frozen; what is computed is claimed by the fuzz."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer

WIDTH = 64


@pytest.mark.parametrize("resident", [None, "*.bias"])
def test_gradients_take_the_room_of_what_trains(tmp_path: Path, resident: str | None) -> None:
    """Of parameters that stay on the compute device nothing is in files.

    The room shrinks and grows where parameters are frozen and thawed between steps, and no more is written.
    """
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = OffloadModel(layers, "cpu", tmp_path, 4, True, resident=resident)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW)
    for thawed in [False, True, False]:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(thawed or "bias" in name)
        trained = [p for p in model.parameters() if p.requires_grad]
        before = model.statistics()
        model(torch.randn(6, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        optimizer.synchronize()
        after = model.statistics()
        nbytes = sum(p.nbytes for p in trained if p.dim() > 1 or not resident)
        assert thawed or {p.grad.untyped_storage().nbytes() for p in trained} == {WIDTH * 4}
        assert after.bytes_stored - before.bytes_stored == nbytes
        assert after.update_bytes_written - before.update_bytes_written <= 3 * nbytes + 4096 * 4
        optimizer.zero_grad()
