"""The machine's limits: what bounds a step, and that measuring leaves things as they were."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.harness.io_counters import bytes_of_step, engine_bytes, measure, medium_bytes
from benchmarks.harness.limits import Limits, measure_limits
from benchmarks.harness.table import limit_columns
from tests.benchmarks.here import outcome

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


@pytest.mark.parametrize(
    ("seconds", "least", "cells"),
    [
        (1.5, 1.0, ["1 s", "+50%"]),
        (0.04, 0.02, ["20 ms", "+100%"]),
        (0.05, 0.000025, ["0.025 ms", "+199,900%"]),
        (1.5, 0.0, ["-", "-"]),
    ],
)
def test_the_distance_is_how_much_longer_than_the_limit_a_step_took(
    seconds: float, least: float, cells: list[str]
) -> None:
    columns = limit_columns(limits(), lambda _: least)
    assert [cell(outcome("a", steps=[{"seconds": seconds}])) for cell in columns.values()] == cells


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


def test_a_copy_on_the_device_is_bound_by_the_devices_memory_if_it_has_one() -> None:
    assert limits().step_seconds(copied_bytes=10.0, on_device_bytes=10.0) == 2.0
    gpu = limits(device="cuda", host_to_device_bytes=2.0, device_to_host_bytes=1.0, device_copy_bytes=5.0)
    assert gpu.step_seconds(copied_bytes=10.0, on_device_bytes=10.0) == 2.0
    assert gpu.step_seconds(copied_bytes=30.0, on_device_bytes=10.0) == 3.0
    assert "copy on the device 0.00 GB/s" in gpu.line()


def test_what_is_spilled_is_written_once_and_read_once() -> None:
    step = {"bytes_loaded": 4, "bytes_stored": 2, "bytes_spilled": 1, "update_bytes_read": 8, "update_bytes_written": 6}
    assert engine_bytes(step) == (13, 9)
    assert engine_bytes({"seconds": 1.0}) == (0, 0)


def test_what_the_page_cache_had_is_a_copy_and_not_the_disks() -> None:
    half = [{"read": 8, "from_disk": 2, "written": 4, "to_disk": 4}, {"read": 8, "from_disk": 6, "written": 4}]
    assert medium_bytes(half, copied_bytes=1.0) == {"read_bytes": 4.0, "written_bytes": 4.0, "copied_bytes": 5.0}
    assert limits().step_seconds(**medium_bytes(half)) == 4.0 / 4.0 + 4.0 / 2.0


def test_what_passes_no_call_counts_at_the_device() -> None:
    asynchronous = [{"read": 0, "from_disk": 8, "written": 0, "to_disk": 6}]
    assert bytes_of_step(asynchronous) == (8.0, 6.0)
    assert medium_bytes(asynchronous) == {"read_bytes": 8.0, "written_bytes": 6.0, "copied_bytes": 0.0}


def test_nothing_counted_is_nothing_moved() -> None:
    assert medium_bytes([{"seconds": 1.0}], copied_bytes=3.0) == {
        "read_bytes": 0.0,
        "written_bytes": 0.0,
        "copied_bytes": 3.0,
    }


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="this kernel does not count a process's bytes")
def test_a_step_is_charged_with_the_bytes_that_it_moved_itself(tmp_path: Path) -> None:
    file = tmp_path / "file"
    _, first = measure(lambda: file.write_bytes(bytes(MEBIBYTE)))
    _, second = measure(file.read_bytes)
    assert MEBIBYTE <= first["written"] < 2 * MEBIBYTE
    assert first["read"] < MEBIBYTE  # its own counters are all it read
    assert MEBIBYTE <= second["read"] < 2 * MEBIBYTE
    assert second["written"] < MEBIBYTE


def test_counts_of_a_model_are_differences_and_only_of_what_the_line_of_a_step_holds() -> None:
    @dataclass
    class Model:
        bytes_loaded: int = 1
        shard_loads: int = 1
        statistics = copy.copy

    def step(model: Model) -> str:
        model.bytes_loaded, model.shard_loads = 3, 9
        return "loss"

    model = Model()
    value, counted = measure(lambda: step(model), model)
    assert (value, counted["bytes_loaded"]) == ("loss", 2)
    assert "shard_loads" not in counted
    assert "bytes_loaded" not in measure(lambda: None)[1]
