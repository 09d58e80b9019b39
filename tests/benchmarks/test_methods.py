"""The methods of a benchmark compute the same: gradients of the bare model, and peers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.__main__ import BENCHMARKS, load
from benchmarks.gradcache_batch.benchmark import PEERS as GRADCACHE_PEERS
from benchmarks.gradcache_batch.methods import METHODS as GRADCACHE_METHODS
from benchmarks.gradcache_batch.methods import Shape as Batch
from benchmarks.gradcache_batch.methods import make, sketch
from benchmarks.harness.benchmark import Run
from benchmarks.harness.case import CannotRunError, Case, Outcome
from benchmarks.harness.peers import PEERS
from benchmarks.memory_latency.benchmark import OTHERS
from benchmarks.memory_latency.methods import METHODS as TRAINING_METHODS
from benchmarks.models.transformer import Stack
from benchmarks.pipe_ladder import methods as pipe_ladder
from benchmarks.pipe_ladder.methods import Settings
from tests.benchmarks.here import Recorder, outcome

TINY = Batch(vocabulary=300, positions=4, dim=64, depth=2, pairs=4, chunk=2, kept=1, graphs=1, together=1)
PIPE = Settings(dim=4, blocks=2, rows=6, rounds=3, threads=torch.get_num_threads())
OURS = [name for name in pipe_ladder.METHODS if name.startswith("ours")]


@pytest.mark.parametrize("method", [method for method in GRADCACHE_METHODS if method not in GRADCACHE_PEERS])
def test_every_gradcache_method_gives_the_gradient_of_the_whole_batch_in_two_steps(method: str, tmp_path: Path) -> None:
    model, step = make("plain torch", TINY, tmp_path)
    expected_loss = step(*TINY.batch())
    expected = torch.tensor(sketch(model))
    model, step = make(method, TINY, tmp_path)
    for _ in range(2):
        model.zero_grad()
        torch.testing.assert_close(step(*TINY.batch()), expected_loss)
        assert (torch.tensor(sketch(model)) - expected).norm() <= 1e-5 * expected.norm()


def test_a_sketch_tells_two_gradients_apart() -> None:
    layer = nn.Linear(300, 300)
    layer(torch.ones(1, 300)).sum().backward()
    before = torch.tensor(sketch(layer))
    assert layer.weight.grad is not None
    layer.weight.grad[7, 7] += 1
    assert (torch.tensor(sketch(layer)) - before).norm() > 0


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_every_pipe_of_ours_gives_the_gradients_of_the_bare_model(
    name: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[nn.Sequential] = []
    build = Settings.model

    def kept(shape: Settings) -> nn.Sequential:
        models.append(build(shape))
        return models[-1]

    monkeypatch.setattr(Settings, "model", kept)
    pipe_ladder.METHODS[name](PIPE, chunks)(PIPE.batch())
    (stepped,) = models
    bare = build(PIPE)
    bare(PIPE.batch()).square().mean().backward()
    for mine, theirs in zip(stepped.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_turn_of_several_steps_tells_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setitem(pipe_ladder.METHODS, "counted", lambda shape, chunks: taken.append)
    for clock in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"benchmarks.pipe_ladder.methods.time.{clock}", lambda: 8.0 * len(taken))
    recorder = Recorder(outcome("a"), 0)
    pipe_ladder.time_rounds(recorder, asdict(PIPE), 2, ["counted"], 4)
    assert recorder.outcome.steps == [{"counted: clock": 8.0, "counted: processor": 8.0}] * 3
    assert len(taken) == pipe_ladder.WARMUP + 3 * 4


def test_every_training_method_has_a_function_and_one_that_needs_a_gpu_says_so(tmp_path: Path) -> None:
    assert {method for _, method, _, _ in OTHERS} | {"ours"} == TRAINING_METHODS.keys()
    with pytest.raises(CannotRunError, match="needs a GPU"):
        TRAINING_METHODS["fairscale_offload"](Stack(2, 64, 4, 4).build(), tmp_path, "cpu")


def test_every_peer_is_beside_ours_in_some_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: set[str] = set()

    def group(run: Run, name: str, cases: Sequence[Case], order: str = "alone", **how: int) -> list[Outcome]:
        asked.update(case.peer for case in cases if case.peer)
        return []

    monkeypatch.setattr(Run, "group", group)
    monkeypatch.setattr("benchmarks.qwen_embedding.benchmark.write_model", lambda folder, model: 0)  # 2.4 GB
    for name in set(BENCHMARKS) - {"retrieval", "build-huge"}:  # these have no peers
        load(name).measure(Run(load(name).settings(), folder=tmp_path))
    assert asked == PEERS.keys()
