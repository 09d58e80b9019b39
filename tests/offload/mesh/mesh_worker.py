"""What ranks do in ``test_mesh``, in forked children of one process.

Run as ``python -m tests.offload.mesh.mesh_worker FOLDER``; prints how claims are broken, by claim. All ranks check the
same claims in the same order; a claim that fails on one rank only ends the others by the timeout of the group.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gradcache import GradCache
from gradcache.loss import DistributedContrastiveLoss, SimpleContrastiveLoss
from offload import (
    DiskHome,
    HomeError,
    MemoryPolicy,
    OffloadModel,
    OffloadOptimizer,
    load_checkpoint,
    load_pretrained,
    save_checkpoint,
)
from offload.mesh import parts
from offload.mesh.parts import bytes_at_once
from offload.mesh.ranks import HOST, CollectiveLane, Transport
from offload.streaming.lane import Arrival
from tests.offload.late import LateLane as LateUpdates
from tests.offload.mesh import accumulate_claims, blocks_claims, device_memory_claims, graph_claims
from tests.offload.mesh.forked import check_claims
from tests.offload.mesh.world import World, difference, greatest_error, whole
from tests.waits import find_sites, take_out

WIDTH, ROWS, STEPS = 7, 24, 3


def build(seed: int = 0, *, tied: bool = False, meta: bool = False) -> nn.Sequential:
    """Rows that no number of ranks divides, a layer of one row, and one that may be used twice."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        again = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(
            *(nn.Linear(5, WIDTH), nn.Tanh(), again, nn.Tanh()),
            *(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), again if tied else nn.Linear(WIDTH, WIDTH)),
            *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)),
        )


def batches() -> Tensor:
    return torch.randn(STEPS, ROWS, 5, generator=torch.Generator().manual_seed(5))


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


# --- gradients and training -------------------------------------------------------------------------------------------


def gradients_are_those_of_one_process_on_the_whole_batch(world: World) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"tied": True, "slices": 5},
        {"checkpoint_activation": False, "tied": True},
        {"num_microbatches": 3, "slices": 1},
        {"home": world.folder / "homes"},
    ]
    for way in ways:
        bare = build(tied=way.pop("tied", False))
        model = world.model(bare, **way)
        for batch in batches()[:2]:  # the second accumulates
            loss_of(model(world.part(batch))).backward()
            loss_of(bare(batch)).backward()
        assert greatest_error(model, bare) < 1e-6, way
        model.close()


def the_same_run_gives_the_same_bits(world: World) -> None:
    def bits() -> str:
        model = world.model(build(), slices=3)
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=0.1)
        for batch in batches():
            loss_of(model(world.part(batch))).backward()
            optimizer.step()
            optimizer.zero_grad()
        values = b"".join(whole(p.detach()).numpy().tobytes() for p in model.parameters())
        return hashlib.sha256(values).hexdigest()

    assert bits() == bits()


def pieces_of_any_size_change_no_bit_and_no_byte(world: World) -> None:
    """Cuts inside of rows, tied parameters, wider sums of narrow homes, replicas; pieces of one line and of all."""

    def run(**how: Any) -> tuple[list[bytes], int, int]:
        model = world.model(build(tied=True).to(how.pop("dtype", torch.float32)), slices=3, **how)
        dtype = next(model.parameters()).dtype
        for batch in batches()[:2]:
            loss_of(model(world.part(batch.to(dtype)))).backward()
        found = [whole(p.grad).view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]
        counted = model.statistics()
        return found, counted.bytes_gathered, counted.bytes_reduced

    ways: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16}, {"home": world.folder / "homes"}]
    if world.ranks == 2:
        ways.append({"mesh": init_device_mesh("cpu", (2, 1))})
    for way in ways:
        expected = run(**way)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts, "LEAST_AT_ONCE", 64)
            assert run(**way) == expected, way


def trains_as_one_process(world: World) -> None:
    """An ``OffloadOptimizer`` with clipping and accumulation, in memory and in files, and a plain optimizer."""
    ways: list[dict[str, Any]] = [
        {"max_norm": 0.05, "accumulate": 2},
        {"max_norm": 0.05, "home": world.folder / "homes"},
        {"update_in_backward": True},
        {"plain": {}},
        {"plain": {"foreach": True}},
        {"plain": {"fused": True}},
    ]
    for way in ways:
        bare, accumulate = build(), way.get("accumulate", 1)
        model = world.model(bare, way.get("home", "cpu"))
        reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
        if "plain" in way:
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, **way["plain"])
        else:
            how = {key: way[key] for key in ("max_norm", "update_in_backward") if key in way}
            optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, **how)
        for batch in batches():
            for rows in batch.chunk(accumulate):
                loss_of(model(world.part(rows))).backward()
                loss_of(bare(rows)).backward()
            if "max_norm" in way:
                norm = nn.utils.clip_grad_norm_(bare.parameters(), way["max_norm"])
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
            if "max_norm" in way:
                assert abs(float(optimizer.last_norm - norm)) < 1e-5 * float(norm)
            assert difference(model, bare) < 1e-5, way
        model.close()


