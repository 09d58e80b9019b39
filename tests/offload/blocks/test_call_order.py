"""Forwards that call their blocks in another order than ``blocks=`` names them: it is noted on the first, then held."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradcache import GradCache
from offload import DiskHome, OffloadModel, OffloadOptimizer, init_empty_weights
from tests.offload.blocks.towers import WIDTH, Block, assert_equal
from tests.offload.planning.proof import validate

NAMES = ("down", "up")
COUNT = 3

#: (list, place in it) of each call.
CALLS = {
    "interleaved": [(name, k) for k in range(COUNT) for name in NAMES],
    "reversed": [(name, k) for name in NAMES for k in reversed(range(COUNT))],
    "the other first": [(name, k) for name in reversed(NAMES) for k in range(COUNT)],
    "last first": [("up", 2), ("down", 0), ("down", 1), ("up", 0), ("up", 1), ("down", 2)],
    "as named": [(name, k) for name in NAMES for k in range(COUNT)],
}


class Tower(nn.Module):
    """Two lists of blocks in any order, with code between them, a mask that many get, and dropout."""

    def __init__(self, calls: str = "interleaved", dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prefix, self.suffix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.ModuleList(Block(dropout) for _ in range(COUNT))
        self.up = nn.ModuleList(Block(dropout) for _ in range(COUNT))
        self.calls = CALLS[calls]

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.prefix(x), x > 0
        for name, k in self.calls:
            x = getattr(self, name)[k](x, mask)[0] * 1.25
        y: Tensor = self.suffix(x)
        return y


def wrap(bare: nn.Module, home: Any = "cpu", **choices: Any) -> Any:
    given = {"checkpoint_activation": True, "blocks": NAMES, **choices}
    return OffloadModel(copy.deepcopy(bare), "cpu", home, **given)


def batch(seed: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    loss = model(batch(seed)).square().mean()
    loss.backward()
    return loss.detach(), torch.get_rng_state()


def assert_trained_equal(bare: nn.Module, model: nn.Module, *, exact: bool = True) -> None:
    """The same but for the buffers, which count forwards: those, too, that were refused."""
    for name, buffer in bare.named_buffers():
        model.get_buffer(name).copy_(buffer)
    assert_equal(bare, model, exact=exact)


WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "kept": {"checkpoint_activation": False},
    "planned": {"memory": "1GiB"},
    "in backward": {"update_in_backward": True},
}


@pytest.mark.parametrize(
    ("calls", "way"),
    [
        ("interleaved", "recomputed"),
        ("the other first", "recomputed"),
        ("last first", "kept"),
        ("reversed", "planned"),
        ("last first", "in backward"),
    ],
)
def test_steps_are_bit_equal_in_any_order_of_calls(calls: str, way: str, tmp_path: Path) -> None:
    bare, choices = Tower(calls), {**WAYS[way]}
    in_backward = choices.pop("update_in_backward", False)
    model = wrap(bare, tmp_path, **choices)
    reference = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, update_in_backward=in_backward)
    for seed in range(3):
        for a, b in zip(step(bare, seed), step(model, seed), strict=True):
            assert torch.equal(a, b)
        if not in_backward:
            assert_equal(bare, model)
        validate(model.plan())
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
        optimizer.synchronize()
        assert_equal(bare, model)
    with torch.no_grad():
        assert torch.equal(bare.eval()(batch(9)), model.eval()(batch(9)))


@pytest.mark.parametrize(
    ("calls", "frozen", "recompute"),
    [
        ("interleaved", ("prefix", "suffix", "down"), True),
        ("interleaved", ("prefix", "up"), False),
        ("last first", ("prefix", "suffix", "down"), False),
        ("last first", ("prefix", "up"), True),
    ],
)
def test_backward_ends_at_the_first_block_that_is_trained_and_called(
    calls: str, frozen: tuple[str, ...], recompute: bool
) -> None:
    bare = Tower(calls)
    for name in frozen:
        getattr(bare, name).requires_grad_(False)
    model = wrap(bare, checkpoint_activation=recompute)
    called = [bare.get_submodule(f"{name}.{k}") for name, k in bare.calls]
    first = next(k for k, block in enumerate(called) if any(p.requires_grad for p in block.parameters()))
    for seed in range(2):
        assert torch.equal(step(bare, seed)[0], step(model, seed)[0])
        assert_equal(bare, model)
    reached = [token for token in str(model.plan()).split() if token[0] in "BG"]
    shards = [list(model._homes.blocks).index(f"{name}.{k}") for name, k in bare.calls]
    assert reached == [f"{'B' if recompute else 'G'}{j}.0" for j in reversed(shards[first:])]


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


@pytest.mark.parametrize("m", [1, 2])
def test_each_forward_with_gradients_may_have_another_order(m: int) -> None:
    bare = Tower(dropout=0.0)
    model = wrap(bare, num_microbatches=m)
    for seed, calls in enumerate(("interleaved", "reversed", "last first", "interleaved")):
        bare.calls = model.calls = CALLS[calls]
        step(bare, seed), step(model, seed)
        assert_trained_equal(bare, model, exact=m == 1)


@pytest.mark.parametrize("calls", [[("up", 1), ("down", 0)], [("up", 1), ("up", 1)]])
def test_blocks_may_be_left_out_and_called_twice(calls: list[tuple[str, int]], tmp_path: Path) -> None:
    bare = Tower()
    model = wrap(bare, tmp_path)
    for seed, order in enumerate((CALLS["interleaved"], calls, calls, CALLS["as named"])):
        bare.calls = model.calls = order
        for a, b in zip(step(bare, seed), step(model, seed), strict=True):
            assert torch.equal(a, b)
        assert_equal(bare, model, exact=False)


def test_every_forward_without_gradients_may_have_another_order_and_loads_each_shard_once() -> None:
    bare, model = Tower(dropout=0.0), wrap(Tower(dropout=0.0))
    for calls in ("reversed", "as named", "last first"):
        bare.calls = model.calls = CALLS[calls]
        with torch.no_grad():
            assert torch.equal(bare(batch(0)), model(batch(0)))
        loads = model.statistics().shard_loads
        with torch.no_grad():
            model(batch(0))
        assert model.statistics().shard_loads - loads == 2 * COUNT


class Apart(Tower):
    """Calls its blocks in another order for some rows."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = CALLS["interleaved" if float(x[0, 0]) > 0 else "reversed"]
        return super().forward(x)


