"""What fits on a device with memory of its own rests there: weights, gradients, states and the update."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from offload.planner.step_memory import StepMemory
from offload.storage import DeviceTier
from tests.offload import zoo
from tests.offload.device_count import counted_and_predicted
from tests.offload.side_by_side import assert_equal, drawn, offloaded, train

pytestmark = pytest.mark.usefixtures("own_memory")

WIDTH, ROWS, DEPTH = 64, 16, 5
STATES = 3 * DEPTH * (4 * WIDTH * WIDTH * 2) * 4


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(DEPTH))
    return nn.Sequential(*blocks)


def batches(steps: range, rows: int = ROWS) -> list[Tensor]:
    return [drawn(k, rows, WIDTH) for k in steps]


def pair(home: str, memory: Any, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any, OffloadModel, Any]:
    """Layers and their optimizer, and both as they are offloaded."""
    bare = stack()
    model = offloaded(bare, home, DEPTH, checkpoint_activation=None, memory=memory)
    fused: dict[str, Any] = {"fused": True} if kind in (torch.optim.AdamW, torch.optim.Adagrad) else {}
    return bare, kind(bare.parameters(), lr=1e-2, **fused), model, OffloadOptimizer(model, kind, lr=1e-2, **options)


def there(model: OffloadModel) -> list[int]:
    """The shards that rest on the device: layers use them in place, and nothing is loaded."""
    return [shard.index for shard in model._homes.shards if shard.in_place and isinstance(shard.tier, DeviceTier)]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor])
def test_all_of_a_model_that_fits_rests_there_and_nothing_is_loaded(kind: Any, home: str) -> None:
    bare, plain, model, ours = pair(home, {"device": "1GiB", "host": "1GiB"}, kind)
    assert train(model, ours, batches(range(3))) == train(bare, plain, batches(range(3)))
    assert there(model) == [*range(DEPTH)]
    before = model.statistics()
    assert train(model, ours, batches(range(3, 6))) == train(bare, plain, batches(range(3, 6)))
    after = model.statistics()
    assert (after.shard_loads, after.bytes_loaded) == (before.shard_loads, before.bytes_loaded)
    assert_equal(bare, model)


def test_of_a_model_that_does_not_fit_a_part_rests_there(home: str) -> None:
    bare, plain, model, ours = pair(home, {"device": 2 * STATES // 3, "host": "1GiB"}, max_norm=0.1)
    assert train(model, ours, batches(range(8))) == train(bare, plain, batches(range(8)), clip=0.1)
    resting = len(there(model))
    assert 0 < resting < DEPTH
    assert_equal(bare, model)
    told = str(model.memory_report())
    assert f"{resting} of {DEPTH} shards in memory: weights and optimizer states" in told
    assert (f"{DEPTH - resting} of {DEPTH} shards in host memory" in told) == (home != "cpu")


def test_a_first_batch_that_does_not_fit_is_refused_before_anything_moves(home: str) -> None:
    _, _, model, _ = pair(home, {"device": STATES, "host": "1GiB"})
    with pytest.raises(ValueError, match=r"the first batch has .* more than memory=1,966,080"):
        model(torch.ones((4 << 20) // (4 * WIDTH), WIDTH))
    assert model.statistics().shard_loads == 0
    assert model(torch.ones(ROWS, WIDTH)).shape == (ROWS, WIDTH)


def test_a_longer_batch_sends_shards_home_again(home: str) -> None:
    bare, plain, model, ours = pair(home, {"device": 2 * STATES, "host": "1GiB"})
    assert train(model, ours, batches(range(3))) == train(bare, plain, batches(range(3)))
    assert there(model) == [*range(DEPTH)]
    longer = batches(range(3, 6), STATES // (16 * WIDTH * 4))
    assert train(model, ours, longer) == train(bare, plain, longer)
    assert len(there(model)) < DEPTH
    assert_equal(bare, model)


@pytest.mark.parametrize("kind", zoo.LAYERS)
def test_what_is_there_is_never_more_than_its_memory(kind: str, tmp_path: Path) -> None:
    layers = zoo.build([kind] * 3)
    x = torch.randn(64, zoo.WIDTH)

    def counted(limit: int) -> tuple[int, int]:
        """The most that steps take once the first ones have measured, and what is predicted."""
        memory = {"device": limit, "host": "1GiB"}
        model = OffloadModel(copy.deepcopy(layers), "cpu", tmp_path / "home", num_slices=len(layers), memory=memory)
        ours = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-3)
        return counted_and_predicted(model, ours, x)

    _, all_of_it = counted(1 << 20)
    ran = 0
    for share in (1.25, 0.92, 0.8):
        limit = int(share * all_of_it)
        try:
            most, predicted = counted(limit)
        except (ValueError, RuntimeWarning):  # no plan fits
            continue
        assert most <= predicted <= limit
        ran += 1
    assert ran


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("casts", [False, True])
def test_casts_of_autocast_and_gradients_that_wait_for_an_update_in_backward_are_counted(
    casts: bool, in_backward: bool
) -> None:
    def counted(limit: int) -> tuple[int, int]:
        _, _, model, ours = pair("cpu", {"device": limit, "host": "1GiB"}, update_in_backward=in_backward)
        autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=casts)
        return counted_and_predicted(model, ours, torch.ones(2 * ROWS, WIDTH), autocast)

    _, everything = counted(1 << 30)
    for share in (1.0, 0.8, 0.7, 0.6, 0.5):
        limit = int(share * everything)
        most, predicted = counted(limit)
        assert 0.75 * predicted <= most <= predicted <= limit


@pytest.mark.parametrize(
    ("steps", "margins"),
    [
        pytest.param([(8, 500, True), (8, 120, False)], [400, 20], id="of a first step, until a later one"),
        pytest.param([(8, 130, True), (8, 120, False), (8, 150, False), (8, 90, False)], [30, 20, 50, 50], id="stays"),
        pytest.param([(8, 120, True), (8, 120, False), (8, 110, True), (8, 110, False)], [20] * 4, id="as it was"),
        pytest.param([(16, 300, True), (16, 300, False), (8, 110, False), (16, 300, False)], [200, 200, 10, 200],
                     id="its own, where a larger size took more"),
    ],
)  # fmt: skip
def test_what_steps_took_more_is_a_margin_of_later_ones_of_their_size(
    steps: list[tuple[float, int, bool]], margins: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps with so many rows and bytes, whose plan is new or not."""
    memory, found = StepMemory(torch.device("cpu")), []
    for rows, peak, new in steps:
        monkeypatch.setattr(memory._peak, "rise", lambda peak=peak: peak)
        memory.fresh |= new
        memory.begin(rows)
        predicted: Any = SimpleNamespace(peak=SimpleNamespace(begin=0, memory=100))
        memory.end(predicted)
        found.append(memory.margin(rows))
    assert found == margins
