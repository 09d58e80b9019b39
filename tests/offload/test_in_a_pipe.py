"""Stages of a Pipe that are OffloadModels: an offloaded, micro-batched pipeline."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload import OffloadModel, OffloadOptimizer
from pipe import Pipe
from tests.offload import side_by_side
from tests.offload.zoo import WIDTH, build
from tests.pipe.turns import Turner

# --- fewer devices than stages: stages take turns, loaded for their turn ----------------------------------------------

ROWS = 6


def blocks(count: int, *, dropout: float = 0.3) -> list[nn.Sequential]:
    """Stages of equal size, each of two layers with weights."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        for _ in range(count)
    ]


def offloaded(parts: list[nn.Sequential], home: str, *, slices: int = 1, **arguments: Any) -> nn.Sequential:
    """Stages with the weights of ``parts``, at home."""
    return nn.Sequential(*(side_by_side.offloaded(part, home, slices, **arguments) for part in parts))


def standing(parts: list[nn.Sequential]) -> nn.Sequential:
    """The same stages, which take turns in the same order but stay where they are."""
    return nn.Sequential(*(Turner(*copy.deepcopy(part)) for part in parts))


def stepped(pipe: Pipe, schedule: str | None, hooks: Any, steps: int = 2) -> list[torch.Tensor]:
    """Trains a little; returns all that can be seen of it."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5)
    seen: list[torch.Tensor] = []
    torch.manual_seed(1)
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        if schedule is None:
            with hooks():
                loss = pipe(x).square().mean()
            loss.backward()
        else:
            loss = pipe.train_step(x, torch.zeros(ROWS, WIDTH), nn.MSELoss(), schedule=schedule)
        assert x.grad is not None
        seen += [loss.detach(), x.grad, *(p.grad.clone() for p in pipe.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(t.clone() for t in pipe.state_dict().values()), torch.get_rng_state()]


@settings(max_examples=20)
@given(
    count=st.integers(2, 5),
    devices=st.integers(1, 2),
    chunks=st.integers(1, 3),
    mode=st.sampled_from(["never", "except_last", "always"]),
    schedule=st.sampled_from([None, "fill_drain", "1f1b"]),
    slices=st.sampled_from([1, 3]),
    recompute=st.booleans(),
    disk=st.booleans(),
    hooks=st.sampled_from([contextlib.nullcontext, torch.autograd.graph.save_on_cpu]),
)
def test_stages_loaded_for_their_turn_train_bit_for_bit_like_those_that_stay(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    devices: int,
    chunks: int,
    mode: str,
    schedule: str | None,
    slices: int,
    recompute: bool,
    disk: bool,
    hooks: Any,
) -> None:
    home = f"{tmp_path_factory.mktemp('home')}/" if disk else "cpu"
    parts = blocks(count)
    stay = Pipe(standing(parts), [1] * count, ["cpu"] * devices, chunks, mode)
    stages = offloaded(parts, home, slices=slices, checkpoint_activation=recompute)
    loaded = Pipe(stages, [1] * count, ["cpu"] * devices, chunks, mode)
    for expected, got in zip(stepped(stay, schedule, hooks), stepped(loaded, schedule, hooks), strict=True):
        assert torch.equal(expected, got)


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("schedule", [None, "fill_drain"])
def test_a_stage_is_loaded_once_for_each_turn_whatever_the_number_of_micro_batches(
    home: str, mode: str, chunks: int, schedule: str | None
) -> None:
    stages = offloaded(blocks(4, dropout=0.0), home)
    pipe = Pipe(stages, [1] * 4, ["cpu"], chunks, mode)
    for step in range(1, 4):
        x = torch.randn(2 * ROWS, WIDTH)
        if schedule is None:
            pipe(x).sum().backward()
        else:
            pipe.train_step(x, x, nn.MSELoss(), schedule=schedule)
        # A turn forward and one back; the room for two keeps the last two stages from one to the other.
        assert [stage.statistics().shard_loads for stage in stages] == [2 * step, 2 * step, step, step]


def test_device_memory_is_one_turn_and_one_slot_whatever_the_number_of_stages(home: str) -> None:
    def held(count: int, slices: int) -> int:
        stages = offloaded(blocks(count), home, slices=slices)
        pipe = Pipe(stages, [1] * count, ["cpu"], 2, "never")
        pipe(torch.randn(ROWS, WIDTH)).sum().backward()
        slot = max(shard.slot_bytes for shard in stages[0]._homes.shards)
        return sum(stage._homes.meter.held_bytes for stage in stages) // slot

    # A stage of one shard: that and the next one's. Of four shards in two slots: no more than it has alone.
    assert [held(count, 1) for count in (2, 3, 6)] == [2, 2, 2]
    assert [held(count, 4) for count in (2, 3, 6)] == [2, 2, 2]


def test_the_next_stage_loads_while_the_one_before_it_computes(home: str) -> None:
    stages = offloaded(blocks(3), home)
    pipe = Pipe(stages, [1] * 3, ["cpu"], 3, "never")
    resident: list[list[int]] = []

    def note(*_: object) -> None:
        resident.append([k for k, stage in enumerate(stages) if stage._homes.streamer.resident()])

    for stage in stages:
        stage.register_forward_hook(note)
    pipe(torch.randn(ROWS, WIDTH))
    # After the first micro-batch of each turn the following stage is told, and begins.
    assert resident == [[0], [0, 1], [0, 1], [0, 1], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2]]


@pytest.mark.parametrize("mode", ["never", "always"])
def test_after_an_exception_in_a_turn_the_pipe_is_usable(home: str, mode: str) -> None:
    stages = offloaded(blocks(3, dropout=0.0), home)
    handle = stages[2][1].register_forward_hook(lambda *_: 1 / 0)  # type: ignore[index]
    pipe = Pipe(stages, [1] * 3, ["cpu"], 2, mode)
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(ZeroDivisionError):
        pipe(x)
    handle.remove()
    pipe(x).sum().backward()
    assert all(p.grad is not None for p in pipe.parameters())


def test_two_models_that_share_slots_cannot_compute_at_once(home: str) -> None:
    first, second = offloaded(blocks(2), home)
    Pipe(nn.Sequential(first, second), [1, 1], ["cpu"])
    next(iter(first.children())).register_forward_hook(lambda *_: second(torch.ones(2, WIDTH)))
    with pytest.raises(RuntimeError, match="two models that take turns on one device compute at once"):
        first(torch.ones(2, WIDTH))


# --- activation offload around a pipe ---------------------------------------------------------------------------------


def test_updates_in_backward_under_several_micro_batches_are_refused_before_a_layer_runs(home: str) -> None:
    calls: list[int] = []
    model = OffloadModel(build(("linear", "linear")), "cpu", home, 2, True)
    next(model.children()).register_forward_hook(lambda *_: calls.append(1))
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    pipe = Pipe(nn.Sequential(model), [1], devices=["cpu"], chunks=2)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with pytest.raises(RuntimeError, match="update_in_backward"):
        pipe.train_step(x, y, nn.MSELoss())
    assert not calls
    with optimizer.accumulate():
        pipe.train_step(x, y, nn.MSELoss())
    assert calls
