"""Claims of ``mesh_worker`` about ``blocks=``, ``resident=`` and ``memory=``."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from gradcache import GradCache
from gradcache.loss import DistributedContrastiveLoss, SimpleContrastiveLoss
from offload import DiskHome, OffloadModel, OffloadOptimizer
from tests.offload.mesh.world import World, difference, greatest_error, whole

WORDS, WIDTH, LENGTH, ROWS = 11, 6, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) * scale)


class Encoder(nn.Module):
    """Parameters before, between and after blocks, a scalar, a tied one, and one that is never used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor, skips: bool = False) -> Tensor:
        x = self.words(ids)
        for j, layer in enumerate(self.layers):
            if skips and j == 1:
                continue
            x = layer(x, self.scale)
            if j == 0:
                x = self.between(x)
        found: Tensor = self.head(x).mean(1)
        return found


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def offloaded(world: World, bare: nn.Module, home: Any = "cpu", **how: Any) -> Any:
    how = {"checkpoint_activation": True, "mesh": world.mesh, **how}
    return OffloadModel(copy.deepcopy(bare), "cpu", home, **{"blocks": "layers", **how})


def blocks_have_the_gradients_of_one_process_on_the_whole_batch(world: World) -> None:
    """Inside and outside of the blocks; also accumulated, in micro-batches, without recomputation, and in files."""
    ways: list[dict[str, Any]] = [
        {"num_microbatches": 2},
        {"checkpoint_activation": False, "home": world.folder / "homes"},
        {"blocks": ["words", "layers", "head"]},  # tied
    ]
    for way in ways:
        bare = Encoder()
        # The ranks begin with the values of the first one, outside of the blocks.
        given = copy.deepcopy(bare)
        if world.rank:
            nn.init.zeros_(given.between.weight)
        model = offloaded(world, given, **way)
        for seed in range(2):
            loss_of(model(world.part(batch(seed)))).backward()
            loss_of(bare(batch(seed))).backward()
        assert greatest_error(model, bare) < 1e-6, way
        with torch.no_grad():
            assert torch.allclose(model(batch(5)), bare(batch(5)), atol=1e-6)
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor)
            streams = name.startswith(("layers", "words")[: 2 if "blocks" in way else 1])
            assert (p.placements == (Replicate(),)) == (not streams), name
        assert model.unused.weight.grad is None
        model.close()


def what_is_outside_of_blocks_trains_as_in_one_process(world: World) -> None:
    """With an ``OffloadOptimizer`` that clips, with plain ones, and with torch's clipping; the bits of ranks agree."""
    for way in ("offload", "foreach"):
        bare = Encoder()
        model = offloaded(world, bare)
        if way == "offload":
            optimizer: Any = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
        for seed in range(2):
            loss_of(model(world.part(batch(seed)))).backward()
            loss_of(bare(batch(seed))).backward()
            norm = nn.utils.clip_grad_norm_(bare.parameters(), 0.01)
            found = None if way == "offload" else nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            reference.step()
            found = optimizer.last_norm if found is None else whole(found)
            assert abs(float(found - norm)) < 1e-5 * float(norm), way
            optimizer.zero_grad()
            reference.zero_grad()
            assert difference(model, bare) < 1e-5, way
        values: list[Any] = [None] * world.ranks
        mine = [p.to_local().detach().clone() for p in model.parameters() if p.placements == (Replicate(),)]
        torch.distributed.all_gather_object(values, mine)
        assert all(torch.equal(p, q) for other in values for p, q in zip(other, mine, strict=True)), way


def gradcache_runs_over_blocks_with_unequal_rows_and_chunks(world: World) -> None:
    rows = [5, 3, 4, 2][: world.ranks]
    x, y = (torch.randint(0, WORDS, (sum(rows), LENGTH), generator=torch.Generator().manual_seed(k)) for k in (1, 2))
    first = sum(rows[: world.rank])
    mine = slice(first, first + rows[world.rank])
    bare = [Encoder(1), Encoder(2)]
    towers = [offloaded(world, tower) for tower in bare]
    SimpleContrastiveLoss()(bare[0](x), bare[1](y)).backward()
    before = towers[0].statistics()
    GradCache(towers, 1 + world.rank % 2, DistributedContrastiveLoss())(x[mine], y[mine])
    for tower, expected in zip(towers, bare, strict=True):
        assert greatest_error(tower, expected) < 1e-6
    assert towers[0].statistics().shard_loads - before.shard_loads == 4  # two are in slots when backward begins


