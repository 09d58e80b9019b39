"""Memory on whole pages, and the threads that fill it."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadModel
from offload.storage.buffer import PAGE_BYTES, host_buffer

CPU = torch.device("cpu")


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 1_000_003, 5 << 20])
def test_a_host_buffer_is_zero_on_a_page_and_has_exactly_its_bytes(nbytes: int) -> None:
    buffer = host_buffer(nbytes)
    assert buffer.numel() == buffer.untyped_storage().nbytes() == nbytes
    assert not nbytes or buffer.data_ptr() % PAGE_BYTES == 0
    assert not buffer.any()


def test_a_host_buffer_is_freed_with_its_last_view() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * os.sysconf("SC_PAGESIZE")

    nbytes = 1 << 30
    before = mapped()
    view = host_buffer(nbytes)[64:128].view(torch.float32)
    assert mapped() >= before + nbytes
    del view
    gc.collect()
    assert mapped() < before + nbytes


def test_slots_on_the_cpu_begin_on_a_page(tmp_path: Path) -> None:
    """So that a file is read into them without a copy."""
    model = OffloadModel([nn.Linear(30, 30), nn.Linear(30, 30)], "cpu", f"{tmp_path}/", checkpoint_activation=False)
    model(torch.zeros(1, 30))
    slots = {parameter.untyped_storage().data_ptr() for parameter in (shard.slot for shard in _loaded(model))}
    assert slots
    assert all(address % PAGE_BYTES == 0 for address in slots)


def _loaded(model: OffloadModel) -> list[Any]:
    return [shard for shard in model._homes.shards if shard._slot is not None]
