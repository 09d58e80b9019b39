"""Claims of ``mesh_worker``: ``blocks=``, graphs that run otherwise than once, ``accumulate()``, ``memory=``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from tests.offload.blocks.towers import Large
from tests.offload.mesh.world import (
    WIDTH,
    WORDS,
    Encoder,
    World,
    batch,
    build,
    difference,
    greatest_error,
    loss_of,
    rows,
)
from tests.offload.side_by_side import advance


class Recurrent(nn.Module):
    """A block with weights that modules hold in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return x + scale * self.recurrent(x)[0]


class Twice(Encoder):
    """Calls its first block again at the end; its second one is recurrent, as is what comes between blocks."""

    order = (0, 1, 2, 0)

    def __init__(self) -> None:
        super().__init__()
        self.layers[1], self.between = Recurrent(), Recurrent()


def graphs_of_two_forwards_used_twice_or_with_a_block_called_twice_have_the_gradients_of_one_process(
    world: World,
) -> None:
    def two(model: Any, ids: Tensor) -> Tensor:
        return loss_of(model(ids)) + 2 * loss_of(model(ids.flip(0)))

    def dependent(model: Any, ids: Tensor) -> Tensor:
        return loss_of(model(ids)) * loss_of(model(ids.flip(1)))

    def summed(run: Callable[[Any, Tensor], Tensor], bare: nn.Module) -> None:
        """The backward of the mean loss of all ranks in one process; each has a part of the rows."""
        total = sum((run(bare, part) for part in batch().chunk(world.ranks)), torch.zeros(()))
        (total / world.ranks).backward()

    for kind, run, recomputes in ((Twice, two, True), (Twice, dependent, False), (Encoder, dependent, True)):
        bare = kind()
        model = world.model(bare, blocks="layers", checkpoint_activation=recomputes)
        run(model, world.part(batch())).backward()
        loss = run(model, world.part(batch()))
        loss.backward(retain_graph=True)
        loss.backward()
        for _ in range(3):
            summed(run, bare)
        assert greatest_error(model, bare) < 1e-6, (kind, run, recomputes)
        model.close()


def a_rank_whose_graph_leaves_out_blocks_counts_as_zeros(world: World) -> None:
    for how in ("detached", "unused"):
        for recomputes in (True, False):
            bare = Encoder()
            model = world.model(bare, world.home, blocks="layers", checkpoint_activation=recomputes)
            for seed in range(2):
                ways = [how if rank == seed else "" for rank in range(world.ranks)]
                loss_of(model(world.part(batch(seed)), how=ways[world.rank])).backward()
                parts = batch(seed).chunk(world.ranks)
                losses = [loss_of(bare(part, how=way)) for part, way in zip(parts, ways, strict=True)]
                (sum(losses) / world.ranks).backward()
                assert greatest_error(model, bare) < 1e-6, (how, recomputes)
            model.close()


def gradients_of_inputs_are_returned_and_of_other_ways_to_parameters_refused(world: World) -> None:
    bare = build()
    model = world.model(bare, slices=3)
    x = rows(world.rank).requires_grad_()
    found, expected = (torch.autograd.grad(loss_of(one(x)), x)[0] for one in (model, bare))
    assert torch.equal(found, expected)
    assert all(p.grad is None for p in model.parameters())

    class Hidden(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [self.between.weight]

        def forward(self, ids: Tensor, how: str = "") -> Tensor:
            return super().forward(ids) @ torch.ones(WORDS, WIDTH) @ self.hidden[0]

    hiding = world.model(Hidden(), blocks="layers")
    world.raises(RuntimeError, loss_of(hiding(batch())).backward, "another way than its module")
    model = world.model(Encoder(), blocks="layers")
    for name, words in (("layers.0.linear.weight", ("layers.0", "mesh=")), ("between.weight", ("between.weight",))):
        asked = [model.get_parameter(name)]
        world.raises(RuntimeError, lambda: torch.autograd.grad(loss_of(model(batch())), asked), *words)  # noqa: B023
    bare = Encoder()
    x = torch.randn(4 * world.ranks, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for one, part in ((model, world.part(x)), (bare, x)):  # blocks by themselves
            loss_of(one.layers[1](one.layers[2](part, torch.ones(())), torch.ones(()))).backward()
        world.check_gradients(model, bare, batch())


def backwards_in_accumulate_send_nothing_and_the_next_one_reduces_their_sums(world: World) -> None:
    """Also sums of blocks to which the last backward brings no gradient, and gradients of 16 bits."""
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (build, rows, {"home": world.home, "slices": 3}, ""),
        (build, rows, {"checkpoint_activation": False, "num_microbatches": 2}, ""),
        (build, rows, {"gradient_dtype": torch.bfloat16}, ""),
        (Encoder, batch, {"blocks": "layers"}, ""),
        (Encoder, batch, {"blocks": "layers"}, "detached"),
    ]
    for make, inputs, how, last in cases:
        bare, model = make(), world.model(make(), **how)
        more = {"how": last} if last else {}
        loss_of(model(world.part(inputs(2)), **more)).backward()
        once = model.statistics().bytes_reduced
        model.zero_grad()
        for k in range(3):
            loss_of(bare(inputs(k), **(more if k == 2 else {}))).backward()
        with model.accumulate():
            for k in range(2):
                loss_of(model(world.part(inputs(k)))).backward()
        assert model.statistics().bytes_reduced == once, how
        assert all(p.grad is None for p in model.parameters())
        loss_of(model(world.part(inputs(2)), **more)).backward()
        assert last or model.statistics().bytes_reduced == 2 * once, how
        assert greatest_error(model, bare) < (5e-3 if "gradient_dtype" in how else 1e-6), how
        model.close()


def steps_wait_for_the_reduction_and_zero_grad_drops_the_sums(world: World) -> None:
    bare, model = build(), world.model(build(), slices=2)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.1)
    plain = torch.optim.AdamW(bare.parameters(), lr=0.1)
    for clear in (optimizer.zero_grad, model.zero_grad):
        with model.accumulate():
            loss_of(model(world.part(rows(0)))).backward()
        world.raises(RuntimeError, optimizer.step, "accumulate()", "zero_grad()")
        model[0].weight.requires_grad_(False)
        world.raises(RuntimeError, lambda: loss_of(model(world.part(rows(0)))).backward(), "0.weight", "zero_grad")
        model[0].weight.requires_grad_(True)
        clear()
        for one, kind, x in ((bare, plain, rows(1)), (model, optimizer, world.part(rows(1)))):
            loss_of(one(x)).backward()
            advance(kind)
        assert difference(model, bare) < 1e-5


