"""What a step holds: as much as predicted, weights at home once, saved activations until their backward."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload import MemoryPolicy, OffloadModel
from offload.streaming.lane import CopyLanes
from tests.offload.late import LateLane
from tests.offload.zoo import FeedForward, build

WIDTH = 64
DEPTH = 4


class Living(TorchDispatchMode):
    """Counts the bytes of results of operations that are still referenced."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._nbytes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (made := StorageWeakRef(x.untyped_storage())) not in given:
                self._nbytes[made] = x.untyped_storage().nbytes()
        self._nbytes = {made: nbytes for made, nbytes in self._nbytes.items() if not made.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._nbytes.values()))
        return result


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(FeedForward(WIDTH) for _ in range(DEPTH)))


def step(model: OffloadModel, x: Tensor) -> None:
    """The user has the output, and autograd its gradient, until backward is over, as a prediction supposes."""
    model.zero_grad()
    output = model(x)
    output.backward(torch.ones_like(output))


@pytest.mark.parametrize("rows", [16, 128, 1024])
@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_activation": True, "num_slices": DEPTH},
        {"checkpoint_activation": True, "num_slices": 2},
        {"checkpoint_activation": True, "num_slices": DEPTH, "num_microbatches": 2},
        {"checkpoint_activation": False, "num_slices": DEPTH},
        {"checkpoint_activation": False, "num_slices": DEPTH, "num_microbatches": 4},
        {"checkpoint_activation": True, "num_slices": DEPTH, "memory": MemoryPolicy.fixed(graph_bytes="64MiB")},
    ],
    ids=lambda settings: ", ".join(f"{value}" for value in settings.values()),
)
def test_the_predicted_peak_is_what_is_alive_at_the_fullest_moment(
    home: str, settings: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.construction.open_lanes", lambda device, **_: CopyLanes(*map(LateLane, [None] * 3)))
    model, x = OffloadModel(stack(), "cpu", home, **settings), torch.randn(rows, WIDTH)
    step(model, x)
    step(model, x)
    predicted = model.estimate(rows).memory_bytes
    homes = model._homes
    fixed = homes.streamer.slots * homes.streamer.slot_bytes
    if home == "cpu":
        fixed += sum(shard.home.nbytes for shard in homes.shards if shard.home is not None)
    model.zero_grad()
    gc.collect()
    with Living() as living:
        step(model, x)
    assert fixed + living.peak_bytes == pytest.approx(predicted, rel=0.15)


def test_a_tied_weight_is_stored_once() -> None:
    first, second = FeedForward(WIDTH), FeedForward(WIDTH)
    second.widen.weight = first.widen.weight
    model = OffloadModel(nn.Sequential(first, second), "cpu", num_slices=2, checkpoint_activation=True)
    model(torch.randn(2, WIDTH)).sum().backward()
    assert model.estimate(2).home_bytes == 2 * sum(p.numel() * 4 for p in model.parameters())


def test_backward_frees_saved_activations_one_by_one(home: str) -> None:
    """As plain autograd does: what is kept until the last gradient is home stands beside all gradients."""
    model = OffloadModel(stack(), "cpu", home, DEPTH, False)
    alive: list[int] = []
    kept: list[StorageWeakRef] = []

    def saved(widen: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        kept.append(StorageWeakRef(output.untyped_storage()))

    def seen(block: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        output.register_hook(lambda _: alive.append(sum(not storage.expired() for storage in kept)))

    for block in model.children():
        block.get_submodule("widen").register_forward_hook(saved)
        block.register_forward_hook(seen)
    model(torch.randn(3, WIDTH)).sum().backward()
    assert alive == list(range(DEPTH, 0, -1))


@pytest.mark.parametrize(("checkpoint", "retains"), [(True, False), (False, False), (True, True)])
def test_a_backward_that_failed_midway_is_refused_the_second_time_unless_its_graph_was_retained(
    home: str, checkpoint: bool, retains: bool
) -> None:
    model = OffloadModel(stack(), "cpu", home, DEPTH, checkpoint)
    x, failing = torch.randn(3, WIDTH), [True]

    def fails(gradient: Tensor) -> None:
        if failing:
            raise ValueError("on purpose")

    list(model.children())[1].register_forward_hook(lambda block, args, output: output.register_hook(fails) and None)
    loss = model(x).sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward(retain_graph=retains)
    failing.clear()
    if not retains:
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        loss = model(x).sum()
    model.zero_grad()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_estimate_counts_what_a_step_then_moves(tmp_path: Path) -> None:
    model = OffloadModel(
        build(["linear"] * 4), "cpu", tmp_path, num_slices=6, checkpoint_activation=True, num_microbatches=3
    )
    with pytest.raises(RuntimeError, match="run one training step first"):
        model.estimate(9)
    model(torch.randn(9, 8)).sum().backward()
    before = model.statistics()
    estimate = model.estimate(9)
    assert re.search(r"\n *bytes loaded +[\d.]+ KiB\n", str(estimate))
    model(torch.randn(9, 8)).sum().backward()
    after = model.statistics()
    assert estimate.bytes_loaded == after.bytes_loaded - before.bytes_loaded
    assert estimate.bytes_stored == after.bytes_stored - before.bytes_stored
    assert estimate.seconds >= estimate.compute_seconds > 0
    assert after.peak_device_bytes <= estimate.memory_bytes


# --- what a step used is free when it is over, without the garbage collector ------------------------------------------


class SavesItsOutput(nn.Module):
    """``exp`` saves its own result for backward; ``seen`` remembers it without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = (-x.square()).exp()
        self.seen.append(weakref.ref(y))
        return y


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    gc.collect()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("checkpoint", [False, True], ids=["keep", "checkpoint"])
def test_a_step_leaves_no_tensor_to_the_garbage_collector(home: str, checkpoint: bool) -> None:
    """A layer of half a MiB is moved directly, in pieces, which once held the gradients of a whole model.

    A tensor that a saved-tensor hook hands back as it came holds its own graph: no collector sees that cycle.
    """
    watched, x = SavesItsOutput(), torch.ones(4, 256)
    layers = nn.Sequential(nn.Linear(256, 256), watched, nn.Linear(256, 256), nn.Linear(256, 512))
    model = OffloadModel(layers, "cpu", home, 3, checkpoint_activation=checkpoint)
    step(model, x)  # what is made once may be found by the collector
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    step(model, x)
    gc.collect()
    assert [tuple(found.shape) for found in gc.garbage if isinstance(found, Tensor)] == []
    assert watched.seen
    assert [seen for seen in watched.seen if seen() is not None] == []