def ranks_that_call_blocks_otherwise_are_told_the_first_difference(world: World) -> None:
    bare, first = Encoder(), world.rank == 0
    model = offloaded(world, bare)
    model.between.weight.requires_grad_(first)
    output = model(batch())
    world.raises(RuntimeError, output.sum().backward, "rank 0 has between.weight and rank 1 has between.bias")
    model.between.weight.requires_grad_(True)
    # Blocks may be called in any order, if all ranks do.
    with torch.no_grad():
        assert torch.allclose(model(batch(), skips=True), bare(batch(), skips=True), atol=1e-6)
        x, scale = torch.ones(2, LENGTH, WIDTH), torch.ones(())
        call = (lambda: model.layers[1](x, scale)) if first else (lambda: model.layers[2](x, scale))
        world.raises(RuntimeError, call, "rank 0 has layers.1 and rank 1 has layers.2")
        assert torch.allclose(model.layers[1](x, scale), bare.layers[1](x, scale), atol=1e-6)
    world.raises(TypeError, lambda: copy.deepcopy(model), "mesh=")
    for skips in (True, False):
        loss_of(model(world.part(batch()), skips=skips)).backward()
        loss_of(bare(batch(), skips=skips)).backward()
        assert greatest_error(model, bare) < 1e-6


class Adapted(nn.Module):
    """A frozen layer with an adapter, and a parameter that all of these share."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.lora_scale = shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.lora_b(self.lora_a(x)) * self.lora_scale)


def resident_adapters_train_as_in_one_process(world: World) -> None:
    """Each rank stores them whole, and only their gradients are reduced."""
    for frozen in (True, False):
        torch.manual_seed(3)
        shared = nn.Parameter(torch.ones(1))
        bare = nn.Sequential(*(Adapted(shared) for _ in range(3)))
        for layer in bare:
            layer.base.requires_grad_(not frozen)
        given = copy.deepcopy(bare)
        if world.rank:
            nn.init.zeros_(given[1].lora_a.weight)  # the ranks begin with the values of the first one
        model = world.model(given, world.folder / "homes", 3, resident="*.lora_*")
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.01)
        reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
        for seed in range(2):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
            before = model.statistics().bytes_reduced
            for part in x.chunk(2):  # the second accumulates
                loss_of(model(world.part(part))).backward()
                loss_of(bare(part)).backward()
            assert greatest_error(model, bare) < 1e-6
            if frozen:
                sizes = [-(-p.numel() // world.ranks) * 4 for p in bare.parameters() if p.requires_grad]
                once = (world.ranks - 1) * (sum(-(-size // 64) * 64 for size in sizes) + 64)
                assert model.statistics().bytes_reduced - before == 2 * once
            norm = nn.utils.clip_grad_norm_(bare.parameters(), 0.01)
            optimizer.step()
            reference.step()
            assert abs(float(optimizer.last_norm - norm)) < 1e-5 * float(norm)
            optimizer.zero_grad()
            reference.zero_grad()
            assert difference(model, bare) < 1e-5
        assert {name.rpartition(".lora_")[1] != "" for name, p in model.named_parameters() if whole_on(p)} == {True}
        model.close()


class Upwards(Encoder):
    """Calls its layers from the last to the first, or in another order."""

    order = (2, 1, 0)

    def forward(self, ids: Tensor, skips: bool = False) -> Tensor:
        x = self.words(ids)
        for j in self.order:
            x = self.layers[j](x, self.scale)
        found: Tensor = self.head(x).mean(1)
        return found


def blocks_are_called_in_an_order_that_all_ranks_note(world: World) -> None:
    """In files, by chunks of which each rank has another number; an order of one rank alone is refused."""
    bare = Upwards()
    model = offloaded(world, bare, home=world.folder / "homes")
    model.order = (0, 1, 2) if world.rank else (0, 2, 1)
    world.raises(RuntimeError, lambda: model(batch()), "rank 0 has layers.2 and rank 1 has layers.1")
    model.order = (2, 1, 0)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    reference = torch.optim.SGD(bare.parameters(), lr=0.1)
    for seed in range(2):
        part = world.part(batch(seed))
        outputs = model.forward_chunks(part.split(1 + world.rank % 2))
        loss_of(torch.cat(outputs)).backward()
        loss_of(bare(batch(seed))).backward()
        assert greatest_error(model, bare) < 1e-6
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    with torch.no_grad():
        assert torch.allclose(model(batch(5)), bare(batch(5)), atol=1e-5)
    model.close()


def whole_on(p: Any) -> bool:
    return bool(p.placements == (Replicate(),))


def a_limit_of_memory_is_planned_for_by_all_ranks_alike(world: World) -> None:
    """The limit and the slots are the least that a rank has, and gradients are right; all know of a refused batch."""
    torch.manual_seed(0)
    width = 256
    bare = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)))
    model = world.model(bare, world.folder / "homes", 8, memory=f"{16 if world.rank else 64}MiB")
    planner: Any = model._homes.steps.planner
    assert planner.limit_bytes == 16 << 20
    if not world.rank:  # its search finds more slots
        planner._switch = lambda choice: type(planner)._switch(planner, replace(choice, slots=choice.slots + 2))
    wanted, slots = [], []
    for seed in range(4):
        x = torch.randn(8 * world.ranks, width, generator=torch.Generator().manual_seed(seed))
        bare.zero_grad()
        model.zero_grad()
        loss_of(model(world.part(x))).backward()
        loss_of(bare(x)).backward()
        assert greatest_error(model, bare) < 1e-6
        wanted.append(planner._wanted.slots)
        slots.append(model._homes.streamer.slots)
    found: list[Any] = [None] * world.ranks
    torch.distributed.all_gather_object(found, (wanted, slots))
    assert all(taken == slots for _, taken in found), found
    assert len(set(slots)) > 1
    assert all(found[0][0][k] == slots[k] + 2 for k in (1, 3)), found
    planner._limits.device.asked = 1 if world.rank else 64 << 20
    x = torch.randn(64, width)
    refused = (ValueError, "takes at least") if world.rank else (RuntimeError, "rank 1 of the mesh refused its batch")
    world.raises(refused[0], lambda: model(x), refused[1])
    planner._limits.device.asked = 64 << 20
    bare.zero_grad()
    model.zero_grad()
    loss_of(model(x)).backward()
    loss_of(bare(x)).backward()
    assert greatest_error(model, bare) < 1e-6


class Large(nn.Module):
    """Its embedding, which is tied to its head, has nearly all of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20001, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 20001, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        found: Tensor = self.head(x.mean(1))
        return found


