"""``num_slices`` of a model with blocks: several consecutive blocks are one shard, and results stay bit-equal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import DiskHome, MemoryPolicy, OffloadModel, init_empty_weights
from tests.offload.blocks.towers import WIDTH, Block, assert_equal, make, step, words

BLOCKS = "encoder.layer"


def wrap(bare: nn.Module, home: Any = "cpu", **choices: Any) -> Any:
    given = {"checkpoint_activation": True, "blocks": BLOCKS, "num_slices": 2, **choices}
    return OffloadModel(copy.deepcopy(bare), "cpu", home, **given)


def sizes(model: Any) -> list[int]:
    return [len(shard.layers) for shard in model._homes.shards]


def test_each_shard_is_loaded_once_per_pass_with_all_of_its_blocks(tmp_path: Path) -> None:
    model = wrap(make(9), tmp_path, num_slices=3, num_microbatches=2)
    step(model)
    before = model.statistics()
    step(model)
    after = model.statistics()
    assert after.shard_loads - before.shard_loads == 2 * 3 - 2  # two slots keep their shards between the passes
    stored = sum(p.nbytes for p in model.encoder.parameters())
    assert after.bytes_loaded - before.bytes_loaded == stored + stored // 3


@pytest.mark.parametrize(("boundary_bytes", "graph_bytes"), [(0, 0), (0, 3000), (None, 0), (None, 1 << 20)])
def test_chunks_and_spilled_boundaries_are_bit_equal_to_a_shard_for_each_block(
    boundary_bytes: int | None, graph_bytes: int, tmp_path: Path
) -> None:
    bare = make(6, dropout=0.0)
    memory = MemoryPolicy.fixed(boundary_bytes=boundary_bytes, graph_bytes=graph_bytes)
    models = [wrap(bare, tmp_path / str(n), num_slices=n, memory=memory, num_microbatches=3) for n in (6, 3, 1)]
    for seed in range(2):
        first, *others = [step(model, seed, words=words(5)) for model in models]
        assert all(torch.equal(first[0], other[0]) for other in others)
        for model in models[1:]:
            assert_equal(models[0], model)
    spilled = [model.statistics().bytes_spilled for model in models]
    assert all(spilled[1:]) == (boundary_bytes == 0)
    str(models[1].plan()), models[1].estimate(5)


class Counts(nn.Module):
    """Writes its own parameter in each forward, as an initialisation from data does."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(1.5) if self.again else self.scale.fill_(2.0)
        return torch.tanh(x * self.scale.clone())


class Counting(nn.Module):
    def __init__(self, *again: bool) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Counts(each) for each in again)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layer:
            x = block(x) * 1.25
        return x


@pytest.mark.parametrize("again", [(False, True), (True, False), (True, True), (False, False)])
def test_blocks_of_a_shard_that_write_their_own_parameters_write_them_once(again: tuple[bool, bool]) -> None:
    bare = Counting(*again)
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=1, checkpoint_activation=True, blocks="layer")
    for _ in range(4):
        for each in (bare, model):
            each(torch.linspace(-1, 1, WIDTH)).sum().backward()
        assert_equal(bare, model)


class Changing(nn.Module):
    """Changes in place what a block has got, before the next block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(0.0) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        for k, block in enumerate(self.layer):
            if k == 2:
                mask.mul_(0.5)
            x = block(x, mask)[0]
        return x


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_a_change_in_place_of_what_entered_a_block_changes_no_gradient_and_is_refused_when_inputs_are_not_copied(
    slices: int,
) -> None:
    class Right(Changing):
        def forward(self, x: Tensor) -> Tensor:
            for k, block in enumerate(self.layer):
                x = block(x, torch.full_like(x, 0.5 if k >= 2 else 1.0))[0]
            return x

    torch.manual_seed(0)
    bare = Right()
    changing = Changing()
    changing.load_state_dict(bare.state_dict())
    model = OffloadModel(changing, "cpu", num_slices=slices, checkpoint_activation=True, blocks="layer")
    x = torch.randn(2, WIDTH)
    for _ in range(2):
        bare(x).sum().backward(), model(x).sum().backward()
        assert_equal(bare, model)
    with pytest.raises(RuntimeError, match="changed in place"):
        model(x).sum().backward()


def test_copies_have_the_same_slices_and_wrong_numbers_are_refused() -> None:
    model = wrap(make(4), num_slices=3)
    assert sizes(copy.deepcopy(model)) == sizes(model)
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="from 1 to 4 slices"):
            wrap(make(4), num_slices=wrong)


def test_a_kept_home_opens_with_any_number_of_slices(tmp_path: Path) -> None:
    bare = make(4)
    wrap(bare, DiskHome(tmp_path, keep=True), num_slices=3).close()
    for slices in (1, 4):
        with init_empty_weights():
            empty = make(4)
        again = OffloadModel(
            empty, "cpu", DiskHome(tmp_path, keep=True), slices, checkpoint_activation=True, blocks=BLOCKS
        )
        step(bare.eval()), step(again.eval())
        assert_equal(bare, again)
        bare.zero_grad()
        again.close()
