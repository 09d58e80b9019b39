"""A call of an OffloadModel that is answered by the caller of the forward around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offload import OffloadModel
from pipe.interception import intercepting


def test_intercepted_micro_batches_are_gathered_without_loads() -> None:
    model = OffloadModel(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        "cpu",
        num_slices=2,
        num_microbatches=3,
        checkpoint_activation=False,
    )
    seen: list[Any] = []

    def handler(module: Any, micro_batches: Sequence[Any]) -> list[Any]:
        seen.append(module)
        return [args[0] + 1 for args, _ in micro_batches]

    x = torch.arange(10.0).view(5, 2)
    with intercepting(handler):
        assert torch.equal(model(x), x + 1)
    assert seen == [model]
    assert model.statistics().shard_loads == 0