def test_chunks_may_call_blocks_in_different_orders() -> None:
    bare = Apart(dropout=0.0)
    model = wrap(bare, num_microbatches=2)
    x = torch.ones(4, WIDTH)
    x[2:] *= -1
    for _ in range(2):
        for part in x.split(2):
            bare(part).sum().backward()
        model(x).sum().backward()
        assert_trained_equal(bare, model, exact=False)


@pytest.mark.parametrize(
    ("slices", "calls"),
    [(2, "the other first"), (2, "reversed"), (3, "as named"), (1, "last first"), (3, "interleaved")],
)
def test_shards_of_several_blocks_follow_the_order_which_may_take_them_apart(
    slices: int, calls: str, tmp_path: Path
) -> None:
    bare = Tower(calls)
    model = wrap(bare, tmp_path, num_slices=slices)
    for seed in range(2):
        for a, b in zip(step(bare, seed), step(model, seed), strict=True):
            assert torch.equal(a, b)
        assert_equal(bare, model)
        validate(model.plan())


def test_gradcache_and_resident_parameters_follow_the_order(tmp_path: Path) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x @ y.T, torch.arange(len(x)))

    bare = Tower("last first", dropout=0.0)
    for name, p in bare.named_parameters():
        p.requires_grad_("norm" in name)
    model = wrap(bare, tmp_path, resident="*.norm.*")
    x, y = batch(0, 6), batch(1, 6)
    for _ in range(2):
        found = [GradCache([each, each], 2, loss)(x, y) for each in (bare, model)]
        assert torch.allclose(*found)
    ours = dict(model.named_parameters())
    for name, p in bare.named_parameters():
        assert (p.grad is None) == (ours[name].grad is None)
        assert p.grad is None or torch.allclose(p.grad, ours[name].grad, atol=1e-6)


class Tied(Tower):
    """The blocks of both lists share their linear layers, which are stored with those of the first list."""

    def __init__(self, calls: str) -> None:
        super().__init__(calls)
        for a, b in zip(self.down, self.up, strict=True):
            b.linear = a.linear


@pytest.mark.parametrize("calls", ["the other first", "interleaved"])
def test_a_parameter_that_blocks_share_may_be_called_before_the_block_that_stores_it(
    calls: str, tmp_path: Path
) -> None:
    bare = Tied(calls)
    model = wrap(bare, tmp_path)
    reference = torch.optim.SGD(bare.parameters(), lr=0.1)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    for seed in range(3):
        assert torch.equal(step(bare, seed)[0], step(model, seed)[0])
        assert_equal(bare, model)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
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
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_kept_home_and_a_copy_note_their_own_order(tmp_path: Path) -> None:
    bare = Tower("interleaved")
    model = wrap(bare, DiskHome(tmp_path, keep=True))
    step(bare, 0), step(model, 0)
    copied = copy.deepcopy(wrap(bare))
    model.close()
    with init_empty_weights():
        empty = Tower("reversed")
    again = wrap(empty, DiskHome(tmp_path, keep=True))
    for each in (bare, copied, again):
        each.zero_grad()
        each.calls = CALLS["reversed"]
        step(each, 1)
    for each in (copied, again):
        assert_trained_equal(bare, each)
    again.close()