def updates_in_backward_wait_for_the_last_one(world: World) -> None:
    bare, model = build(), world.model(build(), home=world.home, slices=3)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    for k in range(3):
        loss_of(bare(rows(k))).backward()
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    with model.accumulate(), optimizer.accumulate():
        for k in range(2):
            loss_of(model(world.part(rows(k)))).backward()
    loss_of(model(world.part(rows(2)))).backward()
    optimizer.step()
    assert difference(model, bare) < 1e-6
    with model.accumulate():
        world.raises(RuntimeError, lambda: loss_of(model(world.part(rows(0)))).backward(), "optimizer's")


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
        advance(optimizer, reference)
    with torch.no_grad():
        assert torch.allclose(model(batch(5)), bare(batch(5)), atol=1e-5)
    model.close()


def ranks_that_call_blocks_otherwise_are_told_the_first_difference(world: World) -> None:
    bare, first = Encoder(), world.rank == 0
    model = world.model(bare, blocks="layers")
    with torch.no_grad():
        x, scale = torch.ones(2, 3, WIDTH), torch.ones(())
        world.raises(
            RuntimeError, lambda: model.layers[2 - first](x, scale), "rank 0 has layers.1 and rank 1 has layers.2"
        )
        assert torch.allclose(model.layers[1](x, scale), bare.layers[1](x, scale), atol=1e-6)
    for order in ((0, 2), (0, 1, 2)):  # blocks may be left out, if all ranks do
        bare.order = model.order = order
        world.check_gradients(model, bare, batch())


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
        world.check_gradients(model, bare, x)

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
    bare = Large(words=20001, width=24)
    table = bare.words.weight.nbytes
    model = world.model(bare, world.home, blocks="layers", memory=int(3.7 * table))
    assert not any(world.is_whole(p) for p in model.parameters())
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)
    reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
    for seed in range(3):
        world.check_gradients(model, bare, batch(seed))
        advance(optimizer, reference)
    assert difference(model, bare) < 1e-5
    assert model._homes.streamer.slot_pool.slot_bytes < table / 100
    assert len(world.model(bare, world.home, blocks="layers", memory="1GiB")._homes.blocks) == 4
    model.close()


CLAIMS = [
    graphs_of_two_forwards_used_twice_or_with_a_block_called_twice_have_the_gradients_of_one_process,
    gradients_of_inputs_are_returned_and_of_other_ways_to_parameters_refused,
    backwards_in_accumulate_send_nothing_and_the_next_one_reduces_their_sums,
    steps_wait_for_the_reduction_and_zero_grad_drops_the_sums,
    updates_in_backward_wait_for_the_last_one,
    blocks_are_called_in_an_order_that_all_ranks_note,
    a_limit_of_memory_is_planned_for_by_all_ranks_alike,
    embeddings_and_heads_are_sharded_where_memory_is_too_small_for_them,
    ranks_that_call_blocks_otherwise_are_told_the_first_difference,
]
