"""Layers that say they take turns, and write down what they are told (nothing is loaded)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pipe.turn import TakesTurns


class Turner(nn.Sequential):
    """A stage of a pipe with fewer devices than stages."""

    def __init__(self, *layers: nn.Module, device: str = "cpu") -> None:
        super().__init__(*layers)
        self.device = torch.device(device)
        self.log: list[str] = []
        self.name = ""
        self.still = 0

    def forward(self, x: Any) -> Any:
        assert self.still or torch._C._current_graph_task_id() != -1, "used while weights may change"
        self.log.append(self.name)
        return super().forward(x)

    def share_slots(self, stages: Sequence[Sequence[TakesTurns]]) -> None:
        log: list[str] = []
        for k, stage in enumerate(stages):
            for turner in stage:
                assert isinstance(turner, Turner)
                turner.log, turner.name = log, f"{k} of {len(stages)}"

    @contextlib.contextmanager
    def frozen_weights(self) -> Iterator[None]:
        self.still += 1
        try:
            yield
        finally:
            self.still -= 1

    def prefetch(self, *, backward: bool = False) -> None:
        self.log.append(f"next is {self.name}{', back' if backward else ''}")
