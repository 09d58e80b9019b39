"""After ``KeyboardInterrupt`` at any line of a step the thread's settings are as before, and the next step is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradcache import GradCache
from gradcache.functional import cached
from offload.identities import values_may_be_read
from pipe import Pipe
from pipe.recompute.thread_state import ThreadState
from tests.offload.interrupts import interrupted, lines_of


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh())


def by_forward(model: nn.Module, x: Tensor) -> None:
    pipe = Pipe(model, [2, 2], devices=["cpu", "cpu"], chunks=2, checkpoint="always")
    pipe(x).float().square().mean().backward()


def by_train_step(model: nn.Module, x: Tensor) -> None:
    pipe = Pipe(model, [2, 2], devices=["cpu", "cpu"], chunks=2, checkpoint="always")
    pipe.train_step(x, torch.ones_like(x), nn.MSELoss())


def by_cache_step(model: nn.Module, x: Tensor) -> None:
    GradCache([model], 2, lambda y: y.float().square().mean())(x)


def by_encode(model: nn.Module, x: Tensor) -> None:
    (y,) = GradCache([model], 2, lambda y: y).encode(x)
    y.float().square().mean().backward()


def by_decorator(model: nn.Module, x: Tensor) -> None:
    y, again = cached(lambda model, x: model(x))(model, x)
    y.float().square().mean().backward()
    again(y)


@pytest.mark.parametrize("contexts", [False, True])
@pytest.mark.parametrize("step", [by_forward, by_train_step, by_cache_step, by_encode, by_decorator])
def test_after_an_interrupt_at_any_line_settings_are_as_before_and_the_next_step_is_right(
    step: Callable[[nn.Module, Tensor], None], contexts: bool
) -> None:
    model, x = layers(), torch.randn(4, 4)

    def run() -> None:
        torch.manual_seed(1)
        model.zero_grad()
        # Settings of the user, which a recomputation enters again.
        with torch.autocast("cpu", torch.bfloat16):
            step(model, x)

    run()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(expected) == 4
    lines = lines_of(run, contexts=contexts)
    chosen = {line[:2]: line for line in lines if not contexts or " in " in line.file}.values()
    before, raised = ThreadState.capture(), 0
    for line in chosen:
        raised += interrupted(run, line, contexts=contexts) == "raised"
        assert ThreadState.capture() == before, line
        assert all(module.training for module in model.modules()), line
        assert values_may_be_read(), line
    assert raised > 0.9 * len(chosen) - 5
    run()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, gradient)
