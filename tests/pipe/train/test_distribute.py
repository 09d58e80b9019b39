"""Sparse input is distributed ahead where the forward shows how, and never changes what is computed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipe.train import Distributes, TrainPipelineSparseDist
from tests.pipe.train.conftest import FakeSparse, SparseNet


def pipeline_of(lab: Any, model: Any, **options: Any) -> Any:
    return TrainPipelineSparseDist(model, lab.optimizer(model), "cpu", **options)


def twice(again: Any, self: Any, batch: Any) -> Any:
    return self.inner["sparse"](batch["x"]) + self.inner["sparse"](batch["x"], **again)


@pytest.mark.parametrize(
    ("use", "undistributed", "own_forwards"),
    [
        (
            lambda self, batch: self.inner["sparse"](batch["x"] * 2),
            "it was called with a Tensor that is no part of the batch",
            6,
        ),
        (lambda self, batch: batch["x"], "the first forward did not call it", 0),
        (
            lambda self, batch: self.inner["sparse"](batch["x"], flip=self.calls > 3),
            "called with other objects than in the first forward",
            4,
        ),
        (partial(twice, {"flip": True}), None, 2),
        (partial(twice, {}), None, 2),
        # A recomputation in backward runs the module's own forward.
        (lambda self, batch: checkpoint(self.inner["sparse"], batch["x"], use_reentrant=False), None, 1 + 6),
    ],
    ids=["no_part_of_the_batch", "not_called", "differs_later", "twice", "twice_the_same", "recomputed"],
)
def test_results_do_not_depend_on_how_a_module_is_called_and_what_is_not_distributed_is_told(
    lab: Any, use: Any, undistributed: Any, own_forwards: Any
) -> None:
    pipeline = lab.check_training(TrainPipelineSparseDist, lambda: SparseNet(use=use), lambda: [lab.batches(6)])
    reasons = pipeline.statistics().undistributed
    assert undistributed in reasons["inner.sparse"] if undistributed else not reasons
    assert pipeline.detach().inner["sparse"].count("forward") == own_forwards


def test_a_batch_without_the_part_that_the_first_one_had_is_distributed_by_the_forward(lab: Any) -> None:
    def use(self: Any, batch: Any) -> Any:
        return self.inner["sparse"](batch["again"]["x"] if "again" in batch else batch["x"])

    def epochs() -> Any:
        batches = lab.batches(6)
        for k in (0, 1, 4):
            batches[k]["again"] = {"x": batches[k].pop("x")}
        return [batches]

    pipeline = lab.check_training(TrainPipelineSparseDist, lambda: SparseNet(use=use), epochs)
    assert "does not have the part" in pipeline.statistics().undistributed["inner.sparse"]


def test_the_protocol_is_duck_typed_and_only_the_outermost_module_takes_part(lab: Any) -> None:
    assert isinstance(FakeSparse(), Distributes)
    assert not isinstance(nn.Linear(1, 1), Distributes)
    model = SparseNet(use=lambda self, batch: batch["x"])
    model.inner["sparse"].part, model.other = FakeSparse(), FakeSparse()
    pipeline = pipeline_of(lab, model)
    lab.run(pipeline, iter(lab.batches(1)))
    assert pipeline.statistics().undistributed.keys() == {"inner.sparse", "other"}  # not "inner.sparse.part"


def test_a_forward_replaced_by_other_code_is_kept(lab: Any) -> None:
    model = lab.sparse_model()
    sparse = model.inner["sparse"]
    own = sparse.forward
    sparse.forward = lambda *args, **kwargs: own(*args, **kwargs)
    replaced = sparse.forward
    lab.run(pipeline_of(lab, model), iter(lab.batches(3)))
    assert vars(sparse)["forward"] is replaced
