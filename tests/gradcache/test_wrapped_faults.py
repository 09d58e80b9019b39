"""What a step over a wrapped OffloadModel leaves behind: after an exception, after a refusal, and by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gradcache import GradCache
from pipe import is_recomputing
from tests.gradcache.wrapped_towers import (
    Embedding,
    Residual,
    TwoBodies,
    assert_same,
    layer_by_layer,
    rows,
    square,
    with_offload,
)
from tests.offload.interrupts import interrupted, lines_of

# --- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("where", ["first", "body", "last"])
@pytest.mark.parametrize("call", [1, 2, 4, 5, 6, 7, 8, 9, 10, 12])
def test_an_exception_leaves_gradients_as_before_and_a_usable_model(where: str, call: int, accumulated: bool) -> None:
    plain = Embedding()
    ours = with_offload(plain)
    if accumulated:
        for model in (plain, ours):
            GradCache([model], 2, square)(rows(6, 9))
    before = {name: parameter.grad for name, parameter in ours.named_parameters()}
    kept = {name: None if gradient is None else gradient.clone() for name, gradient in before.items()}
    remaining = call

    def fails(*_: object) -> None:
        nonlocal remaining  # of functions, a recomputation puts nothing back
        remaining -= 1
        if remaining == 0:
            raise OSError("fault")

    layer = [*ours.body.children()][1][0] if where == "body" else getattr(ours, where)  # a last one need not run again
    handle = layer.register_forward_pre_hook(fails)
    failed = False
    try:
        GradCache([ours], 2, square)(rows(6))
    except OSError:
        failed = True
    assert failed == (call <= {"first": 12, "body": 6, "last": 6}[where])
    if failed:
        for name, parameter in ours.named_parameters():
            assert parameter.grad is before[name], name
            if kept[name] is not None:
                assert torch.equal(parameter.grad, kept[name]), name
    handle.remove()
    ours.load_state_dict(plain.state_dict())
    if not failed:
        ours.zero_grad()
        plain.zero_grad()
    for model in (plain, ours):
        GradCache([model], 2, square)(rows(6, 5))
    assert_same(plain, ours)


def test_after_an_interrupt_at_any_line_the_next_step_is_that_of_the_plain_tower() -> None:
    """Of what runs around streamed models; 173 is a prime, so no line is left out in all versions of the code."""
    plain = Embedding(dropout=0.3)
    ours = with_offload(plain)
    start = copy.deepcopy(plain.state_dict())
    torch.manual_seed(5)
    square(layer_by_layer(plain, rows(6).split(3))).backward()
    state = torch.get_rng_state()
    buffers = list(ours.buffers())

    def step() -> None:
        ours.zero_grad()
        GradCache([ours], 3, square)(rows(6, 9))

    step()
    around = ("gradcache/wrapped/towers.py", "gradcache/wrapped/suspended.py", "pipe/interception.py")
    lines = [line for line in lines_of(step) if line.file.endswith(around)]
    for line in lines[::173]:
        assert interrupted(step, line) == "raised"
        assert all(parameter.grad is None for parameter in ours.parameters())
        assert all(module.training for module in ours.modules())
        assert torch.is_grad_enabled()
        assert not is_recomputing()
        assert all(a is b for a, b in zip(buffers, ours.buffers(), strict=True))
        ours.load_state_dict(start)
        torch.manual_seed(5)
        GradCache([ours], 3, square)(rows(6))
        assert torch.equal(torch.get_rng_state(), state)
        assert_same(plain, ours)
    assert len(lines) > 10 * 173


class Catches(Residual):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.body(self.first(x))
        except BaseException:
            return self.first(x)


class Fickle(TwoBodies):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first, second = (self.body, self.second) if self.calls <= 3 else (self.second, self.body)
        return second(first(x))


class Thawing(Residual):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        return self.body(x if self.calls > 6 else x.detach())


class Sometimes(Residual):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h if bool((x > 0).all()) else h + x.mul_(2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Catches, r"Catches was suspended .* catch Exception there, not BaseException"),
        (Fickle, r"Fickle, which is repeated .* in another order"),
        (Thawing, "with inputs that need other gradients"),
        (Sometimes, r"the model \(Sometimes\) wrote into its input in place"),
    ],
)
def test_a_tower_that_catches_what_suspends_it_or_is_another_when_repeated_is_refused(kind: Any, words: str) -> None:
    ours = with_offload(kind())
    with pytest.raises(RuntimeError, match=words):
        GradCache([ours], 2, square)(torch.cat([rows(2).abs() + 1, rows(4)]))
    assert all(parameter.grad is None for parameter in ours.parameters())
