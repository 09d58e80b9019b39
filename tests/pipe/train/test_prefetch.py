"""Rows are prefetched for the batch that they belong to, once, ahead of its forward; results are a plain loop's."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipe.train import Lanes, PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from tests.pipe.train.conftest import FakeCached, FakeSparse, SparseNet


def prefetching(lab: Any, model: Any, **options: Any) -> Any:
    return PrefetchTrainPipelineSparseDist(model, lab.optimizer(model), "cpu", **options)


@pytest.mark.parametrize("grad_accum", [1, 3])
@pytest.mark.parametrize("lanes", [None, Lanes.serial()])
@pytest.mark.parametrize("sparse", [FakeCached, FakeSparse])
def test_models_train_as_in_a_loop_prefetched_or_not(lab: Any, sparse: Any, grad_accum: Any, lanes: Any) -> None:
    make = partial(PrefetchTrainPipelineSparseDist, lanes=lanes)
    pipeline = lab.check_training(make, lambda: lab.sparse_model(sparse), lambda: [lab.batches(7)], grad_accum)
    module = pipeline.detach().inner["sparse"]
    assert module.count("forward") == 1, "the first forward shows what to distribute"
    assert module.count("prefetch") == (6 if sparse is FakeCached else 0)
    assert pipeline.statistics().undistributed == {}


def test_a_module_that_is_called_with_other_objects_than_were_prefetched_is_refused(lab: Any) -> None:
    def use(self: Any, batch: Any) -> Any:
        return self.inner["sparse"](batch["x"] if self.calls < 3 else batch["x"] * 1.0)

    pipeline, batches = prefetching(lab, SparseNet(FakeCached, use)), iter(lab.batches(5))
    for _ in range(2):
        pipeline.progress(batches)
    with pytest.raises(RuntimeError, match=r"has prefetched rows for other objects.*TrainPipelineSparseDist"):
        pipeline.progress(batches)


class Table(nn.Module):
    """As fbgemm's tables look from outside."""

    def __init__(self, prefetch_pipeline: Any, rows: Any) -> None:
        super().__init__()
        self.prefetch_pipeline = prefetch_pipeline
        self.register_buffer("lxu_cache_weights", torch.zeros(rows, 2))


@pytest.mark.parametrize(
    ("prefetch_pipeline", "rows", "refused"), [(False, 4, True), (False, 0, False), (True, 4, False)]
)
def test_cached_tables_without_prefetch_are_refused(lab: Any, prefetch_pipeline: Any, rows: Any, refused: Any) -> None:
    model = lab.sparse_model(FakeCached)
    model.inner["sparse"].lookups = [nn.ModuleList([Table(prefetch_pipeline, rows)])]  # in a list, as torchrec's
    refusal = pytest.raises(ValueError, match=r"Table of module 'inner.sparse'.*prefetch_pipeline=False")
    with refusal if refused else contextlib.nullcontext():
        prefetching(lab, model)
    TrainPipelineSparseDist(model, lab.optimizer(model), "cpu")
