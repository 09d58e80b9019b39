"""What every cell of a pipeline and of an offloaded step pays: splitting, replaying, depending, balancing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipe.balance.blockpartition import solve
from pipe.dependency import fork, join
from pipe.microbatch import gather_nested, split_nested
from pipe.recompute.replay import Replay


def test_split_and_gather_a_nested_batch(benchmark: Any) -> None:
    batch = {"tokens": torch.ones(64, 32), "pair": (torch.ones(64), [torch.ones(64, 4), "a name"])}
    gathered = benchmark(lambda: gather_nested(split_nested(batch, 16)))
    assert gathered["tokens"].shape == (64, 32)


def test_capture_a_replay_and_record_its_draws(benchmark: Any) -> None:
    def work() -> Replay:
        replay = Replay.capture([torch.device("cpu")])
        return replay.record_changes()

    assert benchmark(work) is not None


def test_run_again_under_a_replay(benchmark: Any) -> None:
    replay = Replay.capture([torch.device("cpu")]).record_changes()

    def work() -> None:
        with replay.again():
            pass

    benchmark(work)


def test_fork_and_join_forward_and_backward(benchmark: Any) -> None:
    first, second = (torch.ones(1024, requires_grad=True) for _ in range(2))

    def work() -> None:
        kept, phony = fork(first)
        (kept.sum() + join(second, phony).sum()).backward()

    benchmark(work)
    assert first.grad is not None


@pytest.mark.parametrize(("layers", "partitions"), [(64, 8), (256, 8)])
def test_balance_layers(benchmark: Any, layers: int, partitions: int) -> None:
    costs = [1 + (7919 * k) % 97 for k in range(layers)]
    assert len(benchmark(solve, costs, partitions)) == partitions
