"""A step of one of N ranks, predicted without a process: its bytes from shapes, its time by simulation."""

from __future__ import annotations

import pytest
import torch

from offload.mesh.costs import Link, costs_of_rank, with_updates
from offload.mesh.parts import Part
from offload.mesh.traffic import SentBytes, Traffic, sent_bytes, traffic_of
from offload.planning.plan import Plan, validate
from offload.planning.planner import plan_step
from offload.planning.simulate import Costs, simulate


def part(rows: int, columns: int, ranks: int, dtype: torch.dtype = torch.float32) -> Part:
    return Part("weight", (rows, columns), (columns, 1), dtype, ranks)


def test_reductions_and_gathers_are_on_one_lane_and_gradients_are_stored_at_the_next_drain() -> None:
    plan = Plan.parse("L0 L1 F0.0 F1.0 B1.0 D1 B0.0 D0", 2)
    costs = Costs([1.0] * 2, [1.0] * 2, [2.0] * 2, [3.0] * 2, gather=[2.0] * 2, reduce=[5.0] * 2)
    forecast = simulate(plan, costs)
    # Loads end at 3 and 6, the first backward at 9. Its reduction ends at 14, where the last drain waits from 11; that
    # one's reduction ends at 19, and what it leaves is stored at 22.
    assert forecast.seconds == 22.0
    assert forecast.wait_seconds == 3.0 + 2.0 + 3.0 + 5.0
    early = simulate(Plan.parse("L1 F1.0 B1.0 D1 L0", 2), costs)
    assert early.seconds == 3.0 + 1.0 + 2.0 + 5.0 + 3.0  # a load behind a reduction is hidden by the store


def test_updates_of_a_step_follow_its_last_drain() -> None:
    plan = with_updates(plan_step(2, slots=2, clips=True))
    assert str(plan).endswith("D1 B0.0 D0 V1 V0")
    validate(plan)
    costs = Costs([0.0] * 2, [1.0] * 2, [2.0] * 2, [3.0] * 2, [7.0] * 2, gather=[0.0] * 2, reduce=[5.0] * 2)
    # Backward ends at 6, reductions at 9 and 14. The updates follow each other from 14, when step() can begin.
    assert simulate(plan, costs).seconds == 14.0 + 2 * 7.0


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (3, 2), (1024, 1)])
def test_bytes_of_a_step_are_those_of_the_formula_on_the_page(ranks: int, replicas: int) -> None:
    shapes, dtypes = ((7, 5), (1, 300), (40, 3)), (torch.float32, torch.bfloat16, torch.float32)
    parts = [part(*shape, ranks, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    rows = [-(-shape[0] // ranks) * shape[1] for shape in shapes]
    lines = [-(-count * dtype.itemsize // 64) * 64 for count, dtype in zip(rows, dtypes, strict=True)]
    wide = [-(-count * 4 // 64) * 64 for count in rows]
    frozen = sent_bytes(parts, [False] * 3)
    shards = [sent_bytes(parts, [True, True, False]), frozen]
    assert frozen == SentBytes(sum(lines), 0, 0)
    assert shards[0] == SentBytes(sum(lines), sum(lines[:2]) + 64, sum(wide[:2]) + 64)
    plan = plan_step(2, slots=1)
    assert plan.loads == (0, 1, 0)
    reduced = (ranks - 1) * shards[0].reduced + (replicas - 1) * shards[0].replicated
    agreed = 40 * (ranks * replicas - 1)
    expected = Traffic((ranks - 1) * 3 * sum(lines), reduced, 3 * agreed)
    assert traffic_of(plan, shards, ranks, replicas, norms=1) == expected
    assert traffic_of(plan_step(2, slots=1, training=False), shards, ranks, replicas).bytes_agreed == agreed


def test_a_rank_reads_stores_and_updates_its_part_and_a_mesh_of_one_is_one_process() -> None:
    alone = Costs([8.0], [1.0], [2.0], [4.0], [16.0])
    sent = [SentBytes(100, 50, 60)]
    link = Link(bytes_per_second=10.0, copied_per_second=100.0, latency_seconds=0.5)
    assert costs_of_rank(alone, sent, 1, link) == alone
    costs = costs_of_rank(alone, sent, 4, link, replicas=2)
    assert (costs.load, costs.drain, costs.update, costs.forward) == ([2.0], [1.0], [4.0], [1.0])
    assert costs.gather == [3 * 100 / 10 + 4 * 100 / 100 + 3 * 0.5]
    assert costs.reduce == [3 * 50 / 10 + 4 * 50 / 100 + 3 * 0.5 + (60 / 10 + 2 * 60 / 100 + 0.5)]
