"""The methods of a benchmark compute the same: gradients of the bare model, and peers beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import pipe_ladder
from benchmarks.harness.case import CannotRunError
from benchmarks.models.methods import METHODS, Training
from benchmarks.pipe_ladder import Settings

PIPE = Settings(dim=4, blocks=2, rows=6, rounds=3, threads=torch.get_num_threads())
OURS = [name for name in pipe_ladder.METHODS if name.startswith("ours")]


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
