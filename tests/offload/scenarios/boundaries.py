"""Boundaries that leave for a file and return on a lane that is late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload.engine.boundaries import Boundaries
from offload.storage import DiskTier, Scratch
from offload.streaming.lane import StreamCopyLane
from offload.telemetry.statistics import Meter
from tests.late_cuda import DEVICE, LateCuda
from tests.offload.late import LateLane
from tests.waits import fails_with

SEEDS = range(6)


def _boundaries(path: Path, seed: int = 0) -> tuple[Boundaries, Scratch]:
    cpu = torch.device("cpu")
    scratch = DiskTier(path, cpu).scratch()
    assert scratch is not None
    return Boundaries(scratch, LateLane(seed), Meter(cpu), 0), scratch


@fails_with("not what was saved", "read before it was written")
def what_leaves_memory_comes_back(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    for seed in SEEDS:
        save, load = _boundaries(path, seed)[0].hooks((0, 0))
        saved = [save(torch.full((10,), float(k))) for k in range(5)]
        for k in reversed(range(5)):
            assert (load(saved.pop()) == k).all(), "not what was saved"


class _OnLateDevice(Scratch):
    """What it reads back is there when the stream has come to it."""

    name = "late"

    def __init__(self, cuda: LateCuda) -> None:
        self.cuda, self.written = cuda, list[torch.Tensor]()

    def store(self, tensor: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def read_back(destination: torch.Tensor) -> None:
            self.cuda.launch(lambda: self.written.append(destination.copy_(tensor)))

        return read_back


@fails_with("freed while a stream writes it")
def what_nobody_reads_is_freed_when_it_has_been_read_back(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    scratch = _OnLateDevice(LateCuda(monkeypatch))
    boundaries = Boundaries(scratch, StreamCopyLane(DEVICE), Meter(torch.device("cpu")), 0)
    save, load = boundaries.hooks((0, 0))
    first, second, third = (save(torch.full((10,), float(k))) for k in range(3))
    load(third)
    load(second)
    assert not scratch.written, "no read is done before something waits for it"
    del first
    assert any((tensor == 0).all() for tensor in scratch.written), "freed while a stream writes it"
