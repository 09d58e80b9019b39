"""The machine's limits: what bounds a step, and that measuring leaves things as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells, measure_limits

MEBIBYTE = 2**20


def limits(**others: object) -> Limits:
    rates = {"matmul_flops": 100.0, "copy_bytes": 10.0, "disk_read_bytes": 4.0, "disk_read_buffered_bytes": 3.0}
    settings = {"threads": 1, "device": "cpu", "dtype": "float32", "disk_write_bytes": 2.0, "direct": True}
    return Limits(**(rates | settings | others))  # type: ignore[arg-type]


def test_a_step_takes_at_least_its_longest_part() -> None:
    assert limits().step_seconds(flops=300.0, copied_bytes=10.0, read_bytes=4.0) == 3.0
    assert limits().step_seconds(flops=100.0, copied_bytes=40.0) == 4.0
    assert limits().step_seconds() == 0.0


def test_a_disk_has_one_queue_and_a_bus_two_directions() -> None:
    assert limits().step_seconds(read_bytes=4.0, written_bytes=4.0) == 1.0 + 2.0
    gpu = limits(device="cuda", host_to_device_bytes=2.0, device_to_host_bytes=1.0)
    assert gpu.step_seconds(loaded_bytes=4.0, drained_bytes=1.0) == 2.0


def test_bytes_to_an_accelerator_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no bytes between host and accelerator on 'cpu', got loaded_bytes=1"):
        limits().step_seconds(loaded_bytes=1.0)


def test_the_distance_is_what_is_left_to_win() -> None:
    assert len(limit_cells(1.5, 1.0)) == len(LIMIT_HEADER)
    assert limit_cells(1.5, 1.0) == ["1 s", "+50%"]
    assert limit_cells(1.5, 0.0) == ["-", "-"]


def test_every_rate_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    measured = measure_limits(tmp_path / "new", file_bytes=4 * MEBIBYTE, side=64, tries=1, threads=1)
    assert measured.threads == 1
    assert torch.get_num_threads() == threads
    assert list((tmp_path / "new").iterdir()) == []
    rates = [measured.matmul_flops, measured.copy_bytes, measured.disk_read_bytes, measured.disk_write_bytes]
    assert all(rate > 0 for rate in rates)
    assert measured.disk_read_bytes >= measured.disk_read_buffered_bytes > 0
    assert "GFLOP/s (float32, cpu)" in measured.line()
    assert measured.as_json()["direct"] == measured.direct


def test_a_file_system_without_direct_access_is_measured_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    measured = measure_limits(tmp_path, file_bytes=4 * MEBIBYTE, side=64, tries=1)
    assert not measured.direct
    assert measured.disk_read_bytes == measured.disk_read_buffered_bytes
    assert "O_DIRECT is refused" in measured.line()


def test_a_file_that_is_not_whole_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"multiple of 4194304 bytes, got file_bytes=5"):
        measure_limits(tmp_path, file_bytes=5)