def gradients_that_users_clip_or_replace_are_those_that_are_used(world: World) -> None:
    bare = build()
    model = world.model(bare)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=1.0, max_norm=0.005)
    reference = torch.optim.SGD(bare.parameters(), lr=1.0)
    for _ in range(2):
        for one, batch in ((model, world.part(batches()[0])), (bare, batches()[0])):
            loss_of(one(batch)).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.01)
            first = next(one.parameters())
            first.grad = first.grad * 2
        nn.utils.clip_grad_norm_(bare.parameters(), 0.005)
        optimizer.step()
        reference.step()
        reference.zero_grad()
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert difference(model, bare) < 1e-6


def a_parameter_without_gradients_keeps_none(world: World) -> None:
    """One that no rank uses has none; one that some ranks use counts as zero on the others; frozen ones stay."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.some, self.never = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.some(x) if bool(x[0, 0] > 0) else x

    torch.manual_seed(1)
    bare = nn.Sequential(nn.Linear(5, 5), Branch(), nn.Linear(5, 2))
    bare[2].bias.requires_grad_(False)
    model = world.model(bare, slices=3)
    x = torch.rand(4 * world.ranks, 5) - 0.5
    with torch.no_grad():
        bare[0].weight.copy_(torch.eye(5))
        bare[0].bias.zero_()
        model[0].weight.copy_(torch.distributed.tensor.distribute_tensor(torch.eye(5), world.mesh))
        model[0].bias.zero_()
    x[:, 0] = torch.where(torch.arange(len(x)) < 4, 1.0, -1.0)  # the first rank's rows use the branch
    model(world.part(x)).square().mean().backward()
    sum(bare(rows).square().mean() for rows in x.chunk(world.ranks)).div(world.ranks).backward()
    assert greatest_error(model, bare) < 1e-6
    assert model[1].some.weight.grad is not None
    assert model[1].never.weight.grad is None
    assert model[2].bias.grad is None
    model[2].bias.requires_grad_(True)
    model(world.part(x)).square().mean().backward()
    assert model[2].bias.grad is not None


def gradients_of_several_types_in_one_shard_are_those_of_one_process(world: World) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.wide, self.narrow, self.last = nn.Linear(5, 3), nn.Linear(5, 5).bfloat16(), nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.wide(x + self.narrow(x.bfloat16()).float()).double())

    bare = nn.Sequential(Mixed())
    model = world.model(bare, slices=1)
    loss_of(model(world.part(batches()[0]))).backward()
    loss_of(bare(batches()[0])).backward()
    for p, q in zip(model.parameters(), bare.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        error = float((whole(p.grad) - q.grad).abs().max() / q.grad.abs().max())
        assert error < (1e-2 if q.dtype == torch.bfloat16 else 1e-6)


def the_divisor_of_gradients_can_be_chosen(world: World) -> None:
    bare = build()
    model = world.model(bare, gradient_divide_factor=1)
    loss_of(model(world.part(batches()[0]))).backward()
    (loss_of(bare(batches()[0])) * world.ranks).backward()
    assert greatest_error(model, bare) < 1e-6


def layers_compute_in_another_type_and_sum_in_that_of_homes(world: World) -> None:
    model, one = world.model(build(), param_dtype=torch.bfloat16), build()
    alone = OffloadModel(one, "cpu", num_slices=4, checkpoint_activation=True, param_dtype=torch.bfloat16)
    x = world.part(batches()[0])
    assert torch.equal(model(x), alone(x))
    model(batches()[0]).float().square().mean().backward()  # the same rows on all ranks: the mean is that of one
    alone(batches()[0]).float().square().mean().backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    assert greatest_error(model, alone) < 1e-6


def gradients_and_states_of_16_bits_are_those_of_one_process(world: World) -> None:
    """Rounded is what all ranks have added. Which states are encoded depends on whole parameters, not on a part."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(96, 65), nn.Tanh(), nn.Linear(65, 4))
    x = torch.randn(8, 96)
    small: Any = {"gradient_dtype": torch.bfloat16, "checkpoint_activation": True}
    alone = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=2, **small)
    for home in ("cpu", world.folder / "homes"):
        models = [world.model(bare, home, 2, **small), *([alone] if home == "cpu" else [])]
        optimizers = [OffloadOptimizer(m, torch.optim.AdamW, lr=0.01, states=torch.bfloat16) for m in models]
        for _ in range(3):
            for model in models:  # the same rows on both ranks: the mean is that of one
                loss_of(model(x)).backward()
            gradients = [[whole(p.grad) for p in model.parameters()] for model in models]
            assert all(g.dtype == torch.bfloat16 for g in gradients[0])
            assert all(map(torch.equal, gradients[0], gradients[-1]))
            again = loss_of(models[0](x))
            world.raises(RuntimeError, again.backward, "a second backward before zero_grad()")
            del again
            gc.collect()  # the exception refers to the forward, which would wait for its backward
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        model, optimizer = models[0], optimizers[0]
        assert difference(model, alone) < 1e-6
        state = optimizer.state_dict()["state"]
        assert [state[k]["exp_avg"].dtype for k in range(4)] == [torch.bfloat16, *[torch.float32] * 3]
        save_checkpoint(world.folder / "small", model, optimizer)
        for states in (None, torch.bfloat16):
            other = world.model([nn.Linear(96, 65), nn.Tanh(), nn.Linear(65, 4)], home, 1)
            resumed = OffloadOptimizer(other, torch.optim.AdamW, states=states)
            load_checkpoint(world.folder / "small", other, resumed)
            found = resumed.state_dict()["state"]
            assert found[0]["exp_avg"].dtype == (states or torch.float32)
            assert all(
                torch.equal(whole(found[k]["exp_avg"]).float(), whole(state[k]["exp_avg"]).float()) for k in range(4)
            )
        dist.barrier()


