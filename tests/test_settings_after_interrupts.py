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


def piped(model: nn.Sequential) -> Pipe:
    return Pipe(model, [2, 2], devices=["cpu", "cpu"], chunks=2, checkpoint="always")


def squares(y: Tensor) -> Tensor:
    return y.float().square().mean()


def by_decorator(model: nn.Sequential, x: Tensor) -> None:
    y, again = cached(lambda model, x: model(x))(model, x)
    squares(y).backward()
    again(y)


STEPS: dict[str, Callable[[nn.Sequential, Tensor], object]] = {
    "forward": lambda model, x: squares(piped(model)(x)).backward(),
    "train_step": lambda model, x: piped(model).train_step(x, torch.ones_like(x), nn.MSELoss()),
    "cache step": lambda model, x: GradCache([model], 2, squares)(x),
    "encode": lambda model, x: squares(*GradCache([model], 2, squares).encode(x)).backward(),
    "decorator": by_decorator,
}


@pytest.mark.parametrize("contexts", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_after_an_interrupt_at_any_line_settings_are_as_before_and_the_next_step_is_right(
    step: str, contexts: bool
) -> None:
    model, x = layers(), torch.randn(4, 4)

    def run() -> None:
        torch.manual_seed(1)
        model.zero_grad()
        # Settings of the user, which a recomputation enters again.
        with torch.autocast("cpu", torch.bfloat16):
            STEPS[step](model, x)

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
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
