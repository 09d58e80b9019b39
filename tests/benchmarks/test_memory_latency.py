"""Memory against latency: every way computes the same gradients, and what is said of it follows from what it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.pairs import Paired
from benchmarks.memory_latency.question import OTHERS, broken_bounds
from benchmarks.memory_latency.results import Measured, limit_seconds, pareto_front
from benchmarks.memory_latency.shape import Shape
from benchmarks.memory_latency.steps import greatest_difference
from benchmarks.memory_latency.ways import WAYS, CannotRunError
from tests.benchmarks.here import RATES, pairs_here, run_here

SMALL = ["--layers", "4", "--dim", "64", "--rows", "4", "--positions", "4", "--pairs", "1"]


pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


@pytest.fixture(autouse=True)
def with_rates_of_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.memory_latency.question.measure_limits", lambda *_, **__: RATES)


def test_settings_of_ours_have_the_gradients_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.memory_latency.question.run_pairs", pairs_here)
    monkeypatch.setattr("benchmarks.memory_latency.question.run_rungs", run_here)
    chosen = ("1 slices", "micro-batches", "budget", "disk, 4 slices")
    assert main(["memory-latency", *SMALL, "--only", *chosen, "--out", "m"]) == 0, "".join(capsys.readouterr())
    head, *rungs = [json.loads(line) for line in Path("m.jsonl").read_text().splitlines()]
    assert head["limits"]["disk_read_bytes"] == 1e6
    ours = [rung for rung in rungs if rung["rung"].startswith("ours:") and not rung["rung"].endswith(", in use")]
    assert {f"{rung['rung']}, in use" for rung in ours} <= {rung["rung"] for rung in rungs}
    assert len(ours) >= 10
    assert all(rung["result"]["difference"] <= 1e-5 for rung in ours)
    assert all(rung["result"]["estimate"]["seconds"] > 0 for rung in ours)
    assert all(rung["result"]["estimate"]["memory_bytes"] > 0 for rung in ours)
    page = Path("m.md").read_text()
    for words in ("| training ", "| prediction ", "| forward only ", "limit", "distance", "![memory-latency](m.png)"):
        assert words in page
    assert Path("m.png").stat().st_size > 10_000
    assert list((tmp_path / "cache" / "gradstream").iterdir()) == []  # homes are gone


def test_a_rung_in_its_own_process_takes_turns_with_plain_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["memory-latency", *SMALL, "--only", "save_on_cpu", "--json", "m.json"]) == 0
    shown = capsys.readouterr().out
    assert "| save_on_cpu " in shown
    rungs = {rung["rung"]: rung for rung in map(json.loads, Path("m.json").read_text().splitlines()[1:])}
    assert len(rungs["save_on_cpu"]["steps"]) == 2
    assert rungs["save_on_cpu, in use"]["peaks"]["steps"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--dim", "100"], "multiple of 64"), (["--layers", "3"], "layers=3"), (["--pairs", "0"], "pairs=0")],
)
def test_sizes_that_cannot_be_compared_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory-latency", *options]) == 2
    assert message in capsys.readouterr().err


def test_every_other_way_has_a_function_and_those_that_need_a_gpu_say_so(tmp_path: Path) -> None:
    assert {way for _, way, _, _ in OTHERS} | {"ours"} == WAYS.keys()
    with pytest.raises(CannotRunError, match="needs a GPU"):
        WAYS["fairscale_offload"](Shape(2, 64, 4, 4).build(), tmp_path, "cpu")


def test_parameters_and_arithmetic_are_those_of_the_model_that_is_built() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    shape = Shape(layers=2, dim=64, rows=3, positions=5)
    model = shape.build()
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    # The counter sees nothing in a fused attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(shape.batch()).sum().backward()
    assert counter.get_total_flops() == shape.training_flops


def test_differences_are_relative_to_each_tensor_and_a_missing_one_is_infinite() -> None:
    expected = {"a": torch.tensor([100.0, 1.0]), "b": torch.tensor([0.01])}
    assert greatest_difference({"a": torch.tensor([101.0, 1.0]), "b": torch.tensor([0.01])}, expected) == pytest.approx(
        0.01
    )
    assert greatest_difference({"a": torch.tensor([100.0, 1.0])}, expected) == float("inf")


def way(settings: dict[str, Any], result: dict[str, Any], **step: float) -> Measured:
    rung = Rung("a way", "m:f", {"way": "ours", "settings": settings, "device": "cpu"})
    steps = [{"seconds": 1.0, **step}]
    return Measured(Paired(Outcome(rung, result={"difference": 0.0, **result}), steps, steps))


def test_a_broken_budget_and_other_gradients_are_told() -> None:
    kept = way({"memory_budget": 10}, {"statistics": {"peak_device_bytes": 10}})
    over = way({"memory_budget": 10}, {"statistics": {"peak_device_bytes": 11}})
    wrong = way({}, {"difference": float("nan")})
    assert broken_bounds([kept], []) == []
    assert "held 11 bytes, over its budget of 10" in broken_bounds([over], [])[0]
    assert "differs from plain torch by nan" in broken_bounds([wrong], [])[0]
    dead = Outcome(Rung("dead", "m:f"), failure="killed by SIGKILL")
    assert broken_bounds([kept], [dead]) == ["dead: killed by SIGKILL"]


def test_the_limit_is_of_the_task_and_of_the_bytes_that_the_way_moves() -> None:
    shape = Shape(layers=1, dim=64, rows=1, positions=1)
    counted = {"bytes_loaded": 2e6, "bytes_stored": 1e6, "bytes_spilled": 2e6}
    at_disk = {"read": 4e6, "from_disk": 4e6, "written": 3e6, "to_disk": 3e6}
    assert limit_seconds(way({}, {}, **counted, **at_disk), shape, RATES) == 4.0 + 3.0  # the disk has one queue
    in_memory = limit_seconds(way({"disk": False}, {}, **counted), shape, RATES)
    assert in_memory == pytest.approx((7e6 + 4 * shape.parameters) / 1e9)


def test_a_recomputation_makes_no_limit_greater() -> None:
    """Nobody must recompute: what it costs stands in the distance."""
    shape = Shape(layers=1, dim=64, rows=8, positions=8)
    found = {limit_seconds(way({"checkpoint_activation": again}, {}), shape, RATES) for again in (False, True)}
    assert found == {shape.training_flops / 1e9}


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    assert pareto_front([(1, 5), (2, 3), (3, 4), (4, 1), (2, 6)]) == [(1, 5), (2, 3), (4, 1)]
