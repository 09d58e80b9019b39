"""The question ``build-huge``: its rungs train the same model, the cap is a cap, and its bounds are bounds."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.build_huge.question import _table, broken_bounds, limit_seconds
from benchmarks.build_huge.steps import FLOOR, Shape, offloaded, resident, write_weights
from benchmarks.frame.rungs import Outcome, Rung, run_rung
from tests.benchmarks.here import RATES

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux, for RLIMIT_DATA")

SHAPE = Shape(blocks=5, dim=16, rows=4, steps=3)


class Report:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.steps: list[dict[str, float]] = []

    def total(self, steps: int) -> None:
        self.expected = steps

    def memory(self, moment: str) -> None:
        self.events.append(moment)

    def phase(self, name: str) -> None:
        self.events.append(name)

    def step(self, **values: float) -> None:
        self.steps.append(values)

    def turns(self) -> Iterator[int]:
        return itertools.count()


def test_the_offloaded_and_the_resident_model_train_alike_from_the_same_files(tmp_path: Any) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    parameters = 5 * (8 * 16 * 16 + 7 * 16)
    assert SHAPE.parameter_bytes == 4 * parameters
    assert write_weights(weights, SHAPE) == 2 * parameters
    losses = []
    for way, more in ((resident, {}), (offloaded, {"home": f"{tmp_path}/home/"})):
        report = Report()
        result = way(report, asdict(SHAPE), str(weights), None, **more)  # type: ignore[operator]
        assert "out_of_memory" not in result
        assert report.events == [FLOOR, "build", "steps"]
        assert len(report.steps) == report.expected == 3
        losses.append([step["loss"] for step in report.steps])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0][2] < losses[0][0]


def test_a_resident_model_larger_than_the_cap_says_at_what_it_failed(tmp_path: Any) -> None:
    shape = asdict(Shape(blocks=64, dim=512, rows=4, steps=1))  # 512 MiB, none of which is touched
    arguments = {"shape": shape, "weights": str(tmp_path), "cap_bytes": 320 << 20}
    outcome = run_rung(Rung("resident", "benchmarks.build_huge.steps:resident", arguments))
    assert outcome.failure is None
    assert "allocate" in (outcome.result or {})["out_of_memory"]


def test_a_cap_that_the_system_refuses_is_an_error_and_not_a_rung_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("benchmarks.build_huge.steps.cap_memory", lambda nbytes: False)
    with pytest.raises(OSError, match="refuses a cap of 1,024 bytes"):
        resident(Report(), asdict(SHAPE), str(tmp_path), 1024)  # type: ignore[arg-type]


def outcome(name: str, *losses: float, peak: int = 10, **result: Any) -> Outcome:
    steps = [{"loss": loss, "seconds": 0.1} for loss in losses]
    arguments = {"cap_bytes": None if "no cap" in name else 100}
    rung = Rung(name, "module:function", arguments)
    return Outcome(rung, result={"load_seconds": 1.0, **result}, steps=steps, peaks={"steps": peak})


DEAD = outcome("resident, capped", out_of_memory="you tried to allocate 1 byte")


@pytest.mark.parametrize(
    ("outcomes", "broken"),
    [
        ([DEAD, outcome("offloaded", 2.0, 1.0), outcome("no cap", 2.0, 1.0)], ""),
        ([DEAD, outcome("offloaded", 2.0, 1.0)], ""),
        ([outcome("resident", 2.0, 1.0), outcome("offloaded", 2.0, 1.0)], "must not fit under the cap"),
        ([DEAD, outcome("offloaded", out_of_memory="x")], "offloaded: out of memory: x"),
        ([DEAD, outcome("offloaded", 2.0, 1.0, peak=101)], "below the cap"),
        ([DEAD, outcome("offloaded", 2.0, 2.0)], "the loss must fall"),
        ([DEAD, outcome("offloaded", 2.0, 1.0), outcome("no cap", 2.0, 1.1)], "those of the resident model"),
    ],
)
def test_each_bound_is_one(outcomes: list[Outcome], broken: str) -> None:
    lines = broken_bounds(outcomes, cap_bytes=100)
    assert [broken in line for line in lines] == ([True] if broken else [])
    shown = _table(outcomes, SHAPE, 100, RATES)
    assert all(entry.rung.name in shown for entry in outcomes)


def test_the_limit_is_the_longest_of_arithmetic_memory_and_files() -> None:
    in_memory, streamed = outcome("no cap", 2.0), outcome("offloaded", 2.0)
    streamed.steps[0] |= {"read": 2_000_000, "from_disk": 2_000_000, "written": 1_000_000, "to_disk": 1_000_000}
    assert limit_seconds(in_memory, SHAPE, RATES) == SHAPE.training_flops / RATES.matmul_flops
    assert limit_seconds(streamed, SHAPE, RATES) == 3.0


def test_a_rung_that_is_killed_breaks_the_run() -> None:
    killed = Outcome(DEAD.rung, failure="killed by SIGKILL")
    assert broken_bounds([killed, outcome("offloaded", 2.0, 1.0)], 100) == ["resident, capped: killed by SIGKILL"]


def test_a_model_that_fits_is_no_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build-huge", "--blocks", "1", "--dim", "16"]) != 0
    assert "expected parameters larger than the cap" in capsys.readouterr().err
