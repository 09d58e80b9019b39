"""Claims of ``mesh_worker`` about ``blocks=`` and ``memory=``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload import OffloadOptimizer
from tests.offload.mesh.models import WIDTH, Encoder, Large, batch, loss_of
from tests.offload.mesh.world import World, difference, greatest_error


def blocks_are_called_in_an_order_that_all_ranks_note(world: World) -> None:
    """In files, by chunks of which each rank has another number; an order of one rank alone is refused."""
    bare = Encoder()
    model = world.model(bare, world.home, blocks="layers")
    model.order = (0, 1, 2) if world.rank else (0, 2, 1)
    world.raises(RuntimeError, lambda: model(batch()), "rank 0 has layers.2 and rank 1 has layers.1")
    bare.order = model.order = (2, 1, 0)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    reference = torch.optim.SGD(bare.parameters(), lr=0.1)
    for seed in range(2):
        outputs = model.forward_chunks(world.part(batch(seed)).split(1 + world.rank % 2))
        loss_of(torch.cat(outputs)).backward()
        loss_of(bare(batch(seed))).backward()
        assert greatest_error(model, bare) < 1e-6
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    with torch.no_grad():
        assert torch.allclose(model(batch(5)), bare(batch(5)), atol=1e-5)
    model.close()


def ranks_that_call_blocks_otherwise_are_told_the_first_difference(world: World) -> None:
    bare, first = Encoder(), world.rank == 0
    model = world.model(bare, blocks="layers")
    model.between.weight.requires_grad_(first)
    output = model(batch())
    world.raises(RuntimeError, output.sum().backward, "rank 0 has between.weight and rank 1 has between.bias")
    model.between.weight.requires_grad_(True)
    with torch.no_grad():
        x, scale = torch.ones(2, 3, WIDTH), torch.ones(())
        world.raises(
            RuntimeError, lambda: model.layers[2 - first](x, scale), "rank 0 has layers.1 and rank 1 has layers.2"
        )
        assert torch.allclose(model.layers[1](x, scale), bare.layers[1](x, scale), atol=1e-6)
    for order in ((0, 2), (0, 1, 2)):  # blocks may be left out, if all ranks do
        bare.order = model.order = order
        loss_of(model(world.part(batch()))).backward()
        loss_of(bare(batch())).backward()
        assert greatest_error(model, bare) < 1e-6


def a_limit_of_memory_is_planned_for_by_all_ranks_alike(world: World) -> None:
    """The limit is the least that a rank has, and gradients are right; all know of a refused batch."""
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    model = world.model(bare, world.home, 8, memory=f"{16 if world.rank else 64}MiB")
    planner: Any = model._homes.steps.planner
    assert planner.limit_bytes == 16 << 20

    def check(x: torch.Tensor) -> None:
        bare.zero_grad()
        model.zero_grad()
        loss_of(model(world.part(x))).backward()
        loss_of(bare(x)).backward()
        assert greatest_error(model, bare) < 1e-6

    slots = []
    for seed in range(4):
        check(torch.randn(8 * world.ranks, 256, generator=torch.Generator().manual_seed(seed)))
        slots.append(model._homes.streamer.slots)
    found: list[Any] = [None] * world.ranks
    torch.distributed.all_gather_object(found, slots)
    assert all(taken == slots for taken in found), found
    planner._limits.device.asked = 1 if world.rank else 64 << 20
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(9))
    refused = (ValueError, "takes at least") if world.rank else (RuntimeError, "rank 1 of the mesh refused its batch")
    world.raises(refused[0], lambda: model(x), refused[1])
    planner._limits.device.asked = 64 << 20
    check(x)


def embeddings_and_heads_are_sharded_where_memory_is_too_small_for_them(world: World) -> None:
    """Each rank then stores its rows of them, and slots are as large as blocks."""
    bare = Large()
    table = bare.words.weight.nbytes
    model = world.model(bare, world.home, blocks="layers", memory=int(3.7 * table))
    assert model._homes.blocks == ["words", *(f"layers.{k}" for k in range(3)), "head"]
    stored = sum(shard.home.nbytes for shard in model._homes.shards if shard.home is not None)
    assert stored < 1.01 * sum(p.nbytes for p in bare.parameters()) / world.ranks
    assert not any(world.is_whole(p) for p in model.parameters())
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)
    reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
    for seed in range(3):
        loss_of(model(world.part(batch(seed)))).backward()
        loss_of(bare(batch(seed))).backward()
        assert greatest_error(model, bare) < 1e-6
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert difference(model, bare) < 1e-5
    assert model._homes.streamer.slot_pool.slot_bytes < table / 100
    assert len(world.model(bare, world.home, blocks="layers", memory="1GiB")._homes.blocks) == 3
    model.close()


CLAIMS = [
    blocks_are_called_in_an_order_that_all_ranks_note,
    a_limit_of_memory_is_planned_for_by_all_ranks_alike,
    embeddings_and_heads_are_sharded_where_memory_is_too_small_for_them,
    ranks_that_call_blocks_otherwise_are_told_the_first_difference,
]
