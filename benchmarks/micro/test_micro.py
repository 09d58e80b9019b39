"""What a step pays besides its layers: plans, replays, dependencies, the loss over all pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradcache.loss import SimpleContrastiveLoss
from offload.planning.plan import validate
from offload.planning.planner import plan_step
from offload.planning.simulate import Costs, simulate
from pipe.dependency import fork, join
from pipe.microbatch import gather_nested, split_nested
from pipe.recompute.replay import Replay


@pytest.mark.parametrize("shards", [10, 100])
def test_plan_and_simulate_a_step(benchmark: Any, shards: int) -> None:
    costs = Costs(*([1.0] * shards for _ in range(4)))

    def work() -> float:
        plan = plan_step(shards, slots=4, microbatches=4)
        validate(plan)
        return simulate(plan, costs).seconds

    assert benchmark(work) > 0


def test_split_and_gather_a_nested_batch(benchmark: Any) -> None:
    batch = {"tokens": torch.ones(64, 32), "pair": (torch.ones(64), [torch.ones(64, 4), "a name"])}
    assert benchmark(lambda: gather_nested(split_nested(batch, 16)))["tokens"].shape == (64, 32)


def test_record_and_replay_random_states(benchmark: Any) -> None:
    def work() -> None:
        with Replay.capture([torch.device("cpu")]).record_changes().again():
            pass

    benchmark(work)


def test_fork_and_join_forward_and_backward(benchmark: Any) -> None:
    first, second = (torch.ones(1024, requires_grad=True) for _ in range(2))

    def work() -> None:
        kept, phony = fork(first)
        (kept.sum() + join(second, phony).sum()).backward()

    benchmark(work)
    assert first.grad is not None


@pytest.mark.parametrize("tile_rows", [None, 64])
def test_contrastive_loss_of_256_pairs(benchmark: Any, tile_rows: int | None) -> None:
    loss_fn = SimpleContrastiveLoss(tile_rows=tile_rows)
    queries, targets = (torch.randn(256, 128, requires_grad=True) for _ in range(2))
    benchmark(lambda: loss_fn(queries, targets).backward())
    assert queries.grad is not None
