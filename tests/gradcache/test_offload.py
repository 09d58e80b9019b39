"""GradCache over the engine itself: same gradients as the whole batch, and the traffic that the design promises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradcache import GradCache
from gradcache.loss import SimpleContrastiveLoss
from tests.gradcache.towers import offloaded, tower
from tests.gradients import assert_same_step


@pytest.mark.parametrize("chunks", [1, 64])
@pytest.mark.parametrize("on_disk", [False, True])
def test_shards_are_loaded_twice_and_layers_run_so_often_a_chunk(chunks: int, on_disk: bool, tmp_path: Path) -> None:
    calls: list[int] = []
    layers = tower()
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    model = offloaded(layers, f"{tmp_path}/" if on_disk else "cpu")
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    GradCache([model, model], 64 // chunks, SimpleContrastiveLoss())(x, y)
    assert model.statistics().shard_loads <= 2 * 4
    assert len(calls) == (4 + 3) * 2 * chunks  # what saves nothing is not recomputed


@pytest.mark.parametrize("wrapped", [False, True])
def test_dropout_in_layers_and_in_get_rep_fn_draws_the_same_masks_in_both_passes(wrapped: bool) -> None:
    """With one chunk the engine draws in the order of the bare model, so even the bare model's masks are met."""
    bare = tower(dropout=0.5)
    ours = offloaded(copy.deepcopy(bare))
    model = nn.Sequential(ours, nn.Identity()) if wrapped else ours
    x = torch.randn(6, 8)

    def rep(out: Tensor) -> Tensor:
        return nn.functional.dropout(out, 0.3)

    torch.manual_seed(1)
    rep(bare(x)).square().sum().backward()
    expected = torch.get_rng_state()
    torch.manual_seed(1)
    GradCache([model], 6, lambda r: r.square().sum(), get_rep_fn=rep)(x)
    assert torch.equal(torch.get_rng_state(), expected)
    assert_same_step([bare], [ours])


@pytest.mark.parametrize("around", [lambda model: model, lambda model: nn.Sequential(model, nn.Identity())])
def test_a_frozen_tower_and_an_evaluation_load_each_shard_once_also_with_a_trainable_head_behind_it(
    around: Callable[[nn.Module], nn.Module],
) -> None:
    bare = tower().requires_grad_(False)
    frozen, x = offloaded(copy.deepcopy(bare)), torch.randn(4, 8)
    GradCache([tower(1), around(frozen)], 2, SimpleContrastiveLoss())(torch.randn(4, 8), x)
    assert frozen.statistics().shard_loads == 4
    head, expected = nn.Linear(6, 2), nn.Linear(6, 2)
    expected.load_state_dict(head.state_dict())
    expected(bare(x)).square().sum().backward()
    GradCache([around(frozen)], 2, lambda r: r.square().sum(), get_rep_fn=head)(x)
    assert_same_step([expected], [head])
    assert frozen.statistics().shard_loads == 8
    model = offloaded(tower())
    with torch.no_grad():
        y = torch.randn(6, 8)
        loss = GradCache([around(model)] * 2, 2, SimpleContrastiveLoss())(y, y)
    torch.testing.assert_close(loss, SimpleContrastiveLoss()(tower()(y), tower()(y)).detach())
    assert model.statistics().shard_loads == 4
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("how", ["streamed", "plain"])
def test_bfloat16_gradients_of_a_thousand_chunks_add_up_within_one_percent(how: str) -> None:
    """Offloaded, with masters of 32 bits at home; in memory, with parameters of 16."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 8, bias=False))
    x = torch.rand(1024, 16).bfloat16()
    if how == "streamed":
        model: nn.Module = offloaded(layers, num_slices=1, param_dtype=torch.bfloat16)
    else:
        model = layers.bfloat16()
    GradCache([model], 1, lambda r: r.float().sum())(x)
    exact = x.double().sum(0).expand(8, 16)
    (weight,) = model.parameters()
    assert float((weight.grad.double() - exact).norm() / exact.norm()) < 0.01
