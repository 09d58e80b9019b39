"""``mesh`` and ``scale`` without their ranks, which need processes: losses, bounds, predictions, and pages."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.benchmark import Benchmark, Run, broken_bounds
from benchmarks.harness.case import FLOOR, Outcome
from benchmarks.mesh import benchmark as mesh
from benchmarks.mesh.methods import ALONE, DISK, FSDP, HOST, STEPS, Training, train
from benchmarks.scale import benchmark as scale
from benchmarks.scale.paper import LARGE, Machine, elements, step_on_paper
from offload.mesh.costs import with_updates
from offload.planning.planner import plan_step
from tests.benchmarks.here import RATES, Recorder, inside, outcome, run_here

TINY = "--blocks 3 --dim 64 --rows 2 --positions 8 --steps 2"
pytestmark = pytest.mark.usefixtures("in_its_own_folder")


@pytest.fixture(autouse=True)
def without_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.benchmark.measure_rates", lambda *_, **__: (RATES, "of no machine"))


def assert_complaints(benchmark: Benchmark, run: Run, *complaints: str) -> None:
    broken = broken_bounds(benchmark, run)
    assert len(broken) == len(complaints), broken
    assert all(complaint in line for line, complaint in zip(broken, complaints, strict=True)), broken


# --- mesh -------------------------------------------------------------------------------------------------------------


def test_every_way_of_ours_trains_to_the_losses_of_the_resident_model(tmp_path: Path) -> None:
    losses = {}
    for method in (ALONE, DISK, HOST):
        found = outcome(method)
        with inside(tmp_path):
            train(Recorder(found, 2), method, asdict(Training(2, 64, 2, 4)), together=False)
        losses[method] = found.values("loss")
    assert losses[DISK] == pytest.approx(losses[ALONE], rel=1e-6)
    assert losses[HOST] == pytest.approx(losses[ALONE], rel=1e-6)
    assert losses[ALONE][1] != losses[ALONE][0]


def rank(method: str, held: int, seconds: float = 1.0, loss: float = 2.0, **step: float) -> Outcome:
    counted = {"seconds": seconds, "processor": 1.0, "read": 0, "written": 0, "loss": loss, "received": 1000.0, **step}
    found = outcome(
        mesh.NAMES[method],
        {},
        arguments={"method": method},
        ranks=1 if method == ALONE else 2,
        steps=[counted] * 2,
        moments={FLOOR: 10 << 20},
        peaks={STEPS: (10 + held) << 20},
    )
    found.reference = [{"seconds": 1.0, "processor": 1.0}] * 2
    return found


def counted(received: float) -> dict[str, float]:
    return {"bytes_gathered": 600.0, "bytes_reduced": 300.0, "bytes_agreed": 100.0, "received": received}


def test_a_rank_of_ours_needs_the_losses_of_one_process_its_own_bytes_and_a_third_of_the_memory() -> None:
    def run(*outcomes: Outcome) -> Run:
        return Run(mesh.Settings(steps=2), groups={"in turn": [*outcomes]}, rates=RATES)

    alone, others = rank(ALONE, 90), rank(FSDP, 30, seconds=0.5)
    good = run(rank(DISK, 10, **counted(1010.0)), others, alone)
    assert_complaints(mesh.BENCHMARK, good)
    assert_complaints(mesh.BENCHMARK, run(rank(DISK, 11, **counted(1000.0)), others, alone), "memory of ours")
    assert_complaints(mesh.BENCHMARK, run(rank(DISK, 10, **counted(1100.0)), others, alone), "what sockets receive")
    assert_complaints(
        mesh.BENCHMARK, run(rank(DISK, 10, loss=2.1, **counted(1000.0)), others, alone), "difference of losses"
    )
    (claim,) = mesh.BENCHMARK.claims(good)
    assert (claim.times, claim.memory) == ([2.0, 2.0], 1 / 3)
    page = "\n".join(mesh.BENCHMARK.report(good))
    assert re.search(r"\| FSDP2, CPUOffloadPolicy +\| +30 MiB \| +0.33 \|", page)
    assert "600 gathered, 300 reduced, 100 agreed" in page


# --- scale ------------------------------------------------------------------------------------------------------------


def test_scale_predicts_one_process_and_says_what_bounds_a_step_on_paper() -> None:
    """The time of one process is simulated from its own trace; that of ranks needs processes."""
    run_here("scale", TINY, "s")
    page = Path("s.md").read_text()
    assert re.search(r"\| one process \| +[\d.]+ \|", page)
    assert "expected to receive" not in page

    def bounds_on(page: str) -> dict[str, str]:
        return dict(re.findall(r"^\| (\d+ x \d+) +\| +([cdl].*)\|$", page, re.MULTILINE))

    rows = bounds_on(page)
    assert set(re.findall(r"[a-z]+", " ".join(rows.values()))) == {"compute", "disk", "link"}
    assert {"1 x 1", "1 x 1024", "128 x 8"} <= rows.keys()
    assert run_here("scale", "--paper", "p") == 0
    assert bounds_on(Path("p.md").read_text()) == rows


def test_ranks_are_predicted_from_one_process_and_their_collectives() -> None:
    """By hand: two cores for four ranks make all but the collectives twice as slow; updates follow the last drain.

    With one shard no collective runs beside a cell, so none loses time to it.
    """
    settings = scale.Settings(ranks=(4,), blocks=1, dim=64, rows=1, positions=4)
    sent = scale._sent(settings, 4)[0]
    plan = plan_step(1, slots=1, clips=True)
    seconds = {"L0": 0.4, "F0.0": 1.0, "B0.0": 2.0, "D0": 0.8, "U0": 4.0}
    alone = outcome(scale.ONE, {"seconds": seconds, "plan": str(plan), "slots": 1, "pending": []}, steps=[{}])
    collectives = {"seconds": {"gather": 10.0, "reduce": 20.0}}
    result: dict[str, Any] = {"plan": str(plan), "slots": 1, "pending": []}
    expected = 2 * 0.4 / 4 + 10.0 + 2 * 3.0 + 20.0 + 2 * 0.8 / 4 + 2 * 4.0 / 4
    received = {"bytes_gathered": 3 * sent.gathered, "bytes_reduced": 3 * sent.reduced, "bytes_agreed": 3 * 3 * 40}
    ranks = outcome("4 ranks", result, ranks=4, steps=[{"seconds": expected, **received}])
    found = Run(settings, {"cores": "2"}, groups={"4 ranks": [outcome("c", collectives, ranks=4), ranks]})
    found.groups["alone"] = [alone]
    assert scale.predicted(found, ranks) == pytest.approx(expected)
    alone.steps = [{"seconds": scale.predicted(found, alone), **dict.fromkeys(received, 0)}]
    assert_complaints(scale.BENCHMARK, found)
    ranks.steps = [{**ranks.steps[0], "bytes_reduced": 0, "seconds": 1.2 * expected}]
    assert_complaints(scale.BENCHMARK, found, "expected to receive", "the error of the predicted time")


def test_seventy_billion_parameters_are_bound_by_the_disk_on_one_rank_and_by_the_link_on_many() -> None:
    assert 68.9e9 < LARGE.parameters < 69.1e9
    machine = Machine(2e14, 1e9, 1e9, 3e11, 8, 0.0, 1e12)
    few, many = (step_on_paper(LARGE.shards, 8192, machine, ranks, 1) for ranks in (1, 1024))
    assert (few.bound, many.bound) == ("disk", "link")
    assert few.files == pytest.approx(16 * LARGE.parameters, rel=1e-3)
    assert many.files == pytest.approx(16 * LARGE.parameters / 1024, rel=1e-2)
    # All but 1/N of the parameters, but for two shards that are in slots when backward begins, and all gradients.
    shards = [4 * elements(shapes) for shapes in LARGE.shards]
    received = (2 * sum(shards) - sum(shards[-2:]) + sum(shards)) * 1023 / 1024
    assert many.traffic.bytes_gathered + many.traffic.bytes_reduced == pytest.approx(received, rel=1e-2)
    assert many.total >= received / 1e9
    assert str(with_updates(plan_step(1, slots=1))) == "L0 F0.0 B0.0 D0 V0"
