"""What ranks do in ``test_mesh``, in forked children of one process.

A claim that fails on one rank only ends the others by the timeout of the group.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
    MemoryPolicy,
    OffloadModel,
    OffloadOptimizer,
    load_checkpoint,
    load_pretrained,
    save_checkpoint,
)
from offload.mesh import parts
from offload.mesh.ranks import HOST, Transport
from tests.offload.late import LateLane as LateUpdates
from tests.offload.mesh import device_memory_claims, graph_claims
from tests.offload.mesh.world import (
    Adapted,
    Encoder,
    LateLane,
    World,
    batch,
    batches,
    build,
    difference,
    greatest_error,
    loss_of,
    rows,
    whole,
)
from tests.offload.open_files import open_files
from tests.offload.side_by_side import advance
from tests.programs import run_program
from tests.waits import find_sites, take_out

# --- gradients and training -------------------------------------------------------------------------------------------


def adapted(*, frozen: bool) -> nn.Sequential:
    torch.manual_seed(3)
    shared = nn.Parameter(torch.ones(1))
    bare = nn.Sequential(*(Adapted(shared) for _ in range(3)))
    for layer in bare:
        layer.base.requires_grad_(not frozen)
    return bare


#: The model, its inputs by number, what it is offloaded with, and its optimizer's choices; "plain": a class of torch.
TRAINING: list[tuple[Callable[[], nn.Module], Callable[[int], Tensor], dict[str, Any], dict[str, Any]]] = [
    (build, rows, {}, {"max_norm": 0.05}),
    (partial(build, tied=True), rows, {"slices": 5}, {}),
    (partial(build, tied=True), rows, {"checkpoint_activation": False}, {"plain": {}}),
    (build, rows, {"num_microbatches": 3, "slices": 1}, {"plain": {"foreach": True}}),
    (build, rows, {"home": "files"}, {"max_norm": 0.05}),
    (build, rows, {"home": "files"}, {"update_in_backward": True}),
    (build, rows, {"home": "files"}, {"plain": {"fused": True}}),
    (Encoder, batch, {"blocks": "layers", "num_microbatches": 2}, {"max_norm": 0.01}),
    (
        Encoder,
        batch,
        {"blocks": "layers", "checkpoint_activation": False, "home": "files"},
        {"plain": {"foreach": True}},
    ),
    (Encoder, batch, {"blocks": ["words", "layers", "head"]}, {"max_norm": 0.01}),
    (partial(adapted, frozen=True), rows, {"resident": "*.lora_*", "slices": 3, "home": "files"}, {"max_norm": 0.01}),
    (partial(adapted, frozen=False), rows, {"resident": "*.lora_*", "slices": 3}, {"max_norm": 0.01}),
]


def trains_as_one_process_on_the_whole_batch(world: World) -> None:
    """Gradients that accumulate, norms and weights, inside and outside of blocks, in memory and in files.

    Half of the ways in four ranks, the others in two.
    """
    of_two = TRAINING[2::2]
    for make, inputs, how, choices in of_two if world.ranks == 2 else [way for way in TRAINING if way not in of_two]:
        bare, how, choices = make(), {**how}, {**choices}
        given = copy.deepcopy(bare)
        if world.rank and ("blocks" in how or "resident" in how):
            # What ranks store whole begins with the values of the first one.
            nn.init.zeros_(given.between.weight if "blocks" in how else given[1].lora_a.weight)
        model = world.model(given, world.home if how.pop("home", "") else "cpu", **how)
        reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
        if "plain" in choices:
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, **choices["plain"])
        else:
            optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, **choices)
        in_backward, max_norm = choices.get("update_in_backward"), choices.get("max_norm")
        for step in range(2):
            for k in range(1 if in_backward else 2):
                x = inputs(2 * step + k)
                loss_of(model(world.part(x))).backward()
                loss_of(bare(x)).backward()
            assert in_backward or greatest_error(model, bare) < 1e-6, how
            if max_norm is not None:
                norm = nn.utils.clip_grad_norm_(bare.parameters(), max_norm)
            advance(optimizer, reference)
            assert max_norm is None or abs(float(optimizer.last_norm - norm)) < 1e-5 * float(norm)
            assert difference(model, bare) < 1e-5, how
        with torch.no_grad():
            assert torch.allclose(model(inputs(5)), bare(inputs(5)), atol=1e-5)
        values: list[Any] = [None] * world.ranks
        dist.all_gather_object(values, [p.to_local().detach().clone() for p in model.parameters() if world.is_whole(p)])
        assert all(torch.equal(p, q) for other in values for p, q in zip(other, values[0], strict=True)), how
        model.close()


def pieces_of_any_size_change_no_bit_and_no_byte(world: World) -> None:
    """Cuts inside of rows, tied parameters, wider sums of narrow homes, replicas; pieces of one line and of all."""

    def run(**how: Any) -> tuple[list[bytes], int, int]:
        model = world.model(build(tied=True).to(how.pop("dtype", torch.float32)), slices=3, **how)
        dtype = next(model.parameters()).dtype
        for each in batches()[:2]:
            loss_of(model(world.part(each.to(dtype)))).backward()
        found = [whole(p.grad).view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]
        counted = model.statistics()
        return found, counted.bytes_gathered, counted.bytes_reduced

    ways: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16}, {"home": world.home}]
    if world.ranks == 2:
        ways.append({"mesh": init_device_mesh("cpu", (2, 1))})
    for way in ways:
        expected = run(**way)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts, "LEAST_AT_ONCE", 64)
            assert run(**way) == expected, way


def gradients_that_users_clip_or_replace_are_those_that_are_used(world: World) -> None:
    bare = build()
    model = world.model(bare)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=1.0, max_norm=0.005)
    reference = torch.optim.SGD(bare.parameters(), lr=1.0)
    for _ in range(2):
        for one, x in ((model, world.part(rows(0))), (bare, rows(0))):
            loss_of(one(x)).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.01)
            first = next(one.parameters())
            first.grad = first.grad * 2
        nn.utils.clip_grad_norm_(bare.parameters(), 0.005)
        optimizer.step()
        advance(reference)
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
    bare = nn.Sequential(nn.Identity(), Branch(), nn.Linear(5, 2))
    bare[2].bias.requires_grad_(False)
    model = world.model(bare, slices=3)
    x = torch.rand(4 * world.ranks, 5) - 0.5
    x[:, 0] = torch.where(torch.arange(len(x)) < 4, 1.0, -1.0)  # the first rank's rows use the branch
    model(world.part(x)).square().mean().backward()
    sum(bare(part).square().mean() for part in x.chunk(world.ranks)).div(world.ranks).backward()
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
    loss_of(model(world.part(rows(0)))).backward()
    loss_of(bare(rows(0))).backward()
    for p, q in zip(model.parameters(), bare.parameters(), strict=True):
        error = float((whole(p.grad) - q.grad).abs().max() / q.grad.abs().max())
        assert error < (1e-2 if q.dtype == torch.bfloat16 else 1e-6)


def the_divisor_of_gradients_and_the_type_to_compute_in_can_be_chosen(world: World) -> None:
    bare = build()
    model = world.model(bare, gradient_divide_factor=1)
    loss_of(model(world.part(rows(0)))).backward()
    (loss_of(bare(rows(0))) * world.ranks).backward()
    assert greatest_error(model, bare) < 1e-6
    model, one = world.model(build(), param_dtype=torch.bfloat16), build()
    alone = OffloadModel(one, "cpu", num_slices=4, checkpoint_activation=True, param_dtype=torch.bfloat16)
    for each in (model, alone):
        each(rows(0)).float().square().mean().backward()  # the same rows on all ranks: the mean is that of one
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    assert greatest_error(model, alone) < 1e-6


def gradients_and_states_of_16_bits_are_those_of_one_process(world: World) -> None:
    """Rounded is what all ranks have added. Which states are encoded depends on whole parameters, not on a part."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(96, 65), nn.Tanh(), nn.Linear(65, 4))
    x = torch.randn(8, 96)
    small: Any = {"gradient_dtype": torch.bfloat16, "checkpoint_activation": True}
    models = [
        world.model(bare, world.home, 2, **small),
        OffloadModel(copy.deepcopy(bare), "cpu", num_slices=2, **small),
    ]
    optimizers = [OffloadOptimizer(m, torch.optim.AdamW, lr=0.01, states=torch.bfloat16) for m in models]
    for _ in range(3):
        for model in models:  # the same rows on both ranks: the mean is that of one
            loss_of(model(x)).backward()
        gradients = [[whole(p.grad) for p in model.parameters()] for model in models]
        assert all(g.dtype == torch.bfloat16 for g in gradients[0])
        assert all(map(torch.equal, *gradients))
        advance(*optimizers)
    assert difference(*models) < 1e-6
    state = optimizers[0].state_dict()["state"]
    assert [state[k]["exp_avg"].dtype for k in range(4)] == [torch.bfloat16, *[torch.float32] * 3]
    save_checkpoint(world.folder / "small", models[0], optimizers[0])
    for states in (None, torch.bfloat16):
        other = world.model([nn.Linear(96, 65), nn.Tanh(), nn.Linear(65, 4)], "cpu", 1)
        resumed = OffloadOptimizer(other, torch.optim.AdamW, states=states)
        load_checkpoint(world.folder / "small", other, resumed)
        found = resumed.state_dict()["state"]
        assert found[0]["exp_avg"].dtype == (states or torch.float32)
        assert all(
            torch.equal(whole(found[k]["exp_avg"]).float(), whole(state[k]["exp_avg"]).float()) for k in range(4)
        )


