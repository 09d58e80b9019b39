"""``mesh`` without its ranks, which need processes: losses, bounds, and its page."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import mesh
from benchmarks.harness.benchmark import Benchmark, Run, broken_bounds
from benchmarks.harness.case import FLOOR, Outcome
from benchmarks.models.methods import DISK, FSDP, HOST, RESIDENT, STEPS, Training, train
from tests.benchmarks.here import Recorder, inside, outcome


def assert_complaints(benchmark: Benchmark, run: Run, *complaints: str) -> None:
    broken = broken_bounds(benchmark, run)
    assert len(broken) == len(complaints), broken
    assert all(complaint in line for line, complaint in zip(broken, complaints, strict=True)), broken


def test_every_way_of_ours_trains_to_the_losses_of_the_resident_model(tmp_path: Path) -> None:
    losses = {}
    for method in (RESIDENT, DISK, HOST):
        found = outcome(method)
        with inside(tmp_path):
            train(Recorder(found, 2), method, asdict(Training(2, 64, 2, 4)), together=False)
        losses[method] = found.values("loss")
    assert losses[DISK] == pytest.approx(losses[RESIDENT], rel=1e-6)
    assert losses[HOST] == pytest.approx(losses[RESIDENT], rel=1e-6)
    assert losses[RESIDENT][1] != losses[RESIDENT][0]


def rank(method: str, held: int, seconds: float = 1.0, loss: float = 2.0, **step: float) -> Outcome:
    counted = {"seconds": seconds, "processor": 1.0, "read": 0, "written": 0, "loss": loss, "received": 1000.0, **step}
    found = outcome(
        mesh.NAMES[method],
        {},
        arguments={"method": method},
        ranks=1 if method == RESIDENT else 2,
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
        return Run(mesh.Settings(steps=2), groups={"in turn": [*outcomes]})

    alone, others = rank(RESIDENT, 90), rank(FSDP, 30, seconds=0.5)
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
