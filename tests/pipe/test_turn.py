"""With fewer devices than stages, stages take turns. That they are the bare module: ``test_pipe.py``."""

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn

from pipe import Pipe
from tests.pipe.turns import Turner

WIDTH = 4


def turners(n: Any, width: Any = WIDTH) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Turner(nn.Linear(width, width), nn.Dropout(0.2)) for _ in range(n)))


@pytest.mark.parametrize(
    ("stages", "step", "log"),
    [
        (3, False, "0 of 3, next is 1 of 3, 0 of 3, 1 of 3, next is 2 of 3, 1 of 3, 2 of 3, 2 of 3"),
        (2, True, "0 of 2, next is 1 of 2, 0 of 2, 1 of 2, next is 0 of 2, back, 1 of 2"),
    ],
)
def test_a_turn_is_announced_when_the_one_before_has_begun(stages: int, step: bool, log: str) -> None:
    pipe = Pipe(turners(stages), [1] * stages, ["cpu"], chunks=2, checkpoint="never")
    x = torch.randn(4, WIDTH)
    pipe.train_step(x, x, nn.MSELoss(), schedule="fill_drain") if step else pipe(x).sum().backward()
    assert ", ".join(pipe[0].log) == log


def test_stages_are_assigned_round_robin_and_with_a_device_entry_each_take_no_turns() -> None:
    pipe = Pipe(turners(5), [1] * 5, ["cpu", "cpu"], chunks=3)
    assert [turner.name for turner in pipe] == ["0 of 3", "0 of 2", "1 of 3", "1 of 2", "2 of 3"]
    assert [str(device) for device in pipe.devices] == ["cpu"] * 5
    pipe = Pipe(turners(3), [1] * 3, ["cpu"] * 3)
    assert [turner.name for turner in pipe] == ["0 of 1"] * 3
    assert len({id(turner.log) for turner in pipe}) == 3


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_takes_turns_of_its_own(again: Any) -> None:
    pipe = Pipe(turners(2), [1, 1], ["cpu"], chunks=2)
    twin = again(pipe)
    twin(torch.randn(2, WIDTH))
    assert twin[0].log is twin[1].log
    assert twin[0].log is not pipe[0].log
    assert not pipe[0].log


def test_layers_that_take_no_turns_need_a_device_each() -> None:
    mixed = nn.Sequential(*turners(2), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(IndexError, match="offload every stage so that they take turns"):
        Pipe(mixed, [1, 1, 1], ["cpu", "cpu"])


def test_layers_without_parameters_may_be_stages_beside_those_that_take_turns() -> None:
    pipe = Pipe(nn.Sequential(*turners(2), nn.ReLU()), [1, 1, 1], ["cpu"], chunks=2)
    assert pipe(torch.randn(4, WIDTH)).min() >= 0


def test_a_stage_made_for_another_device_is_named() -> None:
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