def gradcache_runs_over_it_with_unequal_rows_and_chunks(world: World) -> None:
    counts = [5, 3, 4, 2][: world.ranks]
    begin = sum(counts[: world.rank])
    mine = slice(begin, begin + counts[world.rank])

    def head(seed: int) -> nn.Module:
        return nn.Sequential(*build(seed)[:3])

    for make, inputs, how, loads in ((head, rows, {"slices": 2}, 2), (Encoder, batch, {"blocks": "layers"}, 4)):
        x, y = (torch.cat([inputs(k), inputs(k + 5)])[: sum(counts)] for k in (1, 2))
        bare = [make(seed) for seed in (1, 2)]
        towers = [world.model(tower, **how) for tower in bare]
        SimpleContrastiveLoss()(bare[0](x), bare[1](y)).backward()
        before = towers[0].statistics()
        GradCache(towers, 1 + world.rank % 2, DistributedContrastiveLoss())(x[mine], y[mine])
        for tower, expected in zip(towers, bare, strict=True):
            assert greatest_error(tower, expected) < 1e-6
        # Two are in slots when backward begins, whatever the chunks.
        assert towers[0].statistics().shard_loads - before.shard_loads == loads


def row_bytes(parameters: Any, ranks: int) -> int:
    """What one rank stores, and sends to each other one: a piece of dimension 0 of each, in whole cache lines."""
    sizes = [-(-p.shape[0] // ranks) * math.prod(p.shape[1:]) * p.element_size() for p in parameters]
    return sum(-(-size // 64) * 64 for size in sizes)


def rows_of_a_mesh_of_two_dimensions_store_the_model_each(world: World) -> None:
    """(replicate, shard): gradients, clipping, files and bytes of both dimensions; replicas keep the same bits."""
    for shape in dict.fromkeys([(2, world.ranks // 2), (world.ranks, 1), (1, world.ranks)]):
        mesh = init_device_mesh("cpu", shape)
        replicas, ranks = shape
        bare = build()
        folder = world.folder / f"{replicas} rows, rank{world.rank}"
        folder.mkdir()
        # Replicas begin with the values of the first one.
        first = build(seed=0 if mesh.get_local_rank(0) == 0 else 7)
        model = world.model(first, folder, len(bare), mesh=mesh)
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.05)
        reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
        of_layers = [row_bytes(layer.parameters(), ranks) for layer in bare]
        # All layers are in one file of whole pages.
        assert [path.stat().st_size for path in open_files(folder)] == [-(-sum(of_layers) // 4096) * 4096]
        for each in batches():
            before = model.statistics()
            world.check_gradients(model, bare, each)
            after = model.statistics()
            loaded = sum(of_layers[j] for j in model.plan().loads)
            assert after.bytes_gathered - before.bytes_gathered == (ranks - 1) * loaded
            # With a byte of each parameter in whole cache lines: parts of gradients, and twice a piece of their sums.
            reduced = [(64 + nbytes, 64 + 2 * -(-nbytes // replicas)) for nbytes in of_layers if nbytes]
            expected = sum((ranks - 1) * parts + (replicas - 1) * sums for parts, sums in reduced)
            assert after.bytes_reduced - before.bytes_reduced == expected
            assert after.bytes_agreed - before.bytes_agreed == 2 * 40 * (world.ranks - 1)
            nn.utils.clip_grad_norm_(bare.parameters(), 0.05)
            advance(optimizer, reference)
            assert difference(model, bare) < 1e-5
        mine = b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters() if isinstance(p, DTensor))
        found: list[Any] = [None] * world.ranks
        dist.all_gather_object(found, mine)
        assert all(found[k] == found[k % ranks] for k in range(world.ranks))
        states = [value for state in optimizer.state.values() for value in state.values()]
        shown = sum(value.to_local().nbytes for value in states if isinstance(value, DTensor))
        assert shown == sum(2 * p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
        model.close()


# --- order of copies --------------------------------------------------------------------------------------------------


def collectives_that_run_late_change_nothing_but_a_reduction_that_is_not_awaited_loses_gradients(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.mesh.ranks.CollectiveLane", LateLane)
        for taken in ("", "arrival.wait()", "arrival.synchronize()"):
            bare = Encoder()
            model = world.model(bare, blocks="layers")
            within = {name for name, _ in bare.named_parameters() if name.startswith("layers")}
            with pytest.MonkeyPatch.context() as inner:
                for site in find_sites(["offload/mesh/gradients.py", "offload/mesh/sharded.py"]):
                    if site.text == taken:
                        take_out(site, inner)
                loss_of(model(world.part(batch(0)))).backward()
            loss_of(bare(batch(0))).backward()
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
        "a local part": lambda model: next(model.parameters()).to_local().detach(),
        "a local part of a gradient": lambda model: next(model.parameters()).grad.to_local(),
        "a weak reference": lambda model: weakref.ref(next(model.parameters())),
        "again nothing": lambda model: None,
    }
    models = [world.model(build(tied=True), world.home, 4) for _ in range(2)]
    optimizers = [OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.05) for model in models]
    for name, hold in held.items():
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model(world.part(rows(0)))).backward()
            something = hold(model) if model is models[0] else list(model.parameters())
            optimizer.step()
            pending = {shard.pending is not None for shard in model._homes.shards if shard.home is not None}
            assert pending == {something is None}, name
            del something
            optimizer.zero_grad()
    assert all(map(torch.equal, *([whole(p.detach()) for p in model.parameters()] for model in models)))


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
            model = world.model(bare, world.home)
            optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=1.0)
            loss_of(model(world.part(rows(0)))).backward()
            advance(optimizer)
            try:
                output = model(world.part(rows(0)))
            except RuntimeError as error:  # the update came while the layers ran
                if not taken or "wrote their own parameters" not in str(error):
                    raise
                continue
            loss_of(bare(rows(0))).backward()
            torch.optim.SGD(bare.parameters(), lr=1.0).step()
            late = bool((output - bare(world.part(rows(0)))).abs().max() > 1e-3)
            assert late == taken
            del output


def a_mesh_of_one_is_the_engine_without_a_mesh(world: World) -> None:
    alone = init_device_mesh("cpu", (world.ranks, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    model, plain = world.model(build(), mesh=alone), world.model(build(), mesh=None)
    for one in (model, plain):
        loss_of(one(rows(0))).backward()
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    seconds = {"wait_seconds": 0, "compute_seconds": 0}
    assert {**vars(model.statistics()), **seconds} == {**vars(plain.statistics()), **seconds}
    assert str(model.plan()) == str(plain.plan())


# --- checkpoints ------------------------------------------------------------------------------------------------------


def run(model: nn.Module, optimizer: Any, world: World | None, steps: Tensor) -> None:
    for each in steps:
        loss_of(model(each if world is None else world.part(each))).backward()
        advance(optimizer)


def checkpoints_and_weights_of_one_process_are_read_by_all_ranks(world: World) -> None:
    """Safetensors, with the states of the optimizer; tied parameters are stored once."""
    alone = OffloadModel(build(tied=True), "cpu", num_slices=3, checkpoint_activation=True)
    optimizer = OffloadOptimizer(alone, torch.optim.AdamW, lr=0.01)
    run(alone, optimizer, None, batches()[:1])
    path = world.folder / f"alone{world.rank}"
    save_checkpoint(path, alone, optimizer, extra={"epoch": 3})
    other = world.model(build(seed=8, tied=True))
    assert load_pretrained(other, path) == ([], [])
    assert difference(other, alone) == 0
    run(alone, optimizer, None, batches()[1:])
    model = world.model(build(seed=7, tied=True), world.home, 5)
    resumed = OffloadOptimizer(model, torch.optim.AdamW, lr=0.5)
    found = load_checkpoint(path, model, resumed)
    assert (found.step, found.extra, resumed.steps) == (1, {"epoch": 3}, 1)
    run(model, resumed, world, batches()[1:])
    assert difference(model, alone) < 1e-5
    torch.manual_seed(3)
    made = world.model(build(meta=True))
    torch.manual_seed(3)
    assert difference(made, OffloadModel(build(meta=True), "cpu", num_slices=4, checkpoint_activation=True)) == 0


def checkpoints_of_all_ranks_are_read_by_any_number(world: World) -> None:
    """With ``save_checkpoint``: complete or absent whichever rank fails, and read by one process as well."""
    path = world.folder / "saved"
    model = world.model(build(tied=True))
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)
    run(model, optimizer, world, batches()[:1])
    torch.manual_seed(world.rank)
    save_checkpoint(path, model, optimizer, extra={"epoch": 3})
    drawn = torch.rand(3)
    other = world.model(build(seed=7, tied=True), world.home, 2)
    resumed = OffloadOptimizer(other, torch.optim.AdamW, lr=0.5)
    found = load_checkpoint(path, other, resumed)
    assert (found.step, found.extra, resumed.steps) == (1, {"epoch": 3}, 1)
    assert torch.equal(torch.rand(3), drawn)

    def fails(*_: object) -> None:
        raise OSError("no space")

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == world.ranks - 1:
            patch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", fails)
        world.raises(RuntimeError, lambda: save_checkpoint(path, model, optimizer), f"rank {world.ranks - 1}", "space")
        patch.undo()
        if world.rank == 0:
            patch.setattr("offload.files.save_folder.Save.commit", fails)
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
    values = [whole(p.detach()) for p in other.parameters()]
    for value, p in zip(values, alone.parameters() if world.rank == 0 else (), strict=world.rank == 0):
        assert float((value - p).detach().abs().max()) < 1e-5
    world.raises(ValueError, lambda: load_checkpoint(path, world.model(build()[:5])), "7.weight is not in the model")


def a_gradscaler_skips_a_step_on_all_ranks_or_on_none(world: World) -> None:
    model, bare = world.model(build()), build()
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.05)
    reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number, each in enumerate(batches()):
        overflows = number == 1
        mine = world.part(each) * (torch.inf if overflows and world.rank == 0 else 1)
        before = [whole(p.detach()) for p in model.parameters()]
        scaler.scale(loss_of(model(mine))).backward()
        if number == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0 ** (10 if number == 0 else 9)
        if overflows:
            assert all(map(torch.equal, before, (whole(p.detach()) for p in model.parameters())))
            continue
        loss_of(bare(each)).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.05)
        advance(reference)
        assert difference(model, bare) < 1e-5


def edits_of_groups_and_states_are_followed(world: World) -> None:
    model, bare = world.model(build()), build()
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)
    reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
    for number, each in enumerate(batches()):
        if number == 1:
            for edited in (optimizer, reference):
                parameters = edited.param_groups[0]["params"]
                del parameters[0]
                edited.state[parameters[0]]["exp_avg"] = torch.zeros_like(parameters[0])
                edited.state[parameters[1]] = {}
                del parameters
        loss_of(model(world.part(each))).backward()
        loss_of(bare(each)).backward()
        advance(optimizer, reference)
        assert difference(model, bare) < 1e-5
        bare.zero_grad()
        model.zero_grad()


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
    output = model(world.part(rows(0)))
    world.raises(RuntimeError, output.sum().backward, "rank 0 has 0.weight and rank 1 has 0.bias")
    model[0].weight.requires_grad_(True)
    call = (lambda: model(rows(0))) if first else model(rows(0)).sum().backward
    if first:
        model(rows(0))
    world.raises(RuntimeError, call, "rank 0 begins a forward, rank 1 begins a backward")
    loss_of(model(world.part(rows(0)))).backward()
    if first:
        model.zero_grad()
    output = model(world.part(rows(0)))
    world.raises(RuntimeError, output.sum().backward, "rank 0 has 0.weight and rank 1 has 0.weight+gradient")
    for name, words in (("steps", ("rank 0 has with-gradients", "step(SGD")), ("lr", ("lr=0.2", "lr=0.1"))):
        model = world.model(build())
        optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.2 if first and name == "lr" else 0.1)
        loss_of(model(world.part(rows(0)))).backward()
        if not (first and name == "steps"):
            optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):  # weights differ, so every later pass raises as well
            world.raises(RuntimeError, lambda: model(world.part(rows(0))), *words)  # noqa: B023


class Writes(nn.Linear):
    """Writes its weight in each forward."""

    assigns = False

    def forward(self, x: Tensor) -> Tensor:
        if self.assigns:
            self.weight.data = self.weight.data * 0.5
        else:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(x)


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
    kept = DiskHome(world.folder / "kept", keep=True)
    world.raises(ValueError, lambda: world.model(bare, kept), "DiskHome(keep=True)", "without mesh=")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.construction.compute_device", lambda device: torch.device("cuda", 0))
        for memory in ("1GiB", {"device": "1GiB", "host": "2GiB"}, MemoryPolicy.fixed(slots=2), None):
            world.raises(ValueError, lambda: world.model(bare, memory=memory), "init_device_mesh")  # noqa: B023
    world.raises(ValueError, lambda: world.model(bare, gradient_divide_factor=0), "gradient_divide_factor=0")
    world.raises(ValueError, lambda: world.model(bare, mesh=None, gradient_divide_factor=2), "mesh=")
    world.raises(ValueError, lambda: world.model([scalar], slices=1), "scale", "(1,)")
    world.raises(ValueError, lambda: world.model([across], slices=1), "weight", "contiguous")
    assert scalar.scale.shape == ()
    assert across.weight.stride() == (1, 3)
    model = world.model(bare)
    world.raises(TypeError, lambda: OffloadOptimizer(model, torch.optim.Adafactor), "mesh=", "each element")
    world.raises(TypeError, lambda: copy.deepcopy(model), "mesh=", "torch.distributed.checkpoint")
    world.raises(ValueError, lambda: model.share_slots([[model]]), "mesh=")
    handle = model[0].weight.register_hook(lambda gradient: gradient)
    world.raises(RuntimeError, lambda: model(rows(0)), "hooks", "0.weight")
    handle.remove()
    output = model(rows(0)).sum()
    world.raises(RuntimeError, lambda: torch.autograd.grad(output, [*model.parameters()]), "6.weight", "mesh=")
    sparse = world.model([nn.Embedding(10, 4, sparse=True)], slices=1)
    world.raises(RuntimeError, lambda: sparse(torch.arange(4)).sum().backward(), "sparse", "mesh=")
    for Writes.assigns in (False, True):
        writes = world.model([Writes(4, 4), nn.Linear(4, 4)], slices=2)
        world.raises(RuntimeError, lambda: writes(torch.ones(2, 4)), "wrote their own parameters", "mesh=")  # noqa: B023


#: What two ranks do. What more ranks do otherwise, and what the collectives of a device do, is checked there alone.
OF_TWO = [
    gradients_that_users_clip_or_replace_are_those_that_are_used,
    the_divisor_of_gradients_and_the_type_to_compute_in_can_be_chosen,
    collectives_that_run_late_change_nothing_but_a_reduction_that_is_not_awaited_loses_gradients,
    updates_wait_for_the_next_load_and_change_no_bit,
    loads_wait_for_updates_that_are_late,
    gradients_and_states_of_16_bits_are_those_of_one_process,
    a_mesh_of_one_is_the_engine_without_a_mesh,
    checkpoints_and_weights_of_one_process_are_read_by_all_ranks,
    checkpoints_of_all_ranks_are_read_by_any_number,
    edits_of_groups_and_states_are_followed,
    a_gradscaler_skips_a_step_on_all_ranks_or_on_none,
    ranks_that_differ_are_told_the_first_word_that_does,
    what_is_not_supported_is_refused_before_anything_changes,
    *graph_claims.CLAIMS,
]
OF_FOUR = [
    trains_as_one_process_on_the_whole_batch,
    rows_of_a_mesh_of_two_dimensions_store_the_model_each,
    gradcache_runs_over_it_with_unequal_rows_and_chunks,
    graph_claims.a_rank_whose_graph_leaves_out_blocks_counts_as_zeros,
]
#: With what two ranks do on GPUs, here in host memory.
OF_DEVICE = [
    trains_as_one_process_on_the_whole_batch,
    pieces_of_any_size_change_no_bit_and_no_byte,
    gradients_of_several_types_in_one_shard_are_those_of_one_process,
    a_parameter_without_gradients_keeps_none,
    rows_of_a_mesh_of_two_dimensions_store_the_model_each,
    *device_memory_claims.CLAIMS,
]
#: Number of ranks, their claims, and how they move bytes.
STAGES: dict[str, tuple[int, Sequence[Callable[[World], None]], Transport]] = {
    "two": (2, OF_TWO, HOST),
    "four": (4, OF_FOUR, HOST),
    "device": (2, OF_DEVICE, Transport(HOST.device, HOST.backend)),
}


def stages(folder: Path, *titles: str) -> Iterator[tuple[int, dict[str, Callable[[], None]]]]:
    """The claims of these stages, by name; ranks wait for each other after one."""

    def check(claim: Callable[[World], None], ranks: int, transport: Transport, folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("offload.mesh.sharding.transport_for", lambda device: transport)
            try:
                claim(World(init_device_mesh("cpu", (ranks,)), folder))
            finally:
                dist.barrier()

    warnings.filterwarnings("error", category=UserWarning, module="offload")
    distributed: Any = dist  # its annotations leave these out
    levels = distributed.DebugLevel
    for title in titles:
        ranks, claims, transport = STAGES[title]
        # Torch then refuses collectives that are not the same on all ranks, which doubles the time of each.
        distributed.set_debug_level(levels.DETAIL if ranks > 2 else levels.OFF)
        (folder / title / "homes").mkdir(parents=True)
        yield ranks, {name_of(c, title): partial(check, c, ranks, transport, folder / title) for c in claims}


def name_of(claim: Callable[[World], None], title: str) -> str:
    return f"{claim.__name__}, {title}"


def names_of(*titles: str) -> list[str]:
    return [name_of(claim, title) for title in titles for claim in STAGES[title][1]]


def broken_claims(folder: Path, *titles: str) -> dict[str, str]:
    """How claims of these stages are broken, by their names."""
    code = "import sys; from tests.offload.mesh.forked import main; main(*sys.argv[1:])"
    worker = "/".join(["mesh_worker", *titles])
    done = run_program(code, folder, worker, seconds=900)  # a claim that hangs is ended by the timeout of its ranks
    assert done.status == 0, done.errors
    found: dict[str, str] = json.loads(done.output.splitlines()[-1])[worker]
    return found
