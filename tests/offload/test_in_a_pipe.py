"""Stages of a Pipe that are OffloadModels: an offloaded, micro-batched pipeline."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradcache import GradCache
from offload import OffloadModel
from pipe import Pipe
from tests.offload.zoo import WIDTH, build


def stages(home: str, bare: nn.Sequential, cuts: tuple[int, int]) -> nn.Sequential:
    """The layers of ``bare`` as two offloaded stages."""
    first, second = bare[: cuts[0]], bare[cuts[0] :]
    return nn.Sequential(
        *(
            OffloadModel(copy.deepcopy(part), "cpu", home, num_slices=2, checkpoint_activation=True)
            for part in (first, second)
        )
    )


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_pipe_of_offloaded_stages_trains_like_the_bare_layers(home: str, checkpoint: str, chunks: int) -> None:
    bare = build(["linear", "linear", "inplace"])
    pipe = Pipe(stages(home, bare, (3, len(bare) - 3)), [1, 1], ["cpu", "cpu"], chunks, checkpoint)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (bare, pipe)]
    for step in range(3):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
        for run, optimizer in zip((bare, pipe), optimizers, strict=True):
            leaf = x.clone().requires_grad_()
            run(leaf).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(bare.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_dropout_in_offloaded_stages_is_that_of_a_pipe_over_the_bare_ones(home: str, checkpoint: str) -> None:
    bare = build(["dropout", "linear", "dropout"])
    parts = nn.Sequential(copy.deepcopy(bare[:2]), copy.deepcopy(bare[2:]))
    results = []
    for model in (parts, stages(home, bare, (2, len(bare) - 2))):
        pipe = Pipe(model, [1, 1], ["cpu", "cpu"], 3, checkpoint)
        torch.manual_seed(0)
        output = pipe(torch.ones(6, WIDTH))
        output.sum().backward()
        results.append([output.detach(), torch.get_rng_state(), *(p.grad for p in pipe.parameters())])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(expected, got)


def test_a_grad_cache_over_a_pipe_of_offloaded_stages(home: str) -> None:
    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(a @ b.T, torch.arange(len(a)))

    bare = build(["linear", "inplace"])
    pipe = Pipe(stages(home, bare, (2, len(bare) - 2)), [1, 1], ["cpu", "cpu"], 2, "never")
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    expected = loss(bare(x), bare(y))
    expected.backward()
    got = GradCache([pipe, pipe], 4, loss)(x, y)
    torch.testing.assert_close(got, expected.detach())
    for p, q in zip(bare.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
