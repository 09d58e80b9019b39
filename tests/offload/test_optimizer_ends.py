"""What an optimizer switches on ends with it: afterwards the model is as if it had never had one."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import OffloadModel, OffloadOptimizer
from tests.offload.open_files import open_files
from tests.offload.pair import Pair, pending
from tests.offload.zoo import WIDTH, build


def backward(model: OffloadModel) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x).pow(2).mean().backward()


def test_updates_in_backward_end(home: str) -> None:
    model = OffloadModel(build(["linear", "linear"]), "cpu", home, 2, True)
    optimizer: Any = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    assert model.updates_in_backward
    with pytest.raises(ValueError, match="has an optimizer with update_in_backward=True already"):
        OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    backward(model)
    del optimizer
    gc.collect()
    assert not model.updates_in_backward
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # without a step in between, which an optimizer that updates in backward refuses
        backward(model)
    for then, now in zip(before, model.parameters(), strict=True):
        assert torch.equal(then, now)
        assert now.grad is not None
    OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)


@pytest.mark.parametrize("update_in_backward", [False, True])
def test_what_it_decided_is_applied_and_then_threads_and_files_end(tmp_path: Path, update_in_backward: bool) -> None:
    others = set(threading.enumerate())
    pair = Pair("adamw", f"{tmp_path}/", update_in_backward=update_in_backward)
    pair.backward()
    pair.step()
    pair.zero()
    assert pending(pair.model) == ([] if update_in_backward else [0, 1, 2, 3])
    optimizer = weakref.ref(pair.ours)
    del pair.ours
    gc.collect()
    assert optimizer() is None
    pair.eval()  # loads every shard, so what is pending is applied
    assert pending(pair.model) == []
    for thread in set(threading.enumerate()) - others:
        if thread.name == "offload-update":
            thread.join(timeout=60)
            assert not thread.is_alive()
    assert not open_files(tmp_path, "shard0-states")
    pair.assert_equal()