def layers_on_the_meta_device_are_initialised_as_on_one_process(world: World) -> None:
    torch.manual_seed(3)
    model = world.model(build(meta=True))
    torch.manual_seed(3)
    alone = OffloadModel(build(meta=True), "cpu", num_slices=4, checkpoint_activation=True)
    assert difference(model, alone) == 0


def gradcache_runs_over_it_with_unequal_rows_and_chunks(world: World) -> None:
    rows = [5, 3, 4, 2][: world.ranks]
    x, y = torch.randn(2, sum(rows), 5, generator=torch.Generator().manual_seed(3))
    first = sum(rows[: world.rank])
    mine = slice(first, first + rows[world.rank])
    for tied in (False, True):
        bare = [nn.Sequential(*build(seed)[:3]) for seed in (1, 2)]
        towers = [world.model(tower, slices=2) for tower in bare]
        if tied:
            bare[1], towers[1] = bare[0], towers[0]
        SimpleContrastiveLoss()(bare[0](x), bare[1](y)).backward()
        before = towers[0].statistics()
        GradCache(towers, 2, DistributedContrastiveLoss())(x[mine], y[mine])
        for tower, expected in zip(towers, bare, strict=True):
            assert greatest_error(tower, expected) < 1e-6
        assert towers[0].statistics().shard_loads - before.shard_loads == 2  # both fit in slots, whatever the chunks


