"""Claims of ``mesh_worker`` about graphs that autograd runs otherwise than once, from the last block to the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.offload.mesh.blocks_claims import WIDTH, WORDS, Encoder, batch, loss_of, offloaded
from tests.offload.mesh.world import World, greatest_error


class Twice(Encoder):
    """Calls its first block again at the end, and has a recurrent layer between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor, skips: bool = False) -> Tensor:
        x = self.words(ids)
        for j in (0, 1, 2, 0):
            x = self.layers[j](x, self.scale)
            if j == 1:
                x = self.recurrent(x)[0]
        found: Tensor = self.head(x).mean(1)
        return found


class Recurrent(nn.Module):
    """A block with weights that modules hold in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.recurrent(x)[0]


class RecurrentBlocks(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recurrent() for _ in range(3))


class Stops(Encoder):
    """Chosen ranks pass no gradient from the last block to those before, or leave the last one out of the loss."""

    def forward(self, ids: Tensor, skips: bool = False, how: str = "") -> Tensor:
        x = self.words(ids)
        for j, layer in enumerate(self.layers):
            after = layer(x.detach() if how == "detached" and j == 2 else x, self.scale)
            x = x if how == "unused" and j == 2 else after
        found: Tensor = self.head(x).mean(1)
        return found


def summed(run: Callable[[Any, Tensor], Tensor], bare: nn.Module, world: World) -> None:
    """Runs the backward of the mean loss of all ranks in one process; each has a part of the rows."""
    total = sum((run(bare, batch().chunk(world.ranks)[rank]) for rank in range(world.ranks)), torch.zeros(()))
    (total / world.ranks).backward()


def graphs_of_two_forwards_used_twice_or_with_a_block_called_twice_have_the_gradients_of_one_process(
    world: World,
) -> None:
    def two(model: Any, ids: Tensor) -> Tensor:
        return loss_of(model(ids)) + 2 * loss_of(model(ids.flip(0)))

    def dependent(model: Any, ids: Tensor) -> Tensor:
        first = model(ids)
        return loss_of(first) * loss_of(model(ids.flip(1)))

    cases = [(Twice, two, True), (Twice, dependent, False), (RecurrentBlocks, dependent, True), (Encoder, two, False)]
    for kind, run, recomputes in cases:
        bare = kind()
        model = offloaded(world, bare, checkpoint_activation=recomputes)
        for _ in range(2):
            run(model, world.part(batch())).backward()
            summed(run, bare, world)
        loss = run(model, world.part(batch()))
        loss.backward(retain_graph=True)
        loss.backward()
        for _ in range(2):
            summed(run, bare, world)
        assert greatest_error(model, bare) < 1e-6, (kind, run, recomputes)
        model.close()


def a_rank_whose_graph_leaves_out_blocks_counts_as_zeros(world: World) -> None:
    for how in ("detached", "unused"):
        for recomputes in (True, False):
            bare = Stops()
            model = offloaded(world, bare, home=world.folder / "homes", checkpoint_activation=recomputes)
            for seed in range(2):
                ways = [how if rank == seed else "" for rank in range(world.ranks)]
                loss_of(model(world.part(batch(seed)), how=ways[world.rank])).backward()
                parts = batch(seed).chunk(world.ranks)
                losses = [loss_of(bare(part, how=way)) for part, way in zip(parts, ways, strict=True)]
                (sum(losses) / world.ranks).backward()
                assert greatest_error(model, bare) < 1e-6, (how, recomputes)
            model.close()


def gradients_of_inputs_are_returned_and_of_other_ways_to_parameters_refused(world: World) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = world.model(bare, slices=3)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(world.rank)).requires_grad_()
    found, expected = (torch.autograd.grad(loss_of(one(x)), x)[0] for one in (model, bare))
    assert torch.equal(found, expected)
    assert all(p.grad is None for p in model.parameters())

    class Hidden(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [self.between.weight]

        def forward(self, ids: Tensor, skips: bool = False) -> Tensor:
            return super().forward(ids) @ torch.ones(WORDS, WIDTH) @ self.hidden[0]

    hiding = offloaded(world, Hidden())
    world.raises(RuntimeError, loss_of(hiding(batch())).backward, "another way than its module")
    model = offloaded(world, Encoder())
    handle = model.layers[0].linear.weight
    world.raises(RuntimeError, lambda: torch.autograd.grad(loss_of(model(batch())), [handle]), "layers.0", "mesh=")
    world.raises(
        RuntimeError, lambda: torch.autograd.grad(loss_of(model(batch())), [model.between.weight]), "between.weight"
    )
    loss_of(model(world.part(batch()))).backward()
    plain = Encoder()
    loss_of(plain(batch())).backward()
    assert greatest_error(model, plain) < 1e-6


def blocks_that_are_called_by_themselves_train_as_in_one_process(world: World) -> None:
    bare = Encoder()
    model = offloaded(world, bare)
    x = torch.randn(4 * world.ranks, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for one, rows in ((model, world.part(x)), (bare, x)):
            y = one.layers[1](one.layers[2](rows, torch.ones(())), torch.ones(()))
            loss_of(y).backward()
        loss_of(model(world.part(batch()))).backward()
        loss_of(bare(batch())).backward()
        assert greatest_error(model, bare) < 1e-6


CLAIMS = [
    graphs_of_two_forwards_used_twice_or_with_a_block_called_twice_have_the_gradients_of_one_process,
    a_rank_whose_graph_leaves_out_blocks_counts_as_zeros,
    gradients_of_inputs_are_returned_and_of_other_ways_to_parameters_refused,
    blocks_that_are_called_by_themselves_train_as_in_one_process,
]
