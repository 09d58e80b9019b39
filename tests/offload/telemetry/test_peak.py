"""Peaks of the memory of a process."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from offload.telemetry.peak import PeakMeter

MIB = 1 << 20
NEAR = 2 * MIB


def fill(memory: mmap.mmap) -> None:
    for begin in range(0, len(memory), mmap.PAGESIZE):
        memory[begin] = 1


def touch(nbytes: int) -> None:
    """Takes so many bytes of memory, and returns them."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        fill(memory)


def test_a_peak_counts_what_was_returned_meanwhile() -> None:
    meter = PeakMeter(torch.device("cpu"))
    touch(MIB)
    meter.begin()
    if meter.rise() is None:
        pytest.skip("the system does not let a process forget its peak")
    touch(64 * MIB)
    touch(16 * MIB)
    assert meter.rise() == pytest.approx(64 * MIB, abs=NEAR)


def test_a_file_that_is_unmapped_meanwhile_is_no_rise(tmp_path: Path) -> None:
    meter, path = PeakMeter(torch.device("cpu")), tmp_path / "checkpoint"
    path.write_bytes(bytes(64 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # each page is read
        meter.begin()
        if meter.rise() is None:
            pytest.skip("the system does not let a process forget its peak")
    touch(16 * MIB)
    assert meter.rise() == pytest.approx(0, abs=NEAR)  # beside the file there was more memory than now
