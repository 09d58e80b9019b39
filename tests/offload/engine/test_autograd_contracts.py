"""What autograd promises of any module holds for an OffloadModel, or is refused before anything happened."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from offload.engine.boundaries import Boundaries
from offload.planning.step_model import WRITES_IN_FLIGHT
from offload.storage import DiskTier
from offload.telemetry.statistics import Meter
from pipe import Pipe
from pipe.checkpoint import checkpoint
from tests.offload.late import LateLane
from tests.offload.side_by_side import assert_equal

WIDTH = 8


def mlp(depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))


@pytest.mark.parametrize("recompute", [False, True])
def test_of_the_shards_before_all_that_was_asked_for_one_at_most_is_loaded(home: str, recompute: bool) -> None:
    model = OffloadModel(mlp(8), "cpu", home, 8, recompute)
    loss = model(torch.randn(6, WIDTH)).sum()
    before = model.statistics().shard_loads
    torch.autograd.grad(loss, list(model.parameters())[-5])  # of shard 5; the last two are still in slots
    assert model.statistics().shard_loads - before <= 2  # one ahead of its use


def test_hooks_beside_updates_in_backward_are_refused_before_a_shard_is_updated(home: str) -> None:
    model = OffloadModel(mlp(4), "cpu", home, 4, True)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    handle = next(iter(model.parameters())).register_hook(lambda gradient: gradient * 2)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="hooks"):
        model(torch.randn(6, WIDTH)).sum().backward()
    assert all(map(torch.equal, before, model.parameters()))
    handle.remove()
    model(torch.randn(6, WIDTH)).sum().backward()
    optimizer.step()
    assert not all(map(torch.equal, before, model.parameters()))


class Checkpointed(nn.Module):
    """Checkpoints its layers, all but one of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = mlp(2), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(lambda v: checkpoint(self.layers, v) * self.scale, x)
        return output * self.scale


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("kind", ["checkpoint", "Pipe"])
def test_layers_may_checkpoint_themselves(home: str, kind: str, blocks: bool, recompute: bool) -> None:
    torch.manual_seed(0)
    pipes = [Pipe(nn.Sequential(mlp(1), nn.Dropout(0.5)), [1, 1], ["cpu"] * 2, chunks=2) for _ in range(4)]
    bare = nn.Sequential(*(pipes if kind == "Pipe" else [Checkpointed() for _ in range(4)]))
    options = {"blocks": ["0", "1", "2", "3"]} if blocks else {}
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, 4, recompute, **options)
    x = torch.randn(6, WIDTH)
    for step in range(3):
        for each in (bare, model):
            torch.manual_seed(step)
            each(x).square().sum().backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_equal(bare, model)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_layers_checkpoint_is_compared_with_the_forward(home: str, recompute: bool) -> None:
    model = OffloadModel(nn.Sequential(*(Checkpointed() for _ in range(4))), "cpu", home, 4, recompute)
    loss = model(torch.randn(6, WIDTH)).sum()
    with torch.no_grad():
        model[1].layers[0][0].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"parameter 1.layers.0.0.weight .* changed in place between the forward"):
        loss.backward()


# --- weights that layers write --------------------------------------------------------------------------------------


class Writing(nn.Module):
    """Writes its weight in some of its runs, before or after it uses it."""

    def __init__(self, place: str, runs: tuple[int, ...], *, saved: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.place, self.runs, self.saved, self.count = place, runs, saved, 0

    def _write(self, place: str) -> None:
        if place == self.place and self.count in self.runs:
            with torch.no_grad():
                self.weight.mul_(1.5)

    def forward(self, x: Tensor) -> Tensor:
        self._write("before")
        y = x * self.weight if self.saved else torch.tanh(x + self.weight)
        self._write("after")
        self.count += 1
        return y


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("runs", [(0,), (1,), (0, 1)], ids=str)
def test_a_weight_that_a_graph_needs_is_not_another_one_in_backward(
    home: str, recomputed: bool, place: str, runs: tuple[int, ...], saved: bool
) -> None:
    """Two micro-batches run one layer before the next one does: torch refuses the same."""
    linear = mlp(2)
    bare = nn.Sequential(linear[0], Writing(place, runs, saved=saved), linear[1])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, 3, recomputed, num_microbatches=2)
    x = torch.randn(6, WIDTH)
    values = list(x.chunk(2))
    for layer in bare:
        values = [layer(x) for x in values]
    loss = torch.cat(values).square().sum()
    refused = pytest.raises(RuntimeError, match=r"wrote parameter 1\.weight in place")
    if saved and (place == "after" or 1 in runs):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with refused:
            model(x).square().sum().backward()
        return
    loss.backward()
    # Only a layer that has not written so far is recomputed, and what the next micro-batch writes comes too late.
    late = recomputed and not saved and runs == (1,)
    with refused if late else contextlib.nullcontext():
        model(x).square().sum().backward()
    if not late:
        assert_equal(bare, model)


# --- what enters a cell ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [False, True], ids=["being written", "written"])
def test_what_changes_while_it_leaves_memory_is_refused(tmp_path: Path, ended: bool) -> None:
    """A lane may have read either value. Once it is out of memory, what comes back is that of the forward."""
    lane, cpu = LateLane(), torch.device("cpu")
    scratch = DiskTier(tmp_path, cpu).scratch()
    assert scratch is not None
    save, load = Boundaries(scratch, lane, Meter(cpu), 0).hooks((0, 0))
    inputs = [torch.full((10,), float(k)) for k in range(3 + WRITES_IN_FLIGHT * ended)]
    saved = [save(x) for x in inputs]
    inputs[0].add_(7)
    refused = pytest.raises(RuntimeError, match="changed in place between the forward and its backward")
    with contextlib.nullcontext() if ended else refused:
        assert not load(saved[0]).any()