def rows_of_a_mesh_of_two_dimensions_store_the_model_each(world: World) -> None:
    """(replicate, shard): the gradients, clipping and bytes of both dimensions; replicas keep the same bits."""
    for shape in ((2, world.ranks // 2), (world.ranks, 1), (1, world.ranks)):
        mesh = init_device_mesh("cpu", shape)
        replicas, ranks = shape
        bare = build()
        # Replicas begin with the values of the first one.
        first = build(seed=0 if mesh.get_local_rank(0) == 0 else 7)
        model = world.model(first, "cpu" if replicas == 1 else world.folder / "homes", len(bare), mesh=mesh)
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.05)
        reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
        for batch in batches():
            before = model.statistics()
            loss_of(model(world.part(batch))).backward()
            loss_of(bare(batch)).backward()
            assert greatest_error(model, bare) < 1e-6
            after = model.statistics()
            of_layers = [row_bytes(layer.parameters(), ranks) for layer in bare]
            loaded = sum(of_layers[j] for j in model.plan().loads)
            assert after.bytes_gathered - before.bytes_gathered == (ranks - 1) * loaded
            # With a byte of each parameter in whole cache lines: parts of gradients, and twice a piece of their sums.
            reduced = [(64 + rows, 64 + 2 * -(-rows // replicas)) for rows in of_layers if rows]
            expected = sum((ranks - 1) * parts + (replicas - 1) * sums for parts, sums in reduced)
            assert after.bytes_reduced - before.bytes_reduced == expected
            assert after.bytes_agreed - before.bytes_agreed == 2 * 40 * (world.ranks - 1)
            norm = nn.utils.clip_grad_norm_(bare.parameters(), 0.05)
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
            assert abs(float(optimizer.last_norm - norm)) < 1e-5 * float(norm)
            assert difference(model, bare) < 1e-5
        mine = b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters() if isinstance(p, DTensor))
        bits: list[Any] = [None] * world.ranks
        dist.all_gather_object(bits, mine)
        assert all(bits[k] == bits[k % ranks] for k in range(world.ranks))


# --- order of copies --------------------------------------------------------------------------------------------------


class LateLane(CollectiveLane):
    """Runs each job when it, or a later one, is waited for; never in another order."""

    def __init__(self, *device: torch.device) -> None:
        super().__init__(*device)
        self.waiting: list[Callable[[], None]] = []
        self.done = 0

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Any:
        self.submitted += 1

        def job() -> None:
            for arrival in after:
                arrival.synchronize()
            copy()

        self.waiting.append(job)
        number = self.submitted

        class Late:
            def wait(late) -> None:
                while self.done < number:
                    self.done += 1
                    with torch.no_grad():
                        self.waiting.pop(0)()

            synchronize = wait

        return Late()

    def wait_idle(self) -> None:
        self.waiting.clear()


def collectives_that_run_late_change_nothing_but_a_reduction_that_is_not_awaited_loses_gradients(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.mesh.ranks.CollectiveLane", LateLane)
        for taken in ("", "arrival.wait()", "arrival.synchronize()"):
            bare = blocks_claims.Encoder()
            model = blocks_claims.offloaded(world, bare)
            within = {name for name, _ in bare.named_parameters() if name.startswith("layers")}
            with pytest.MonkeyPatch.context() as inner:
                for site in find_sites(["offload/mesh/gradients.py", "offload/mesh/sharded.py"]):
                    if site.text == taken:
                        take_out(site, inner)
                blocks_claims.loss_of(model(world.part(blocks_claims.batch()))).backward()
            blocks_claims.loss_of(bare(blocks_claims.batch())).backward()
            if not taken:
                assert greatest_error(model, bare) < 1e-6
                continue
            lost = within if taken == "arrival.wait()" else {name for name, _ in bare.named_parameters()} - within
            assert all(p.grad is None for name, p in model.named_parameters() if name in lost)
            used = [name for name, p in bare.named_parameters() if p.grad is not None and name not in lost]
            assert all(model.get_parameter(name).grad is not None for name in used)


def updates_wait_for_the_next_load_and_change_no_bit(world: World) -> None:
    """In files; while other code holds DTensors, local parts, gradients or views of them, updates run in the step."""
    held: dict[str, Callable[[Any], Any]] = {
        "nothing": lambda model: None,
        "a loss": lambda model: None,
        "a graph that has saved a parameter": lambda model: next(model.parameters()).square(),
        "a local part": lambda model: next(model.parameters()).to_local().detach(),
        "an alias": lambda model: next(model.parameters()).detach(),
        "a gradient": lambda model: next(model.parameters()).grad,
        "a local part of a gradient": lambda model: next(model.parameters()).grad.to_local(),
        "a weak reference": lambda model: weakref.ref(next(model.parameters())),
        "again nothing": lambda model: None,
    }
    models = [world.model(build(tied=True), world.folder / "homes", 4) for _ in range(2)]
    optimizers = [OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.05) for model in models]
    batch = world.part(batches()[0])
    for name, hold in held.items():
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = loss_of(model(batch))
            loss.backward()
            if name != "a loss":
                del loss
            something = hold(model) if model is models[0] else list(model.parameters())
            optimizer.step()
            pending = {shard.pending is not None for shard in model._homes.shards if shard.home is not None}
            assert pending == {something is None}, name
            del something
            optimizer.zero_grad()
    values = [[whole(p.detach()) for p in model.parameters()] for model in models]
    assert all(map(torch.equal, *values))


def loads_wait_for_updates_that_are_late(world: World) -> None:
    (site,) = [
        site
        for site in find_sites(["offload/mesh"])
        if site.function == "CollectiveLane.submit" and site.text == "arrival.synchronize()"
    ]
    for taken in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("offload.optim.optimizer.open_update_lane", lambda device: LateUpdates(1))
            if taken:
                take_out(site, patch)
            bare = build()
            model = world.model(bare, world.folder / "homes")
            optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=1.0)
            loss_of(model(world.part(batches()[0]))).backward()
            optimizer.step()
            optimizer.zero_grad()
            try:
                output = model(world.part(batches()[0]))
            except RuntimeError as error:  # the update came while the layers ran
                if not taken or "wrote their own parameters" not in str(error):
                    raise
                continue
            loss_of(bare(batches()[0])).backward()
            torch.optim.SGD(bare.parameters(), lr=1.0).step()
            late = bool((output - bare(world.part(batches()[0]))).abs().max() > 1e-3)
            assert late == taken
            del output


# --- bytes ------------------------------------------------------------------------------------------------------------


def row_bytes(parameters: Any, ranks: int) -> int:
    """What one rank stores, and sends to each other one: a piece of dimension 0 of each, in whole cache lines."""
    sizes = [-(-p.shape[0] // ranks) * math.prod(p.shape[1:]) * p.element_size() for p in parameters]
    return sum(-(-size // 64) * 64 for size in sizes)


def bytes_are_those_of_the_formula(world: World) -> None:
    bare = nn.Sequential(nn.Linear(5, 50), nn.Tanh(), nn.Linear(50, 301), nn.Linear(301, 64), nn.Linear(64, 3))
    folder = world.folder / f"rank{world.rank}"
    folder.mkdir(exist_ok=True)
    model = world.model(bare, folder, len(bare))
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=1.0)
    of_layers = [row_bytes(layer.parameters(), world.ranks) for layer in bare]
    shards = model._homes.shards
    assert [0 if shard.home is None else shard.home.nbytes for shard in shards] == of_layers
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    # All layers are in one file of whole pages.
    assert files == [-(-sum(of_layers) // 4096) * 4096]
    padding = 2 * 64 * len([*bare.parameters()]) + 5 * 64 * 4
    assert sum(of_layers) <= row_bytes(bare.parameters(), 1) / world.ranks + padding
    for number, batch in enumerate(batches()):
        before = model.statistics()
        loss_of(model(world.part(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
        after, others = model.statistics(), world.ranks - 1
        # All are loaded forward; the last two are still in slots when backward begins.
        assert after.bytes_gathered - before.bytes_gathered == others * (sum(of_layers) + sum(of_layers[:-2]))
        flags = sum(64 for layer in bare if [*layer.parameters()])
        assert after.bytes_reduced - before.bytes_reduced == others * (sum(of_layers) + flags), number
        assert after.bytes_agreed - before.bytes_agreed == others * 3 * 40  # forward, backward, norm
    # What is sent and what is received in one piece, with flags: nothing else is kept for collectives.
    piece = bytes_at_once(max(of_layers), world.ranks) + 64
    assert model._homes.public.ranks._staging.numel() <= 2 * world.ranks * piece
    states = sum(2 * p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    shown = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, DTensor)]
    assert sum(value.to_local().nbytes for value in shown) == states
    model.close()


def all_ranks_may_share_one_directory(world: World) -> None:
    homes = world.folder / "homes"
    model = world.model(build(), homes)
    dist.barrier()
    files = list(homes.rglob("*weights*"))
    assert len(files) == world.ranks
    dist.barrier()
    model.close()


def kept_homes_are_adopted_with_any_cuts(world: World) -> None:
    """Each rank keeps its own part in one directory; the parts are used together or not at all."""
    root = world.folder / "kept"
    kept = DiskHome(root, keep=True)
    model = world.model(build(), kept)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)
    run(model, optimizer, world, batches()[:1])
    values = [whole(p.detach()) for p in model.parameters()]
    model.close()
    del model, optimizer
    mine = root / f"rank{world.rank}-of-{world.ranks}" / "model.home"
    old = mine.read_bytes()
    for slices in (2, 5):
        model = world.model(build(meta=True), kept, slices)
        assert all(map(torch.equal, (whole(p.detach()) for p in model.parameters()), values)), slices
        again = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
        run(model, again, world, batches()[1:2])
        values = [whole(p.detach()) for p in model.parameters()]
        model.close()
        del model, again
    new = mine.read_bytes()
    world.raises(HomeError, lambda: world.model(build(), kept), "values, too")
    if world.rank == 0:
        world.raises(HomeError, lambda: world.model(build(meta=True), kept, mesh=None), "a mesh of processes")
        mine.write_bytes(old)
    dist.barrier()
    world.raises(HomeError, lambda: world.model(build(meta=True), kept), "one generation", f"rank {world.ranks - 1}")
    if world.rank == 0:
        mine.write_bytes(new[:-1])
    dist.barrier()
    words = ("truncated",) if world.rank == 0 else ("rank 0 of the mesh", "truncated")
    world.raises(HomeError, lambda: world.model(build(meta=True), kept), *words)
    if world.rank == 0:
        mine.unlink()
    dist.barrier()
    world.raises(HomeError, lambda: world.model(build(meta=True), kept), "expected a home on all ranks")
    if world.rank == 0:
        mine.write_bytes(new)
    dist.barrier()
    model = world.model(build(meta=True), kept, 3)
    assert all(map(torch.equal, (whole(p.detach()) for p in model.parameters()), values))
    ended = [model]
    del model
    with pytest.warns(RuntimeWarning, match="without close"):
        ended.clear()  # as after a crash
    dist.barrier()
    world.raises(HomeError, lambda: world.model(build(meta=True), kept), "without close")
    with pytest.warns(RuntimeWarning, match="recovering"):
        model = world.model(build(meta=True), DiskHome(root, keep=True, recover=True), 3)
    assert all(map(torch.equal, (whole(p.detach()) for p in model.parameters()), values))
    model.close()


def a_mesh_of_one_is_the_engine_without_a_mesh(world: World) -> None:
    alone = init_device_mesh("cpu", (world.ranks, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    model, plain = world.model(build(), mesh=alone), world.model(build(), mesh=None)
    for one in (model, plain):
        loss_of(one(batches()[0])).backward()
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    seconds = {"wait_seconds": 0, "compute_seconds": 0}
    assert {**vars(model.statistics()), **seconds} == {**vars(plain.statistics()), **seconds}
    assert str(model.plan()) == str(plain.plan())


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoints_and_weights_of_one_process_are_read_by_all_ranks(world: World) -> None:
    """Safetensors, with the states of the optimizer; tied parameters are stored once."""
    alone = OffloadModel(build(tied=True), "cpu", num_slices=3, checkpoint_activation=True)
    optimizer = OffloadOptimizer(alone, torch.optim.AdamW, lr=0.01)
    run(alone, optimizer, None, batches()[:1])
    path = world.folder / f"alone{world.rank}"
    save_checkpoint(path, alone, optimizer, extra={"epoch": 3})
    run(alone, optimizer, None, batches()[1:])
    for home in ("cpu", world.folder / "homes"):
        model = world.model(build(seed=7, tied=True), home, 5)
        resumed = OffloadOptimizer(model, torch.optim.AdamW, lr=0.5)
        found = load_checkpoint(path, model, resumed)
        assert (found.step, found.extra, resumed.steps) == (1, {"epoch": 3}, 1)
        run(model, resumed, world, batches()[1:])
        assert difference(model, alone) < 1e-5
    model = world.model(build(seed=7, tied=True))
    load_checkpoint(path, model)
    other = world.model(build(seed=8, tied=True))
    assert load_pretrained(other, path) == ([], [])
    assert difference(model, other) == 0
    assert not torch.equal(whole(model[0].weight.detach()), build(seed=7)[0].weight)
    world.raises(ValueError, lambda: load_checkpoint(path, world.model(build()[:5])), "7.weight is not in the model")


def checkpoints_of_all_ranks_are_read_by_any_number(world: World) -> None:
    """With ``save_checkpoint``: complete or absent whichever rank fails, and read by one process as well."""
    path = world.folder / "saved"
    model = world.model(build(tied=True))
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)
    run(model, optimizer, world, batches()[:1])
    torch.manual_seed(world.rank)
    save_checkpoint(path, model, optimizer, extra={"epoch": 3})
    drawn = torch.rand(3)
    other = world.model(build(seed=7, tied=True), world.folder / "homes", 2)
    resumed = OffloadOptimizer(other, torch.optim.AdamW, lr=0.5)
    found = load_checkpoint(path, other, resumed)
    assert (found.step, found.extra, resumed.steps) == (1, {"epoch": 3}, 1)
    assert torch.equal(torch.rand(3), drawn)
    with pytest.MonkeyPatch.context() as patch:

        def fails(*_: object) -> None:
            raise OSError("no space")

        if world.rank == world.ranks - 1:
            patch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", fails)
        world.raises(RuntimeError, lambda: save_checkpoint(path, model, optimizer), f"rank {world.ranks - 1}", "space")
        patch.undo()
        if world.rank == 0:
            patch.setattr("offload.files.checkpoint._commit", fails)
        kind = OSError if world.rank == 0 else RuntimeError
        world.raises(kind, lambda: save_checkpoint(path, model, optimizer), "no space")
    dist.barrier()
    assert [entry.name.split("-")[0] for entry in sorted(path.iterdir())] == ["model.safetensors.index.json", "state"]
    run(model, optimizer, world, batches()[1:2])
    run(other, resumed, world, batches()[1:2])
    assert difference(other, model) == 0
    if world.rank == 0:
        alone = OffloadModel(build(seed=9, tied=True), "cpu", num_slices=3, checkpoint_activation=True)
        last = OffloadOptimizer(alone, torch.optim.AdamW, lr=0.5)
        load_checkpoint(path, alone, last)
        run(alone, last, None, batches()[1:2])
        values = [p.detach() for p in alone.parameters()]
    else:
        values = [torch.empty(p.shape) for p in other.parameters()]
    for value, p in zip(values, other.parameters(), strict=True):
        assert float((whole(p.detach()) - value).abs().max()) < 1e-5 or world.rank
    world.raises(ValueError, lambda: load_checkpoint(path, world.model(build()[:5])), "7.weight is not in the model")
    save_checkpoint(path, other, resumed)
    dist.barrier()
    assert [entry.name.split("-")[0] for entry in sorted(path.iterdir())] == ["model.safetensors.index.json", "state"]


def a_gradscaler_skips_a_step_on_all_ranks_or_on_none(world: World) -> None:
    model, bare = world.model(build()), build()
    optimizer, reference = (
        OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.05),
        torch.optim.AdamW(bare.parameters(), lr=0.01),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number, batch in enumerate(batches()):
        overflows = number == 1
        rows = world.part(batch)
        if overflows and world.rank == 0:
            rows = rows * torch.inf
        before = [whole(p.detach()) for p in model.parameters()]
        scaler.scale(loss_of(model(rows))).backward()
        if number == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0 ** (10 if number == 0 else 9)
        if overflows:
            assert all(map(torch.equal, before, (whole(p.detach()) for p in model.parameters())))
            continue
        loss_of(bare(batch)).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.05)
        reference.step()
        reference.zero_grad()
        assert difference(model, bare) < 1e-5


def classes_that_need_whole_parameters_are_right_or_refused(world: World) -> None:
    """``OffloadOptimizer`` refuses them. Given DTensors, torch computes norms and products of all ranks, or raises."""

    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.dim() == 2 and p.shape[0] > 1]

    def step(kind: Any) -> None:
        model, bare = world.model(build()), build()
        optimizer, reference = kind(matrices(model), lr=0.01), kind(matrices(bare), lr=0.01)
        loss_of(model(world.part(batches()[0]))).backward()
        loss_of(bare(batches()[0])).backward()
        optimizer.step()
        reference.step()
        # Muon computes in bfloat16. On the rows of each rank alone the difference would be as large as the step.
        assert difference(model, bare) < 0.1 * difference(bare, build()), kind

    model = world.model(build())
    for kind in (torch.optim.Adafactor, torch.optim.Muon):
        call = partial(OffloadOptimizer, model, kind, params=matrices(model))
        world.raises(TypeError, call, kind.__name__, "mesh=", "each element")
        try:
            step(kind)
        except RuntimeError as error:  # DTensors of this torch lack an operation
            assert "placement" in str(error)  # noqa: PT017


def run(model: nn.Module, optimizer: Any, world: World | None, steps: Tensor) -> None:
    for batch in steps:
        loss_of(model(batch if world is None else world.part(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- what is refused, and failures ------------------------------------------------------------------------------------


def ranks_that_differ_are_told_the_first_word_that_does(world: World) -> None:
    first = world.rank == 0
    wide = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4 if first else 5))
    world.raises(RuntimeError, lambda: world.model(wide, slices=2), "rank 0", "1:1.weight[4,4]float32", "[5,4]")
    assert next(tuple(p.shape) for p in wide.parameters()) == (4, 3)
    for name, value in (("gradient_divide_factor", 3.0), ("param_dtype", torch.bfloat16)):
        how: dict[str, Any] = {name: value} if first else {}
        world.raises(RuntimeError, lambda: world.model(build(), **how), "rank 0 has", f"{value}")  # noqa: B023
    model = world.model(build())
    model[0].weight.requires_grad_(first)
    output = model(world.part(batches()[0]))
    world.raises(RuntimeError, output.sum().backward, "rank 0 has 0.weight and rank 1 has 0.bias")
    model[0].weight.requires_grad_(True)
    call = (lambda: model(batches()[0])) if first else model(batches()[0]).sum().backward
    if first:
        model(batches()[0])
    world.raises(RuntimeError, call, "rank 0 begins a forward, rank 1 begins a backward")
    loss_of(model(world.part(batches()[0]))).backward()
    if first:
        model.zero_grad()
    output = model(world.part(batches()[0]))
    world.raises(RuntimeError, output.sum().backward, "rank 0 has 0.weight and rank 1 has 0.weight+gradient")
    for name, value in (("steps", 0), ("lr", 0.2)):
        model = world.model(build())
        optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
        if first and name == "lr":
            optimizer.param_groups[0]["lr"] = value
        loss_of(model(world.part(batches()[0]))).backward()
        if not (first and name == "steps"):
            optimizer.step()
        optimizer.zero_grad()
        words = ("rank 0 has with-gradients", "step(SGD") if name == "steps" else ("lr=0.2", "lr=0.1")
        for _ in range(2):  # weights differ, so every later pass raises as well
            world.raises(RuntimeError, lambda: model(world.part(batches()[0])), *words)  # noqa: B023


def what_is_not_supported_is_refused_before_anything_changes(world: World) -> None:
    bare = build()
    three = init_device_mesh("cpu", (1, 1, world.ranks))
    scalar = nn.Linear(2, 2)
    scalar.register_parameter("scale", nn.Parameter(torch.ones(())))
    across = nn.Linear(4, 3)
    across.weight = nn.Parameter(torch.ones(4, 3).t())
    world.raises(ValueError, lambda: world.model(bare, mesh=three), "one dimension", "got 3")
    world.raises(TypeError, lambda: world.model(bare, mesh="cpu"), "DeviceMesh", "str")
    world.raises(ValueError, lambda: world.model(bare, store_dtype="split"), "store_dtype=", "mesh=")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.construction.compute_device", lambda device: torch.device("cuda", 0))
        for memory in ("1GiB", {"device": "1GiB", "host": "2GiB"}, MemoryPolicy.fixed(slots=2), None):
            with pytest.raises(ValueError, match="init_device_mesh") as raised:
                world.model(bare, memory=memory)
            assert "memory=" not in str(raised.value)
    world.raises(ValueError, lambda: world.model(bare, gradient_divide_factor=0), "gradient_divide_factor=0")
    world.raises(ValueError, lambda: world.model(bare, mesh=None, gradient_divide_factor=2), "mesh=")
    world.raises(ValueError, lambda: world.model([scalar], slices=1), "scale", "(1,)")
    world.raises(ValueError, lambda: world.model([across], slices=1), "weight", "contiguous")
    assert scalar.scale.shape == ()
    assert across.weight.stride() == (1, 3)
    model = world.model(bare)
    world.raises(TypeError, lambda: copy.deepcopy(model), "mesh=", "torch.distributed.checkpoint")
    world.raises(ValueError, lambda: model.share_slots([[model]]), "mesh=")
    handle = model[0].weight.register_hook(lambda gradient: gradient)
    world.raises(RuntimeError, lambda: model(batches()[0]), "hooks", "0.weight")
    handle.remove()
    x = batches()[0].requires_grad_()
    output = model(x).sum()
    assert torch.autograd.grad(output, x, retain_graph=True)[0].abs().max() > 0
    world.raises(RuntimeError, lambda: torch.autograd.grad(output, [*model.parameters()]), "6.weight", "mesh=")
    sparse = world.model([nn.Embedding(10, 4, sparse=True)], slices=1)
    output = sparse(torch.arange(4))
    world.raises(RuntimeError, lambda: output.sum().backward(), "sparse", "mesh=")


def layers_that_write_their_own_parameters_are_refused(world: World) -> None:
    class Writes(nn.Linear):
        assigns = False

        def forward(self, x: Tensor) -> Tensor:
            if self.assigns:
                self.weight.data = self.weight.data * 0.5
            else:
                with torch.no_grad():
                    self.weight.mul_(0.5)
            return super().forward(x)

    for assigns in (False, True):
        layer = Writes(4, 4)
        layer.assigns = assigns
        model = world.model([layer, nn.Linear(4, 4)], slices=2)
        world.raises(RuntimeError, lambda model=model: model(torch.ones(2, 4)), "wrote their own parameters", "mesh=")
        assert torch.equal(whole(model[0].weight.detach()), layer.weight.detach()) or world.ranks


def a_failure_on_all_ranks_leaves_the_model_usable(world: World) -> None:
    bare = build()
    model = world.model(bare)
    world.raises(RuntimeError, lambda: model(torch.ones(3, 4)), "shapes")
    loss_of(model(world.part(batches()[0]))).backward()
    loss_of(bare(batches()[0])).backward()
    assert greatest_error(model, bare) < 1e-6


def models_that_follow_each_other_use_the_same_process_groups(world: World) -> None:
    def trained() -> tuple[OffloadModel, list[Any]]:
        bare = build()
        model = world.model(bare)
        loss_of(model(world.part(batches()[0]))).backward()
        loss_of(bare(batches()[0])).backward()
        assert greatest_error(model, bare) < 1e-6
        ranks = model._homes.public.ranks
        return model, [ranks._group.handle, ranks._messages.handle]

    model, first = trained()
    model.close()
    model, used = trained()
    assert used == first
    held = [model] if world.rank else []  # a rank whose model is collected later
    del model
    gc.collect()
    model, apart = trained()
    assert not {*apart} & {*used}
    model.close()
    for each in held:
        each.close()
    model, used = trained()
    assert {*used} <= {*first, *apart}
    if world.rank == 0:
        model._homes.public.ranks._messages.begin()  # the others have missed this one
    model.close()
    _, after = trained()
    assert used[0] in after
    assert used[1] not in after


CLAIMS = [
    gradients_are_those_of_one_process_on_the_whole_batch,
    the_same_run_gives_the_same_bits,
    trains_as_one_process,
    pieces_of_any_size_change_no_bit_and_no_byte,
    gradients_that_users_clip_or_replace_are_those_that_are_used,
    a_parameter_without_gradients_keeps_none,
    the_divisor_of_gradients_can_be_chosen,
    rows_of_a_mesh_of_two_dimensions_store_the_model_each,
    collectives_that_run_late_change_nothing_but_a_reduction_that_is_not_awaited_loses_gradients,
    updates_wait_for_the_next_load_and_change_no_bit,
    loads_wait_for_updates_that_are_late,
    layers_compute_in_another_type_and_sum_in_that_of_homes,
    gradients_and_states_of_16_bits_are_those_of_one_process,
    layers_on_the_meta_device_are_initialised_as_on_one_process,
    gradcache_runs_over_it_with_unequal_rows_and_chunks,
    bytes_are_those_of_the_formula,
    all_ranks_may_share_one_directory,
    kept_homes_are_adopted_with_any_cuts,
    a_mesh_of_one_is_the_engine_without_a_mesh,
    checkpoints_and_weights_of_one_process_are_read_by_all_ranks,
    checkpoints_of_all_ranks_are_read_by_any_number,
    a_gradscaler_skips_a_step_on_all_ranks_or_on_none,
    classes_that_need_whole_parameters_are_right_or_refused,
    ranks_that_differ_are_told_the_first_word_that_does,
    what_is_not_supported_is_refused_before_anything_changes,
    layers_that_write_their_own_parameters_are_refused,
    a_failure_on_all_ranks_leaves_the_model_usable,
    models_that_follow_each_other_use_the_same_process_groups,
    *blocks_claims.CLAIMS,
    *accumulate_claims.CLAIMS,
    *graph_claims.CLAIMS,
]
#: Checked by four ranks as well.
OF_FOUR = [
    gradients_are_those_of_one_process_on_the_whole_batch,
    rows_of_a_mesh_of_two_dimensions_store_the_model_each,
    bytes_are_those_of_the_formula,
    gradcache_runs_over_it_with_unequal_rows_and_chunks,
    *blocks_claims.CLAIMS[:2],
    graph_claims.a_rank_whose_graph_leaves_out_blocks_counts_as_zeros,
]
#: Checked as well with what ranks do on GPUs, here in host memory.
OF_DEVICE = [
    gradients_are_those_of_one_process_on_the_whole_batch,
    pieces_of_any_size_change_no_bit_and_no_byte,
    gradients_of_several_types_in_one_shard_are_those_of_one_process,
    a_parameter_without_gradients_keeps_none,
    rows_of_a_mesh_of_two_dimensions_store_the_model_each,
    blocks_claims.blocks_have_the_gradients_of_one_process_on_the_whole_batch,
    *device_memory_claims.CLAIMS,
]
ON_DEVICE = Transport(HOST.device, HOST.backend)


def claims_of(
    ranks: int, claims: Sequence[Callable[[World], None]], folder: Path, transport: Transport = HOST
) -> dict[str, Callable[[], None]]:
    """For each of so many ranks, which wait for each other after a claim; ``transport``: how they move bytes."""
    title = f"{ranks} ranks" + ("" if transport is HOST else ", device")
    folder = folder / title
    (folder / "homes").mkdir(parents=True)
    world = cache(lambda: World(init_device_mesh("cpu", (ranks,)), folder))

    def check(claim: Callable[[World], None]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("offload.mesh.sharding.transport_for", lambda device: transport)
            try:
                claim(world())
            finally:
                dist.barrier()

    return {f"{claim.__name__}, {title}": partial(check, claim) for claim in claims}


def main(name: str) -> None:
    folder = Path(name)
    torch.set_num_threads(1)
    warnings.filterwarnings("error", category=UserWarning, module="offload")
    distributed: Any = dist  # its annotations leave these out
    distributed.set_debug_level(distributed.DebugLevel.DETAIL)  # all ranks must call the same collectives
    stages = [(ranks, claims_of(ranks, claims, folder)) for ranks, claims in ((2, CLAIMS), (4, OF_FOUR))]
    stages.append((2, claims_of(2, OF_DEVICE, folder, ON_DEVICE)))
    print(json.dumps(check_claims(stages, folder)))


if __name__ == "__main__":
    main(sys.argv[1])
