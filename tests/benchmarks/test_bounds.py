"""The bounds of each benchmark: each is told when it does not hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import build_huge, memory_latency, optimizer, retrieval
from benchmarks.harness.benchmark import Benchmark, Run, broken_bounds
from benchmarks.harness.case import Outcome
from benchmarks.harness.plot import pareto_front
from benchmarks.memory_latency import FLOOR, PLAIN
from benchmarks.models.methods import DISK, FROM_META, NVME, RESIDENT, difference, save
from benchmarks.optimizer import NAMES
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


# --- optimizer -------------------------------------------------------------------------------------------------------


def trained(
    method: str, seconds: float = 1.0, peak: int = 100, difference: float | None = None, loss: float = 1.0
) -> Outcome:
    steps = [{"seconds": seconds, "loss": loss}]
    result = {"difference": difference, "first": {"loss": 2.0}}
    peer = "deepspeed" if method == NVME else ""
    return outcome(NAMES[method], result, steps=steps, reference=[{"seconds": 1.0}], peaks={"steps": peak}, peer=peer)


@pytest.mark.parametrize(
    ("large", "outcomes", "complaints"),
    [
        (False, [trained(DISK, 1.05, 100, 1e-7), trained(NVME, 1.6, 400)], []),
        (False, [trained(DISK, 1.06)], ["at most 1.050, is 1.060"]),
        (False, [trained(DISK, difference=2e-6)], ["at most 1e-06, is 2e-06"]),
        (False, [trained(DISK, difference=math.nan)], ["is nan"]),
        (False, [trained(DISK), trained(NVME, 1.4, 300)], ["speed-up over DeepSpeed", "memory of DeepSpeed"]),
        (False, [outcome(NAMES[DISK], failure="killed"), trained(NVME)], ["on disk: killed"]),
        (True, [trained(FROM_META, 1.0, 2 << 30), trained(NVME, 1.6, 8 << 30)], []),
        (True, [trained(FROM_META, 1.0, 3 << 30)], ["at most 2,048 MiB, is 3,072 MiB"]),
        (True, [trained(FROM_META, loss=math.nan)], ["losses must be numbers"]),
    ],
)
def test_optimizer(large: bool, outcomes: list[Outcome], complaints: list[str]) -> None:
    groups = {"all": [*([] if large else [trained(RESIDENT)]), *outcomes]}
    check_bounds(optimizer.BENCHMARK, groups, *complaints, parameters=1e9 if large else None)


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
        ([trained("fewer", loss=2.1)], ["fewer: the difference of its loss"]),
        ([trained("ours: 1/2", 100, seconds=1.1), trained("before: 1/2", 100, seconds=1.08)], []),
        (
            [trained("ours: 1/2", 100, seconds=1.1), trained("before: 1/2", 100)],
            ["as before, must be at most 1.030, is 1.100"],
        ),
    ],
)
def test_memory_latency_of_training(cases: list[Outcome], complaints: list[str]) -> None:
    groups = {"in turn": [trained(PLAIN), *cases]}
    check_bounds(memory_latency.BENCHMARK, groups, *complaints, work="training")


def test_a_prediction_of_time_is_held_to_the_steps_it_is_about() -> None:
    late = trained("ours: 1/2", 100)
    late.steps = [{**step, "seconds": 1.2} for step in late.steps]
    groups = {"in turn": [trained(PLAIN), late]}
    check_bounds(memory_latency.BENCHMARK, groups, "seconds must be at most 15.0%, is 16.7%", work="training")


def test_the_front_holds_what_no_other_beats_in_both() -> None:
    assert pareto_front([(1, 5), (2, 3), (3, 4), (4, 1), (2, 6)]) == [(1, 5), (2, 3), (4, 1)]


def test_differences_are_relative_to_each_tensor_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    one, other, less = (tmp_path / name for name in "abc")
    save([("a", torch.tensor([100.0, 0.0])), ("b", torch.tensor([0.01]))], one)
    save([("a", torch.tensor([101.0, 0.0])), ("b", torch.tensor([0.01]))], other)
    save([("a", torch.tensor([101.0, 0.0]))], less)
    assert difference(one, other) == pytest.approx(0.01)
    assert difference(one, tmp_path / "not saved") is None
    with pytest.raises(ValueError, match="the same parameters"):
        difference(one, less)


# --- build-huge ------------------------------------------------------------------------------------------------------


def built(name: str, *losses: float, peak: int = 10, **result: Any) -> Outcome:
    return outcome(name, {"load_seconds": 1.0, **result}, steps=[{"loss": loss} for loss in losses], peaks={"a": peak})


def slower(name: str, ratio: float) -> Outcome:
    found = built(name, 2.0, 1.0)
    found.steps = [{**step, "seconds": ratio} for step in found.steps]
    found.reference = [{"seconds": 1.0}] * 2
    return found


TRAINED = [built("offloaded, capped", 2.0, 1.0), built("resident, no cap", 2.0, 1.0)]


@pytest.mark.parametrize(
    ("outcomes", "complaints"),
    [
        (TRAINED, []),
        ([built("offloaded, capped", out_of_memory="x"), TRAINED[1]], ["offloaded, capped: out of memory: x"]),
        ([built("offloaded, capped", 2.0, 1.0, peak=769 << 20), TRAINED[1]], ["the peak under the cap"]),
        ([built("offloaded, capped", 2.0, 2.0), built("resident, no cap", 2.0, 2.0)], ["the loss must fall"]),
        ([TRAINED[0], built("resident, no cap", 2.0, 1.1)], ["the difference of losses"]),
        ([outcome("offloaded, capped", failure="killed"), TRAINED[1]], ["killed"]),
        ([slower("offloaded, capped", 2.0), slower("offloaded, fewer bytes, capped", 1.1), TRAINED[1]], []),
        (
            [slower("offloaded, capped", 2.1), TRAINED[1]],
            ["the time of a step to the resident one's must be at most 2.00"],
        ),
        ([TRAINED[0], slower("offloaded, fewer bytes, capped", 1.2), TRAINED[1]], ["must be at most 1.10, is 1.20"]),
        ([*TRAINED, built("offloaded, fewer bytes, capped", 2.0, 2.0)], ["fewer bytes, capped: the loss must fall"]),
        (
            [*TRAINED, built("offloaded, fewer bytes, capped", out_of_memory="x")],
            ["fewer bytes, capped: out of memory"],
        ),
    ],
)
def test_build_huge(outcomes: list[Outcome], complaints: list[str]) -> None:
    dead = built("resident, capped", out_of_memory="you tried to allocate 1 byte")
    check_bounds(build_huge.BENCHMARK, {"training": [dead, *outcomes]}, *complaints)
    counted = dict.fromkeys(("bytes_loaded", "bytes_stored", "update_bytes_read", "update_bytes_written"), 100)
    for kernel, complaints in ((396, []), (380, ["kernel's count of bytes"])):
        offloaded = built("offloaded, capped", 2.0, 1.0)
        offloaded.steps = [
            {**step, **counted, "bytes_spilled": 0, "read": kernel, "written": 0} for step in offloaded.steps
        ]
        check_bounds(build_huge.BENCHMARK, {"training": [dead, offloaded, TRAINED[1]]}, *complaints)
    alive = built("resident, capped", 1.0)
    check_bounds(build_huge.BENCHMARK, {"training": [alive, *TRAINED]}, "must not fit under the cap")


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
    def broken(ours: Outcome, other: Outcome, *complaints: str) -> None:
        check_bounds(retrieval.BENCHMARK, {"free": [searched(OURS, [1.0, 2.0])], "capped": [ours, other]}, *complaints)

    name = f"{OURS}, capped"
    ours, dead = searched(name, [1.0]), searched("w", [], failure=NO_MEMORY)
    broken(ours, dead)
    broken(searched(name, [1.001]), dead, "losses must agree")
    broken(searched(name, [math.nan]), dead, "losses must agree")
    broken(ours, searched("w", [1.0]), "but it trained")
    broken(ours, searched("w", [], failure="killed"), "w: killed")
    broken(searched(name, [], failure=NO_MEMORY), dead, f"{name}: exit status 1")


def test_the_cap_is_midway_between_ours_and_the_least_of_the_others() -> None:
    ours, others = searched(OURS, [1.0], 100), [searched("whole", [1.0], 500), searched("cached", [1.0], 200)]
    assert retrieval.midway([ours, *others]) == 150
    assert retrieval.midway([ours, *others, searched("dead", [], 50, NO_MEMORY)]) == 150
    assert retrieval.midway([searched(OURS, [1.0], 200), *others]) is None
    assert retrieval.midway([searched(OURS, [], 100, "killed"), *others]) is None
    assert retrieval.midway([ours]) is None
