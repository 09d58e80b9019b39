"""A forked child neither waits for what only its parent has, nor removes what is its parent's."""

from __future__ import annotations

import atexit
import gc
from pathlib import Path

import pytest
import torch

from offload import DiskHome, OffloadModel, OffloadOptimizer
from tests.offload.mesh.forked import fork
from tests.offload.zoo import WIDTH, build

# Python 3.12 and later warn of any fork of a process with threads, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.. may lead to deadlocks:DeprecationWarning")


def train(model: OffloadModel) -> None:
    model(torch.randn(3, WIDTH)).sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_child_that_calls_the_model_is_told_that_it_is_forked(home: str, recompute: bool) -> None:
    model = OffloadModel(build(["linear"]), "cpu", home, num_slices=3, checkpoint_activation=recompute)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW)
    train(model)  # its threads run
    loss = model(torch.randn(3, WIDTH)).sum()

    def child() -> None:
        for call in (lambda: train(model), loss.backward):
            with pytest.raises(RuntimeError, match=r"this is a forked child of it .* Make the model in the child"):
                call()

    assert fork(child).result()[0] == 0
    loss.backward()
    optimizer.step()

    def reads() -> None:
        with pytest.raises(RuntimeError, match="forked child"):
            model.state_dict()

    if home != "cpu":  # in memory, the update may be complete, which is then read
        assert fork(reads).result()[0] == 0
    optimizer.synchronize()


@pytest.mark.parametrize("at_exit", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_child_that_ends_or_collects_the_model_leaves_the_files(tmp_path: Path, at_exit: bool, keep: bool) -> None:
    model = OffloadModel(
        build(["linear"]), "cpu", DiskHome(tmp_path, keep=keep), num_slices=3, checkpoint_activation=False
    )
    train(model)
    before = sorted(path for path in tmp_path.rglob("*"))
    holder = [model]
    del model

    def child() -> None:
        if at_exit:  # it ends as a script does
            atexit._run_exitfuncs()
        else:
            holder.clear()
            gc.collect()

    assert fork(child).result()[0] == 0
    assert sorted(path for path in tmp_path.rglob("*")) == before
    train(holder[0])
    holder[0].close()
