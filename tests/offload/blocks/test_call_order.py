"""Forwards that call their blocks in another order than ``blocks=`` names them: loads, other orders, tied blocks.

What they compute is claimed by the loops of the fuzz.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from tests.offload.blocks import towers
from tests.offload.blocks.towers import WIDTH, Block
from tests.offload.planning.proof import validate
from tests.offload.side_by_side import advance, assert_equal, drawn

NAMES = ("down", "up")
COUNT = 3
#: (list, place in it) of each call.
CALLS = {
    "interleaved": [(name, k) for k in range(COUNT) for name in NAMES],
    "reversed": [(name, k) for name in NAMES for k in reversed(range(COUNT))],
    "the other first": [(name, k) for name in reversed(NAMES) for k in range(COUNT)],
    "last first": [("up", 2), ("down", 0), ("down", 1), ("up", 0), ("up", 1), ("down", 2)],
    "as named": [(name, k) for name in NAMES for k in range(COUNT)],
    "left out": [("up", 1), ("down", 0)],
    "twice": [("up", 1), ("up", 1)],
}


class Tower(nn.Module):
    """Two lists of blocks in any order, with code between them, a mask that many get, and dropout.

    ``tied``: the blocks of both lists share their linear layers, which are stored with those of the first list.
    """

    def __init__(self, calls: str = "interleaved", dropout: float = 0.1, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prefix, self.suffix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.ModuleList(Block(dropout) for _ in range(COUNT))
        self.up = nn.ModuleList(Block(dropout) for _ in range(COUNT))
        self.calls = CALLS[calls]
        for a, b in zip(self.down, self.up, strict=True) if tied else ():
            b.linear = a.linear

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.prefix(x), x > 0
        for name, k in self.calls:
            x = getattr(self, name)[k](x, mask)[0] * 1.25
        y: Tensor = self.suffix(x)
        return y


wrap = partial(towers.wrap, blocks=NAMES)


def batch(seed: int) -> Tensor:
    return drawn(seed, 4, WIDTH)


def step(model: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    loss = model(batch(seed)).square().mean()
    loss.backward()
    return loss.detach(), torch.get_rng_state()


def assert_step_equal(bare: nn.Module, model: nn.Module, seed: int) -> None:
    assert all(torch.equal(a, b) for a, b in zip(step(bare, seed), step(model, seed), strict=True))


def test_the_second_step_loads_what_it_loads_where_names_are_in_the_order_of_calls(tmp_path: Path) -> None:
    counts = []
    for calls in ("as named", "interleaved"):
        model = wrap(Tower(calls), tmp_path / calls.replace(" ", "-"))
        step(model, 0)
        before = model.statistics()
        step(model, 1)
        after = model.statistics()
        counts.append((after.shard_loads - before.shard_loads, after.bytes_loaded - before.bytes_loaded))
    assert counts[0] == counts[1]
    assert counts[0][0] == 2 * 2 * COUNT - 2  # two slots keep their shards between the passes


def test_every_forward_may_have_another_order_and_without_gradients_it_loads_each_shard_once(tmp_path: Path) -> None:
    bare = Tower()
    model = wrap(bare, tmp_path)
    for seed, calls in enumerate(("interleaved", "left out", "reversed", "twice", "as named")):
        bare.calls = model.calls = CALLS[calls]
        assert_step_equal(bare, model, seed)
        assert_equal(bare, model, exact=False)
        validate(model.plan())
    for calls in ("reversed", "as named", "last first"):
        bare.calls = model.calls = CALLS[calls]
        with torch.no_grad():
            assert torch.equal(bare.eval()(batch(0)), model.eval()(batch(0)))
            loads = model.statistics().shard_loads
            model(batch(0))
        assert model.statistics().shard_loads - loads == 2 * COUNT


@pytest.mark.parametrize("calls", ["the other first", "interleaved"])
def test_a_parameter_that_blocks_share_may_be_called_before_the_block_that_stores_it(
    calls: str, tmp_path: Path
) -> None:
    bare = Tower(calls, tied=True)
    model = wrap(bare, tmp_path)
    reference = torch.optim.SGD(bare.parameters(), lr=0.1)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    for seed in range(3):
        assert_step_equal(bare, model, seed)
        assert_equal(bare, model)
        advance(reference, optimizer)
    del optimizer
    early = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    if calls == "interleaved":  # the block that stores it is called first
        step(bare, 5), step(model, 5)
        reference.step(), early.step()
        early.synchronize()
    else:
        with pytest.raises(
            RuntimeError, match=r"parameter down.\d.linear.weight is tied, and stored with a block that"
        ):
            step(model, 5)
        assert all(p.grad is None for each in (*model.down, *model.up) for p in each.parameters())
    assert all(map(torch.equal, bare.parameters(), model.parameters()))


@pytest.mark.parametrize("recompute", [True, False])
def test_bfloat16_gradients_of_a_block_that_is_called_hundreds_of_times_add_up(recompute: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(1, 1) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            shared, last = self.blocks
            return torch.stack([shared(x) for _ in range(600)]).sum() + last(x).sum()

    model = OffloadModel(Model(), "cpu", blocks="blocks", checkpoint_activation=recompute, param_dtype=torch.bfloat16)
    for _ in range(3):
        model.zero_grad()
        model(torch.zeros(1, 1)).backward()
        assert [float(block.bias.grad) for block in model.blocks] == [600, 1]
