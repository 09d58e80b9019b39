"""Phonies, fork and join give backward an order and change no value."""

import threading
import weakref
from typing import Any

import pytest
import torch

from pipe.dependency import Fork, fork, join
from pipe.phony import get_phony
from tests.pipe.test_checkpoint import Log

CPU = torch.device("cpu")


def test_a_phony_first_made_in_inference_mode_or_on_a_default_device_is_usable_everywhere() -> None:
    get_phony.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        phony = get_phony(CPU, requires_grad=True)
    assert not phony.is_inference()
    assert phony.device.type == "cpu"
    assert fork(phony)[1].requires_grad


def backward_order(*, dependent: Any) -> Any:
    """Which of two independent lanes goes back first; the engine by itself prefers the higher node number."""
    log = []
    a = torch.rand(1, requires_grad=True)
    for _ in range(5):
        a = a * 2
    a, phony = fork(Log.apply(log, "a", a))
    box = []

    def other_lane() -> None:  # nodes are numbered by thread, and lower numbers go back later
        b = torch.rand(1, requires_grad=True)
        box.append(Log.apply(log, "b", join(b, phony) if dependent else b))

    thread = threading.Thread(target=other_lane)
    thread.start()
    thread.join()
    (a + box[0]).backward()
    return log


def test_backward_of_the_joined_runs_before_backward_of_the_forked() -> None:
    assert backward_order(dependent=True) == ["b", "a"]
    assert backward_order(dependent=False) == ["a", "b"]


def test_values_and_gradients_pass_unchanged() -> None:
    x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    x2, phony = fork(x)
    y2 = join(y, phony)
    assert torch.equal(x2, x)
    assert torch.equal(y2, y)
    (x2 * 2 + y2 * 3).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert y.grad.tolist() == [3.0] * 3
    x.grad = None
    join(y, fork(x)[1]).sum().backward()
    assert x.grad is None  # only the joined was used


@pytest.mark.parametrize("needs", [False, True])
def test_the_joined_needs_a_gradient_if_the_forked_does(needs: Any) -> None:
    a, b = torch.rand(1, requires_grad=needs), torch.rand(1)
    a, phony = fork(a)
    assert phony.requires_grad is needs
    assert join(b, phony).requires_grad is needs
    x = torch.arange(3)
    assert join(x, phony) is x
    with torch.no_grad():
        same, phony = fork(a)
        assert same is a
        assert not phony.requires_grad
        assert join(a, phony) is a


def test_a_phony_does_not_keep_its_fork_alive_longer_than_the_graph() -> None:
    class Leaf(torch.Tensor):
        pass

    x = torch.rand(1, requires_grad=True) * 1
    x2, phony = fork(x)
    y = join(torch.rand(1, requires_grad=True), phony)
    assert isinstance(x2.grad_fn, Fork._backward_cls)
    alive = weakref.ref(x)
    del x, x2, phony
    assert alive() is None
    y.backward()
