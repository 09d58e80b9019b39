"""``process_fn`` runs on a chunk when it enters the model, in both passes, however the model runs."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradcache import GradCache
from offload import OffloadModel
from pipe import is_recomputing
from tests.gradients import assert_same_step

EXECUTIONS = ["two passes", "offloaded", "wrapped"]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def make(
    execution: str, bare: nn.Sequential, process_fn: Any, size: int = 2, **options: Any
) -> tuple[nn.Module, GradCache]:
    model: nn.Module = bare
    if execution != "two passes":
        model = OffloadModel(bare, "cpu", num_slices=3, checkpoint_activation=True)
    if execution == "wrapped":
        model = nn.Sequential(model, nn.Identity())
    return model, GradCache([model], size, lambda rep: rep.square().sum(), process_fn=process_fn, **options)


@pytest.mark.parametrize("execution", EXECUTIONS[:2])
def test_a_chunk_is_processed_when_it_enters_and_no_two_results_are_alive(execution: str) -> None:
    events: list[str] = []
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def process(chunk: Tensor) -> Tensor:
        nonlocal most
        events.append(f"process {int(chunk[0, 0])}")
        result = chunk * 1.0
        alive.append(weakref.ref(result))
        most = max(most, sum(ref() is not None for ref in alive))
        return result

    bare = layers()

    def entered(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if not is_recomputing():
            events.append(f"layer {int(args[0][0, 0].round())}")

    bare[0].register_forward_hook(entered)
    _, step = make(execution, bare, process)
    x = torch.zeros(8, 8)
    x[:, 0] = torch.arange(8)
    step(x)
    starts = [0, 2, 4, 6]
    assert events[:8] == [f"{what} {k}" for k in starts for what in ("process", "layer")]
    again = [event for event in events[8:] if event.startswith("process")]
    assert sorted(again) == [f"process {k}" for k in starts]
    # The last result is still a variable of the layer's caller when the next one is made.
    assert most <= 2


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_random_numbers_of_process_fn_repeat_in_the_second_pass(execution: str) -> None:
    seen: dict[float, list[Tensor]] = {}

    def process(chunk: Tensor) -> Tensor:
        processed = nn.functional.dropout(chunk, 0.5)
        seen.setdefault(float(chunk[0, 0]), []).append(processed.detach().clone())
        return processed

    _, step = make(execution, layers(), process)
    for _ in range(2):
        step(torch.randn(7, 8))
    assert len(seen) == 8
    for first, *again in seen.values():
        assert again
        assert all(torch.equal(first, each) for each in again)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("trains", ["input", "module"])
def test_gradients_flow_to_the_input_and_to_what_process_fn_and_get_rep_fn_train(execution: str, trains: str) -> None:
    bare = layers()
    process, rep = nn.Linear(8, 8).requires_grad_(trains == "module"), nn.Linear(8, 3)
    x = torch.randn(7, 8, requires_grad=trains == "input")
    expected, ours = (process, rep), (copy.deepcopy(process), copy.deepcopy(rep))
    given = x.detach().clone().requires_grad_(trains == "input")
    rep(bare(process(x))).square().sum().backward()
    _, step = make(execution, copy.deepcopy(bare), ours[0], get_rep_fn=ours[1])
    step(given)
    assert_same_step(expected, ours)
    torch.testing.assert_close(given.grad, x.grad)


def test_a_function_that_trains_something_unseen_is_refused_before_any_gradient_is_written() -> None:
    hidden = nn.Linear(8, 8)
    model, step = make("offloaded", layers(), lambda chunk: hidden(chunk))
    with pytest.raises(ValueError, match="process_fn without trainable parameters"):
        step(torch.randn(4, 8))
    assert all(parameter.grad is None for parameter in (*model.parameters(), *hidden.parameters()))