def embeddings_and_heads_are_sharded_where_memory_is_too_small_for_them(world: World) -> None:
    """Each rank then stores its rows of them, and slots are as large as blocks."""
    bare = Large()
    table = bare.words.weight.nbytes
    model = offloaded(world, bare, world.folder / "homes", memory=int(3.7 * table))
    assert model._homes.blocks == ["words", *(f"layers.{k}" for k in range(3)), "head"]
    stored = sum(shard.home.nbytes for shard in model._homes.shards if shard.home is not None)
    assert stored < 1.01 * sum(p.nbytes for p in bare.parameters()) / world.ranks
    assert not any(whole_on(p) for p in model.parameters())
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
    assert not offloaded(world, bare, world.folder / "homes", memory="1GiB")._homes.rest
    model.close()


def a_kept_home_has_what_is_outside_of_blocks(world: World) -> None:
    kept = DiskHome(world.folder / "kept blocks", keep=True)
    model = offloaded(world, Encoder(), kept)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    loss_of(model(world.part(batch()))).backward()
    optimizer.step()
    values = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    model.close()
    with torch.device("meta"):
        bare = Encoder()
    model = offloaded(world, bare, kept)
    assert all(torch.equal(whole(p.detach()), values[name]) for name, p in model.named_parameters())
    loss_of(model(world.part(batch()))).backward()
    model.close()


#: The first ones are checked by four ranks as well.
CLAIMS = [
    blocks_have_the_gradients_of_one_process_on_the_whole_batch,
    gradcache_runs_over_blocks_with_unequal_rows_and_chunks,
    what_is_outside_of_blocks_trains_as_in_one_process,
    resident_adapters_train_as_in_one_process,
    blocks_are_called_in_an_order_that_all_ranks_note,
    a_limit_of_memory_is_planned_for_by_all_ranks_alike,
    embeddings_and_heads_are_sharded_where_memory_is_too_small_for_them,
    a_kept_home_has_what_is_outside_of_blocks,
    ranks_that_call_blocks_otherwise_are_told_the_first_difference,
]
