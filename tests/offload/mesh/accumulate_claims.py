"""Claims of ``mesh_worker``: backwards in ``accumulate()`` send nothing, and the gradients are those without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from tests.offload.mesh import blocks_claims
from tests.offload.mesh.world import World, difference, greatest_error


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7, bias=False), nn.Tanh(), nn.Linear(7, 1))


def batches(count: int = 3) -> Tensor:
    return torch.randn(count, 24, 5, generator=torch.Generator().manual_seed(3))


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def backwards_in_accumulate_send_nothing_and_the_next_one_reduces_their_sums(world: World) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"home": world.folder / "homes"},
        {"checkpoint_activation": False, "num_microbatches": 2},
        {"gradient_dtype": torch.bfloat16},
    ]
    for way in ways:
        bare, model = build(), world.model(build(), slices=3, **way)
        rounds = 5e-3 if "gradient_dtype" in way else 1e-6
        loss_of(model(world.part(batches()[2]))).backward()
        once = model.statistics().bytes_reduced
        model.zero_grad()
        for batch in batches():
            loss_of(bare(batch)).backward()
        with model.accumulate():
            for batch in batches()[:2]:
                loss_of(model(world.part(batch))).backward()
        assert model.statistics().bytes_reduced == once, way
        assert all(p.grad is None for p in model.parameters())
        loss_of(model(world.part(batches()[2]))).backward()
        assert model.statistics().bytes_reduced == 2 * once, way
        assert greatest_error(model, bare) < rounds, way
        model.close()


class Stopped(blocks_claims.Encoder):
    """No gradient passes from the last block to those before."""

    def forward(self, ids: Tensor, skips: bool = False) -> Tensor:
        x = self.words(ids)
        for j, layer in enumerate(self.layers):
            x = layer(x.detach() if skips and j == 2 else x, self.scale)
        found: Tensor = self.head(x).mean(1)
        return found


def blocks_accumulate_with_what_is_outside_of_them(world: World) -> None:
    """Also sums of blocks to which the last backward brings no gradient."""
    for kind, stops in ((blocks_claims.Encoder, False), (Stopped, True)):
        bare = kind()
        model = blocks_claims.offloaded(world, bare)
        ids = [blocks_claims.batch(seed) for seed in range(3)]
        for k, one in enumerate(ids):
            blocks_claims.loss_of(bare(one, skips=stops and k == 2)).backward()
        with model.accumulate():
            for one in ids[:2]:
                blocks_claims.loss_of(model(world.part(one))).backward()
        assert not model.statistics().bytes_reduced
        blocks_claims.loss_of(model(world.part(ids[2]), skips=stops)).backward()
        assert greatest_error(model, bare) < 1e-6, kind


def steps_wait_for_the_reduction_and_zero_grad_drops_the_sums(world: World) -> None:
    bare, model = build(), world.model(build(), slices=2)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.1)
    plain = torch.optim.AdamW(bare.parameters(), lr=0.1)
    for clear in (optimizer.zero_grad, model.zero_grad):
        with model.accumulate():
            loss_of(model(world.part(batches()[0]))).backward()
        world.raises(RuntimeError, optimizer.step, "accumulate()", "zero_grad()")
        model[0].weight.requires_grad_(False)
        world.raises(RuntimeError, lambda: loss_of(model(world.part(batches()[0]))).backward(), "0.weight", "zero_grad")
        model[0].weight.requires_grad_(True)
        clear()
        for one, kind in ((bare, plain), (model, optimizer)):
            x = batches()[1] if one is bare else world.part(batches()[1])
            loss_of(one(x)).backward()
            kind.step()
            kind.zero_grad()
        assert difference(model, bare) < 1e-5


def updates_in_backward_wait_for_the_last_one(world: World) -> None:
    bare, model = build(), world.model(build(), home=world.folder / "homes", slices=3)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    plain = torch.optim.SGD(bare.parameters(), lr=0.1)
    for batch in batches():
        loss_of(bare(batch)).backward()
    plain.step()
    with model.accumulate(), optimizer.accumulate():
        for batch in batches()[:2]:
            loss_of(model(world.part(batch))).backward()
    loss_of(model(world.part(batches()[2]))).backward()
    optimizer.step()
    assert difference(model, bare) < 1e-6
    with model.accumulate():
        world.raises(RuntimeError, lambda: loss_of(model(world.part(batches()[0]))).backward(), "optimizer's")


CLAIMS = [
    backwards_in_accumulate_send_nothing_and_the_next_one_reduces_their_sums,
    blocks_accumulate_with_what_is_outside_of_them,
    steps_wait_for_the_reduction_and_zero_grad_drops_the_sums,
    updates_in_backward_wait_for_the_last_one,
]
