"""What a large contrastive batch pays beside its encoders: the loss over all pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradcache.loss import SimpleContrastiveLoss


@pytest.mark.parametrize("tile_rows", [None, 256], ids=["whole", "tiles of 256"])
def test_contrastive_loss_of_2048_pairs(benchmark: Any, tile_rows: int | None) -> None:
    loss_fn = SimpleContrastiveLoss(tile_rows=tile_rows)
    queries, targets = (torch.randn(2048, 128, requires_grad=True) for _ in range(2))

    def work() -> None:
        queries.grad = targets.grad = None
        loss_fn(queries, targets).backward()

    benchmark(work)
    assert queries.grad is not None
