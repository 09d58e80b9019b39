"""The bounds of each benchmark: each is told when it does not hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import memory_latency, retrieval
from benchmarks.harness.benchmark import Benchmark, Run, broken_bounds
from benchmarks.harness.case import Outcome
from benchmarks.memory_latency import FLOOR, PLAIN
from benchmarks.models.methods import difference, save
from tests.benchmarks.here import outcome

OURS = retrieval.NAMES[retrieval.OURS]
NO_MEMORY = (
    "exit status 1: RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 25165824 bytes. Error code 12 (Cannot allocate memory)"
)


def check_bounds(benchmark: Benchmark, groups: dict[str, list[Outcome]], *complaints: str, **settings: Any) -> None:
    broken = broken_bounds(benchmark, Run(benchmark.settings(**settings), groups=groups))
    assert len(broken) == len(complaints), broken
    for line, complaint in zip(broken, complaints, strict=True):
        assert complaint in line


# --- memory-latency --------------------------------------------------------------------------------------------------


def trained(
    name: str, memory: int = 0, peak: int = 100, seconds: float = 1.0, loss: float = 2.0, **predicted: float
) -> Outcome:
    return outcome(
        name,
        {"bytes": peak << 20, "seconds": seconds, **predicted},
        arguments={"how": {"memory": memory << 20} if memory else {}},
        steps=[{"seconds": seconds, "loss": loss}] * 3,
        reference=[{"seconds": 1.0}] * 3,
        moments={FLOOR: 0},
        peaks={"planning": peak << 20, "steps": peak << 20},
    )


@pytest.mark.parametrize(
    ("cases", "complaints"),
    [
        ([trained("ours: all of it", 100, seconds=1.02), trained("ours: 1/2", 50, 50, seconds=9.0)], []),
        ([trained("ours: all of it", 100, seconds=1.03)], ["the ratio of times must be at most 1.020, is 1.030"]),
        ([trained("ours: 1/2", 50, 88)], ["the peak must be at most 87 MiB, is 88 MiB"]),
        ([trained("ours: 1/2", 100, bytes=94 << 20)], ["the predicted bytes must be at most 5.0%, is 6.0%"]),
        ([trained("ours: 1/2", 100, loss=2.1)], ["ours: 1/2: the difference of its loss"]),
        ([trained("ours: 1/2", 100, seconds=1.1), trained("before: 1/2", 100)], ["as before, must be at most 1.030"]),
    ],
)
def test_memory_latency_of_training(cases: list[Outcome], complaints: list[str]) -> None:
    groups = {"in turn": [trained(PLAIN), *cases]}
    check_bounds(memory_latency.BENCHMARK, groups, *complaints, work="training")


def test_differences_are_relative_to_each_tensor_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    one, other, less = (tmp_path / name for name in "abc")
    save([("a", torch.tensor([100.0, 0.0])), ("b", torch.tensor([0.01]))], one)
    save([("a", torch.tensor([101.0, 0.0])), ("b", torch.tensor([0.01]))], other)
    save([("a", torch.tensor([101.0, 0.0]))], less)
    assert difference(one, other) == pytest.approx(0.01)
    assert difference(one, tmp_path / "not saved") is None
    with pytest.raises(ValueError, match="the same parameters"):
        difference(one, less)


# --- retrieval -------------------------------------------------------------------------------------------------------


def searched(name: str, losses: Sequence[float], needs: int = 0, failure: str | None = None) -> Outcome:
    is_ours = name.startswith(OURS)
    steps = [{"loss": loss} for loss in losses]
    result = None if failure else {"held_out": 10}
    more = {"failure": failure, "steps": steps, "data_peak_bytes": needs, "may_lack_memory": not is_ours}
    return outcome(name, result, arguments={"method": "gradcache-offload" if is_ours else "whole"}, **more)


def test_retrieval_needs_equal_losses_and_a_method_in_memory_may_find_none() -> None:
    def broken(*free: Outcome, complaints: Sequence[str] = ()) -> None:
        check_bounds(retrieval.BENCHMARK, {"free": list(free)}, *complaints)

    ours = searched(OURS, [1.0, 2.0])
    broken(ours, searched("b", [1.0, 2.0]))
    broken(ours, searched("b", [1.0, 2.001]), complaints=["the difference of losses"])
    broken(ours, searched("b", [1.0, math.nan]), complaints=["is nan"])
    broken(ours, searched("b", [], failure="killed"), complaints=["b: killed"])
    broken(ours, searched("b", [], failure=NO_MEMORY))
    broken(searched(OURS, [], failure=NO_MEMORY), complaints=[f"{OURS}: exit status 1"])


def test_under_the_cap_only_ours_trains_and_to_its_losses() -> None:
    name = f"{OURS}, capped"
    ours, dead = searched(name, [1.0]), searched("w", [], failure=NO_MEMORY)
    for mine, other, complaints in (
        (ours, dead, []),
        (searched(name, [math.nan]), dead, ["losses must agree"]),
        (ours, searched("w", [1.0]), ["but it trained"]),
        (ours, searched("w", [], failure="killed"), ["w: killed"]),
        (searched(name, [], failure=NO_MEMORY), dead, [f"{name}: exit status 1"]),
    ):
        groups = {"free": [searched(OURS, [1.0, 2.0])], "capped": [mine, other]}
        check_bounds(retrieval.BENCHMARK, groups, *complaints)


def test_the_cap_is_midway_between_ours_and_the_least_of_the_others() -> None:
    ours, others = searched(OURS, [1.0], 100), [searched("whole", [1.0], 500), searched("cached", [1.0], 200)]
    assert retrieval.midway([ours, *others]) == 150
    assert retrieval.midway([ours, *others, searched("dead", [], 50, NO_MEMORY)]) == 150
    assert retrieval.midway([searched(OURS, [1.0], 200), *others]) is None
    assert retrieval.midway([searched(OURS, [], 100, "killed"), *others]) is None
    assert retrieval.midway([ours]) is None
