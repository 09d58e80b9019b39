"""Loops that edit what an optimizer holds: members of groups, parameters, states. Defect: silently something else."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer
from offload.optim.param_block import ParamBlock
from tests.offload.side_by_side import assert_equal, train
from tests.offload.zoo import WIDTH

Edit = Callable[[nn.Module, Any], None]


def steps(net: nn.Module, optimizer: Any, begin: int, end: int) -> None:
    for step in range(begin, end):
        train(net, optimizer, [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))])
        net.zero_grad()


def trained(home: str | None, edit: Edit, **choices: Any) -> nn.Module:
    """The plain model (without a home), or ours, after an edit between steps and steps after it."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
    if home is not None:
        net = OffloadModel(net, "cpu", home, num_slices=3, resident="3.*")
    members = [*net.parameters()]
    groups = [{"params": members[:4], "lr": 0.02}, {"params": members[4:]}]
    del members
    arguments = {"lr": 0.01, "foreach": False, "fused": False}
    optimizer: Any = (
        torch.optim.AdamW(groups, **arguments)
        if home is None
        else OffloadOptimizer(net, torch.optim.AdamW, params=groups, **arguments, **choices)
    )
    del groups
    steps(net, optimizer, 0, 3)
    edit(net, optimizer)
    if choices:
        optimizer.synchronize()
    steps(net, optimizer, 3, 5)
    return net


def removed(net: nn.Module, optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][0]


def filtered(net: nn.Module, optimizer: Any) -> None:
    kept = [p for p in optimizer.param_groups[0]["params"] if p.dim() > 1]
    optimizer.param_groups[0]["params"] = kept


def moved(net: nn.Module, optimizer: Any) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    first.append(second.pop())


def reversed_(net: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups.reverse()


def popped(net: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups.pop()


def emptied(net: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups.clear()


def cleared(net: nn.Module, optimizer: Any) -> None:
    optimizer.state.clear()


def of_another_type(net: nn.Module, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def without_some(net: Any, optimizer: Any) -> None:
    for p in net[1].parameters():
        del optimizer.state[p]


def replaced(net: Any, optimizer: Any) -> None:
    for p in [*net[1].parameters(), *net[3].parameters()]:
        optimizer.state[p]["exp_avg"] = torch.ones_like(p)
        optimizer.state[p]["step"] = torch.tensor(1.0)


def in_place(net: Any, optimizer: Any) -> None:
    for p in [*net[1].parameters(), *net[3].parameters()]:
        optimizer.state[p]["exp_avg"].zero_()


@torch.no_grad()
def clamped(net: nn.Module, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.clamp_(-0.1, 0.1)


@torch.no_grad()
def scaled(net: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][0].mul_(0.5)


def merged(net: Any, optimizer: Any) -> None:
    """The second group's members go to the first, and their states begin anew."""
    first, second = (group["params"] for group in optimizer.param_groups)
    for p in second:
        optimizer.state[p] = {}
    first.extend(second)
    optimizer.param_groups.pop()


MEMBERS = [removed, filtered, moved, reversed_, popped, emptied]
STATES = [cleared, of_another_type, without_some, replaced, in_place, merged]


@pytest.mark.parametrize("choices", [{}, {"update_in_backward": True}], ids=str)
@pytest.mark.parametrize("edit", [*MEMBERS, *STATES, clamped, scaled])
def test_edits_between_steps_are_followed_as_by_torch(home: str, edit: Edit, choices: dict[str, Any]) -> None:
    assert_equal(trained(None, edit), trained(home, edit, **choices))


@pytest.mark.parametrize("when", ["before the backward", "before step"])
def test_edits_that_an_update_in_backward_would_miss_are_refused(home: str, when: str) -> None:
    model = OffloadModel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), "cpu", home, num_slices=3)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    steps(model, optimizer, 0, 1)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(torch.ones(2, WIDTH)).sum()
    if when == "before step":
        loss.backward()
        removed(model, optimizer)
        with pytest.raises(RuntimeError, match=r"edited between a backward that updates and step"):
            optimizer.step()
        return
    removed(model, optimizer)
    with pytest.raises(RuntimeError, match=r"call optimizer.synchronize"):
        loss.backward()
    del loss
    gc.collect()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.synchronize()
    steps(model, optimizer, 1, 2)
    assert [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)] == [True] + 5 * [False]


def test_a_parameter_in_two_groups_is_refused_and_changes_nothing(home: str) -> None:
    model = OffloadModel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), "cpu", home, num_slices=3)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    optimizer.param_groups.append({**optimizer.param_groups[0]})
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="each in one group"):
        steps(model, optimizer, 0, 1)
    del optimizer.param_groups[1]
    assert all(map(torch.equal, before, model.parameters()))
    steps(model, optimizer, 0, 1)


def test_edits_that_storage_did_not_take_are_taken_by_the_next_step(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that nobody edited keep their values."""
    load, calls = ParamBlock.load_states, []

    def fails_once(self: ParamBlock, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise OSError("no space")
        load(self, *args)

    def edit(net: Any, optimizer: Any) -> None:
        optimizer.state[net[0][0].weight] = {}
        if isinstance(optimizer, OffloadOptimizer):
            with monkeypatch.context() as patch:
                patch.setattr(ParamBlock, "load_states", fails_once)
                with pytest.raises(OSError, match="no space"):
                    optimizer.synchronize()

    assert_equal(trained(None, edit), trained(home, edit))
    assert calls
