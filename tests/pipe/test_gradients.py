"""Hooks of parameters see one backward for a step, and whatever cannot accumulate is refused before a layer runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipe import Pipe
from tests.gradients import assert_same_step
from tests.pipe.turns import Turner
from tests.programs import outputs_of_ranks

WIDTH = 4


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def pair(**arguments: object) -> tuple[Pipe, nn.Sequential]:
    bare = layers()
    return Pipe(copy.deepcopy(bare), [2, 1], ["cpu", "cpu"], **{"chunks": 3, **arguments}), bare  # type: ignore[arg-type]


def assert_same(pipe: Pipe, bare: nn.Sequential) -> None:
    torch.testing.assert_close(pipe.state_dict(), bare.state_dict())
    assert_same_step([bare], [pipe])


def step_in_backward(layer: Any) -> list[str]:
    """An optimizer for each parameter, stepped as soon as its gradient is complete."""
    steps: list[str] = []
    for name, parameter in layer.named_parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.5)

        def hook(_: Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()
            steps.append(name)

        parameter.register_post_accumulate_grad_hook(hook)
    return steps


CALLS = [None, "1f1b", "fill_drain"]


def run(model: nn.Module, x: Tensor, target: Tensor, schedule: str | None) -> None:
    """Forward and backward, or a step."""
    if isinstance(model, Pipe) and schedule is not None:
        model.train_step(x, target, nn.MSELoss(), schedule=schedule)
    else:
        nn.MSELoss()(model(x), target).backward()


@pytest.mark.parametrize("schedule", CALLS)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_hooks_and_an_optimizer_in_backward_see_the_whole_gradient_once(checkpoint: str, schedule: str | None) -> None:
    pipe, bare = pair(checkpoint=checkpoint)
    seen: dict[nn.Module, list[Tensor]] = {pipe: [], bare: []}
    for model in (pipe, bare):
        for layer in (0, 2):
            model[layer].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))  # which is not linear
            model[layer].weight.register_hook(lambda g, model=model: seen[model].append(g.clone()))
    steps, expected = step_in_backward(pipe[2]), step_in_backward(bare[2])
    pipe[0].weight.grad, bare[0].weight.grad = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    for _ in range(2):
        x, target = torch.randn(7, WIDTH), torch.randn(7, WIDTH)
        for model in (pipe, bare):
            run(model, x, target, schedule)
        assert_same(pipe, bare)
    assert sorted(steps) == sorted(expected) == ["bias", "bias", "weight", "weight"]
    assert len(seen[pipe]) == len(seen[bare]) == 4
    torch.testing.assert_close(*(sorted(seen[model], key=lambda g: float(g.sum())) for model in (pipe, bare)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when the optimizers are imported
def test_optimizers_hooked_into_the_graph_step_once_and_are_refused_by_a_step_before_a_layer_runs() -> None:
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    pipe, bare = pair(checkpoint="always")
    x = torch.randn(6, WIDTH)
    for model in (pipe, bare):
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        for _ in range(2):
            model(x).square().mean().backward()
    assert_same(pipe, bare)
    with pipe.recording() as trace:
        with pytest.raises(RuntimeError, match="_apply_optimizer_in_backward"):
            pipe.train_step(x, x, nn.MSELoss())
    assert not trace


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_stage_that_is_updated_in_backward_is_refused_before_a_layer_runs(checkpoint: str) -> None:
    turner = Turner(nn.Linear(WIDTH, WIDTH))
    turner.updates_in_backward = True  # type: ignore[assignment]
    pipe = Pipe(nn.Sequential(turner, nn.Linear(WIDTH, WIDTH)), [1, 1], chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, WIDTH)
    with pipe.recording() as trace:
        with pytest.raises(RuntimeError, match="update_in_backward=True"):
            pipe(x)
        with pytest.raises(RuntimeError, match="update_in_backward=True"):
            pipe.train_step(x, x, nn.MSELoss())
    assert not trace
    with torch.no_grad():
        pipe(x)


REPLICAS = """
from torch.nn.parallel import DistributedDataParallel
from pipe import Pipe

def a_step_beside_replicas_is_refused():
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    for outer in (lambda p: p, lambda p: nn.Sequential(p, nn.Identity())):
        pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], ["cpu"] * 2, 2, "never")
        pipe.train_step(x, x, nn.MSELoss())
        pipe.zero_grad()
        ddp = DistributedDataParallel(outer(pipe))
        with pipe.recording() as trace:
            try:
                pipe.train_step(x, x, nn.MSELoss())
            except RuntimeError as error:
                assert "DistributedDataParallel" in str(error) and "no_sync" in str(error), error
            else:
                raise AssertionError("gradients stayed on their rank in silence")
        assert not trace and all(p.grad is None for p in pipe.parameters())
        with ddp.no_sync():
            pipe.train_step(x, x, nn.MSELoss())
        pipe.zero_grad()
        nn.MSELoss()(ddp(x + rank), x).backward()
        gathered = [torch.empty(3, 3) for _ in range(2)]
        dist.all_gather(gathered, pipe[0].weight.grad)
        assert torch.equal(*gathered)
        del ddp
        import gc; gc.collect()
        pipe.train_step(x, x, nn.MSELoss())
"""


def test_a_step_beside_distributed_data_parallel_is_refused(tmp_path: Path) -> None:
    assert ["held: " in output for output in outputs_of_ranks(REPLICAS, 2, tmp_path)] == [True, True]


class Head(nn.Module):
    """A loss that trains, and fails in its call of this number."""

    reduction = "mean"

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.calls, self.fails = 0, fails

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails:
            raise ValueError("no loss")
        return nn.functional.mse_loss(self.inner(output) * self.scale, target)


@pytest.mark.parametrize("chunks", [1, 3])
def test_parameters_of_a_loss_are_treated_as_those_of_the_pipe(chunks: int) -> None:
    pipe, bare = pair(chunks=chunks)
    x, target, seen = torch.randn(9, WIDTH), torch.randn(9, WIDTH), []
    loss = Head()
    expected = copy.deepcopy(loss)
    for each in (loss, expected):
        each.scale.grad = torch.ones(WIDTH)
        each.scale.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        each.inner.weight.register_post_accumulate_grad_hook(seen.append)
    expected(bare(x), target).backward()
    pipe.train_step(x, target, loss)
    assert_same(pipe, bare)
    assert_same_step([expected], [loss])
    assert len(seen) == 2
    failing = Head(fails=chunks)
    failing.scale.grad = torch.ones(WIDTH)
    with pytest.raises(ValueError, match="no loss"):
        pipe.train_step(x, target, failing)
    assert failing.inner.weight.grad is None
    assert torch.equal(failing.scale.grad, torch.ones(WIDTH))
