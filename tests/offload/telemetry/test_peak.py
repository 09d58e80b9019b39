"""Peaks of the memory of a process."""

from __future__ import annotations

import mmap

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
