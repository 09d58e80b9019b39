"""The machine's limits: what bounds a step, and that measuring leaves things as they were."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.harness.io_counters import file_work, measure
from benchmarks.harness.limits import least_seconds, measure_rates
from benchmarks.harness.table import limit_columns
from tests.benchmarks.here import outcome

MEBIBYTE = 2**20
RATES = {"flops": 100.0, "copied_bytes": 10.0, "read_bytes": 4.0, "written_bytes": 2.0}
GPU = RATES | {"loaded_bytes": 2.0, "drained_bytes": 1.0, "on_device_bytes": 5.0}


def test_a_step_takes_at_least_its_longest_part() -> None:
    assert least_seconds(RATES, {"flops": 300.0, "copied_bytes": 10.0, "read_bytes": 4.0}) == 3.0
    assert least_seconds(RATES, {"flops": 100.0, "copied_bytes": 40.0}) == 4.0
    assert least_seconds(RATES, {}) == 0.0


def test_a_disk_has_one_queue_and_a_bus_two_directions() -> None:
    assert least_seconds(RATES, {"read_bytes": 4.0, "written_bytes": 4.0}) == 1.0 + 2.0
    assert least_seconds(GPU, {"loaded_bytes": 4.0, "drained_bytes": 1.0}) == 2.0


def test_without_an_accelerator_all_bytes_are_copied_in_one_memory() -> None:
    work = {"copied_bytes": 10.0, "on_device_bytes": 10.0}
    assert least_seconds(RATES, work) == 2.0
    assert least_seconds(GPU, work) == 2.0
    assert least_seconds(GPU, work | {"copied_bytes": 30.0}) == 3.0


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
    columns = limit_columns(RATES)
    found = outcome("a", steps=[{"seconds": seconds}], work={"flops": 100 * least})
    assert [cell(found) for cell in columns.values()] == cells


def test_a_limit_adds_the_work_of_the_case_what_is_counted_and_the_bytes_of_files() -> None:
    found = outcome("a", steps=[{"seconds": 8.0, "read": 8, "from_disk": 8}], work={"read_bytes": 4})
    columns = limit_columns(RATES, lambda o: {"written_bytes": 2}, files=True)
    assert columns["limit"](found) == "4 s"
    assert limit_columns(RATES)["limit"](outcome("a", {}, work={"flops": 1})) == "-"  # it took no step


@pytest.mark.parametrize("direct", [True, False])
def test_every_rate_is_measured_and_nothing_is_left_behind(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    threads = torch.get_num_threads()
    rates, line = measure_rates(tmp_path, file_bytes=4 * MEBIBYTE, side=64, tries=1, threads=1)
    assert torch.get_num_threads() == threads
    assert list(tmp_path.iterdir()) == []
    assert rates.keys() == RATES.keys()
    assert min(rates.values()) > 0
    assert "GFLOP/s (float32, cpu), memory copy" in line


def test_what_the_page_cache_had_is_a_copy_and_not_the_disks() -> None:
    half = [{"read": 8, "from_disk": 2, "written": 4, "to_disk": 4}, {"read": 8, "from_disk": 6, "written": 4}]
    assert file_work(half) == {"read_bytes": 4.0, "written_bytes": 4.0, "copied_bytes": 4.0}


def test_what_passes_no_call_counts_at_the_device() -> None:
    asynchronous = [{"read": 0, "from_disk": 8, "written": 0, "to_disk": 6}]
    assert file_work(asynchronous) == {"read_bytes": 8.0, "written_bytes": 6.0, "copied_bytes": 0.0}


def test_nothing_counted_is_nothing_moved() -> None:
    assert set(file_work([{"seconds": 1.0}]).values()) == {0}


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
