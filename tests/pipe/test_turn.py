"""With fewer devices than stages, stages take turns; what comes out is what comes out of the bare module."""

import copy
import itertools
import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipe import Pipe
from pipe.schedule import fill_drain, one_forward_one_backward
from tests.pipe.test_pipe import MODES, WIDTH, assert_same, problems, reference, seed, states
from tests.pipe.turns import Turner


def cut(model: Any, balance: Any) -> Any:
    """The layers as stages that take turns."""
    edges = [0, *itertools.accumulate(balance)]
    return nn.Sequential(*(Turner(*model[a:b]) for a, b in itertools.pairwise(edges)))


def turners(n: Any, width: Any = WIDTH) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Turner(nn.Linear(width, width), nn.Dropout(0.2)) for _ in range(n)))


@settings(max_examples=50)
@given(
    problem=problems(),
    mode=st.sampled_from(MODES),
    needs=st.booleans(),
    devices=st.integers(1, 2),
    schedule=st.sampled_from([None, "fill_drain", "1f1b"]),
)
def test_stages_that_take_turns_are_the_bare_module(
    problem: Any, mode: Any, needs: Any, devices: Any, schedule: Any
) -> None:
    model, balance, chunks, rows = problem
    bare = copy.deepcopy(model)
    stages = len(balance)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=needs)
    y = x.detach().clone().requires_grad_(needs)
    target = torch.randn(rows, WIDTH, dtype=torch.float64)
    if schedule != "1f1b" or stages > devices:
        actions = [a for clock in fill_drain(min(chunks, rows), stages, stages > devices) for a in clock]
    else:
        actions = [a for clock in one_forward_one_backward(min(chunks, rows), stages) for a in clock]
    pipe = Pipe(cut(model, balance), [1] * stages, ["cpu"] * devices, chunks=chunks, checkpoint=mode)
    seed()
    with pipe.recording() as trace:
        if schedule is None:
            loss = nn.functional.mse_loss(pipe(x), target)
            loss.backward()
        else:
            loss = pipe.train_step(x, target, nn.MSELoss(), schedule=schedule)
    after = states()
    seed()
    output = reference(bare, balance, y, chunks, [(a.micro_batch, a.stage) for a in actions if a.kind == "F"])
    expected = nn.functional.mse_loss(output, target)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=1e-12)
    assert after == states()
    assert [p.shape for p in pipe.parameters()] == [p.shape for p in bare.parameters()]
    assert_same(nn.ParameterList(pipe.parameters()), nn.ParameterList(bare.parameters()), x, y)
    if stages > devices:
        assert trace == actions


def test_a_turn_is_announced_when_the_one_before_has_begun() -> None:
    pipe = Pipe(turners(3), [1, 1, 1], ["cpu"], chunks=2, checkpoint="never")
    pipe(torch.randn(4, WIDTH)).sum().backward()
    a, b, c = "0 of 3", "1 of 3", "2 of 3"
    assert pipe[0].log == [a, f"next is {b}", a, b, f"next is {c}", b, c, c]


def test_a_step_announces_turns_of_its_backward() -> None:
    pipe = Pipe(turners(2), [1, 1], ["cpu"], chunks=2, checkpoint="never")
    pipe.train_step(torch.randn(4, WIDTH), torch.zeros(4, WIDTH), nn.MSELoss(), schedule="fill_drain")
    a, b = "0 of 2", "1 of 2"
    assert pipe[0].log == [a, f"next is {b}", a, b, f"next is {a}, back", b]


def test_a_stage_with_a_device_entry_of_its_own_takes_no_turns() -> None:
    pipe = Pipe(turners(3), [1, 1, 1], ["cpu", "cpu", "cpu"])
    assert [turner.name for turner in pipe] == ["0 of 1"] * 3
    assert len({id(turner.log) for turner in pipe}) == 3


def test_stages_are_assigned_round_robin() -> None:
    pipe = Pipe(turners(5), [1] * 5, ["cpu", "cpu"], chunks=3)
    assert [turner.name for turner in pipe] == ["0 of 3", "0 of 2", "1 of 3", "1 of 2", "2 of 3"]
    assert [str(device) for device in pipe.devices] == ["cpu"] * 5


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_takes_turns_of_its_own(again: Any) -> None:
    pipe = Pipe(turners(2), [1, 1], ["cpu"], chunks=2)
    twin = again(pipe)
    twin(torch.randn(2, WIDTH))
    assert twin[0].log is twin[1].log
    assert twin[0].log is not pipe[0].log
    assert not pipe[0].log


class TestRefusals:
    def test_layers_that_take_no_turns_need_a_device_each(self) -> None:
        mixed = nn.Sequential(*turners(2), nn.Linear(WIDTH, WIDTH))
        with pytest.raises(IndexError, match="offload every stage so that they take turns"):
            Pipe(mixed, [1, 1, 1], ["cpu", "cpu"])

    def test_layers_without_parameters_may_be_stages_beside_those_that_take_turns(self) -> None:
        pipe = Pipe(nn.Sequential(*turners(2), nn.ReLU()), [1, 1, 1], ["cpu"], chunks=2)
        assert pipe(torch.randn(4, WIDTH)).min() >= 0

    def test_a_stage_made_for_another_device_is_named(self) -> None:
        stages = nn.Sequential(Turner(nn.Linear(2, 2)), Turner(nn.Linear(2, 2), device="meta"))
        with pytest.raises(ValueError, match="expected stage 1 on cpu, got one that computes on meta"):
            Pipe(stages, [1, 1], ["cpu"])


def test_after_an_exception_weights_may_change_again() -> None:
    class Fails(nn.Module):
        def forward(self, x: Any) -> None:
            raise KeyError(random.random())

    pipe = Pipe(nn.Sequential(*turners(1), Turner(Fails())), [1, 1], ["cpu"], chunks=2)
    with pytest.raises(KeyError):
        pipe(torch.ones(2, WIDTH))
    assert [turner.still for turner in pipe] == [0, 0]
