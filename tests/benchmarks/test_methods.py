"""The methods of a benchmark compute the same: gradients of the bare model, and peers beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import pipe_ladder
from benchmarks.gradcache_batch import PEERS as GRADCACHE_PEERS
from benchmarks.gradcache_batch import PLAIN, WAYS, batch_of, make, sketch
from benchmarks.harness.case import CannotRunError
from benchmarks.models.methods import METHODS, Training
from benchmarks.pipe_ladder import Settings

TINY = batch_of(vocabulary=300, positions=4, dim=64, depth=2, pairs=4, chunk=2, kept=1, graphs=1, together=1)
PIPE = Settings(dim=4, blocks=2, rows=6, rounds=3, threads=torch.get_num_threads())
OURS = [name for name in pipe_ladder.METHODS if name.startswith("ours")]


@pytest.mark.parametrize("method", [method for method in WAYS if method not in GRADCACHE_PEERS])
def test_every_gradcache_method_gives_the_gradient_of_the_whole_batch_in_two_steps(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, made, rows = make(PLAIN, TINY), make(method, TINY), TINY.example(0)
    expected_loss = plain.step(*rows)
    expected = torch.tensor(sketch(plain.parameters()))
    for _ in range(2):
        torch.testing.assert_close(made.step(*rows), expected_loss)
        assert (torch.tensor(sketch(made.parameters())) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_our_pipes_give_gradients_of_the_bare_model(name: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    torch.testing.assert_close([p.grad for p in stepped.parameters()], [p.grad for p in bare.parameters()])


@pytest.mark.parametrize("name", ["fairscale", "torchao"])
def test_a_method_that_needs_a_gpu_says_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(CannotRunError, match="needs a GPU"):
        METHODS[name][0](Training(2, 64, 4, 4), tmp_path, None)
