"""The bounds of each benchmark: each is told when it does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import memory_latency
from benchmarks.harness.benchmark import Benchmark, Run, broken_bounds
from benchmarks.harness.case import Outcome
from benchmarks.memory_latency import FLOOR, PLAIN
from benchmarks.models.methods import difference, save
from tests.benchmarks.here import outcome


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
