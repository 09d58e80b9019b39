"""The methods of a benchmark compute the same: gradients of the bare model, and peers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import pipe_ladder
from benchmarks.__main__ import BENCHMARKS, load
from benchmarks.gradcache_batch import PEERS as GRADCACHE_PEERS
from benchmarks.gradcache_batch import PLAIN, WAYS, Shape, batch_of, make, sketch
from benchmarks.harness.benchmark import Run
from benchmarks.harness.case import CannotRunError, Case, Outcome
from benchmarks.harness.peers import PEERS
from benchmarks.models.methods import METHODS, Training
from benchmarks.pipe_ladder import Settings
from tests.benchmarks.here import Recorder, outcome

TINY = Shape(vocabulary=300, positions=4, dim=64, depth=2, pairs=4, chunk=2, kept=1, graphs=1, together=1)
PIPE = Settings(dim=4, blocks=2, rows=6, rounds=3, threads=torch.get_num_threads())
OURS = [name for name in pipe_ladder.METHODS if name.startswith("ours")]


@pytest.mark.parametrize("method", [method for method in WAYS if method not in GRADCACHE_PEERS])
def test_every_gradcache_method_gives_the_gradient_of_the_whole_batch_in_two_steps(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, made, rows = make(PLAIN, TINY), make(method, TINY), batch_of(method, TINY).example(0)
    expected_loss = plain.step(*rows)
    expected = torch.tensor(sketch(plain.parameters()))
    for _ in range(2):
        torch.testing.assert_close(made.step(*rows), expected_loss)
        assert (torch.tensor(sketch(made.parameters())) - expected).norm() <= 1e-5 * expected.norm()


def test_a_sketch_tells_two_gradients_apart() -> None:
    layer = nn.Linear(300, 300)
    layer(torch.ones(1, 300)).sum().backward()
    before = torch.tensor(sketch(layer.named_parameters()))
    assert layer.weight.grad is not None
    layer.weight.grad[7, 7] += 1
    assert (torch.tensor(sketch(layer.named_parameters())) - before).norm() > 0


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
        monkeypatch.setattr(f"benchmarks.pipe_ladder.time.{clock}", lambda: 8.0 * len(taken))
    recorder = Recorder(outcome("a"), 0)
    pipe_ladder.time_rounds(recorder, asdict(PIPE), 2, ["counted"], 4)
    assert recorder.outcome.steps == [{"counted: clock": 8.0, "counted: processor": 8.0}] * 3
    assert len(taken) == pipe_ladder.WARMUP + 3 * 4


@pytest.mark.parametrize("name", ["fairscale", "torchao"])
def test_a_method_that_needs_a_gpu_says_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(CannotRunError, match="needs a GPU"):
        METHODS[name][0](Training(2, 64, 4, 4), tmp_path, None)


def test_every_peer_is_beside_ours_in_some_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: set[str] = set()

    def group(run: Run, name: str, cases: Sequence[Case], order: str = "alone", **how: int) -> list[Outcome]:
        asked.update(case.peer for case in cases if case.peer)
        return []

    monkeypatch.setattr(Run, "group", group)
    monkeypatch.setattr("benchmarks.models.qwen3.Qwen3.write", lambda self, folder: 0)  # 2.4 GB
    for name in set(BENCHMARKS) - {"retrieval", "build-huge"}:  # these have no peers
        load(name).measure(Run(load(name).settings(), folder=tmp_path))
    assert asked == PEERS.keys()
