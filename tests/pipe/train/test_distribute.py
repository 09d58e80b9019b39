"""Sparse input is distributed ahead where the forward shows how, and never changes what is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipe.train import Distributes, TrainPipelineSparseDist


def pipeline_of(lab: Any, model: Any, **options: Any) -> Any:
    return TrainPipelineSparseDist(model, lab.optimizer(model), "cpu", **options)


def same_as_plain(lab: Any, make_model: Any, count: Any = 6, **options: Any) -> Any:
    torch.manual_seed(0)
    reference = make_model()
    torch.manual_seed(0)
    model = make_model()
    torch.manual_seed(2)
    lab.plain_loop(reference, [lab.batches(count)])
    torch.manual_seed(2)
    pipeline = pipeline_of(lab, model, **options)
    lab.run(pipeline, iter(lab.batches(count)))
    lab.assert_same(model, reference)
    return pipeline, model


def test_the_next_batch_is_distributed_before_the_forward_and_exchanged_before_the_backward(lab: Any) -> None:
    model = lab.sparse_model()
    batches = lab.batches(5)
    index = {id(batch["x"]): k for k, batch in enumerate(batches)}
    lab.run(pipeline_of(lab, model), iter(batches))
    log = [f"{event}.{index[features]}" for event, features in model.inner["sparse"].log]
    assert log == [
        *["forward.0", "input_dist.0", "exchange.0", "compute.0"],  # the first forward is observed
        *["input_dist.1", "exchange.1"],  # between its forward and its backward: as early as can be known
        *["input_dist.2", "compute.1", "exchange.2"],
        *["input_dist.3", "compute.2", "exchange.3"],
        *["input_dist.4", "compute.3", "exchange.4"],
        "compute.4",
    ]


@pytest.mark.parametrize("distribute", [0, 1, 2, 3])
def test_each_batch_is_distributed_exactly_once_at_any_depth(lab: Any, distribute: Any) -> None:
    model = lab.sparse_model()
    ahead = {"load": 3, "copy": 3, "distribute": distribute}
    lab.run(pipeline_of(lab, model, ahead=ahead), iter(lab.batches(6)))
    events = [event for event, _ in model.inner["sparse"].log]
    assert events.count("input_dist") == events.count("exchange") == events.count("compute") == 6
    assert events.count("forward") == 1


class Outer(nn.Module):
    """A model around a distributing module, whose use of it the tests vary."""

    def __init__(self, lab: Any, use: Any) -> None:
        super().__init__()
        self.sparse = lab.FakeSparse()
        self.net = lab.Net(lambda batch: batch)
        self.use = use
        self.calls = 0

    def forward(self, batch: Any) -> Any:
        self.calls += 1
        return self.net((self.use(self, batch), batch["y"]))


def test_an_argument_that_is_no_part_of_the_batch_is_not_distributed_and_said_so(lab: Any) -> None:
    pipeline, model = same_as_plain(lab, lambda: Outer(lab, lambda self, batch: self.sparse(batch["x"] * 2)))
    assert pipeline.statistics().undistributed == {"sparse": "it was called with a Tensor that is no part of the batch"}
    assert [event for event, _ in model.sparse.log].count("forward") == 6


def test_a_call_that_differs_from_the_first_runs_the_modules_own_forward(lab: Any) -> None:
    def use(self: Any, batch: Any) -> Any:
        return self.sparse(batch["x"], flip=self.calls > 3)

    pipeline, _ = same_as_plain(lab, lambda: Outer(lab, use))
    assert "other objects" in pipeline.statistics().undistributed["sparse"]


def test_a_batch_without_the_part_that_the_first_one_had_is_distributed_by_the_forward(lab: Any) -> None:
    def use(self: Any, batch: Any) -> Any:
        return self.sparse(batch["again"]["x"] if "again" in batch else batch["x"])

    def batches() -> Any:
        batches = lab.batches(6)
        for k in (0, 1, 4):
            batches[k]["again"] = {"x": batches[k].pop("x")}
        return batches

    torch.manual_seed(0)
    reference = Outer(lab, use)
    torch.manual_seed(0)
    model = Outer(lab, use)
    torch.manual_seed(2)
    lab.plain_loop(reference, [batches()])
    torch.manual_seed(2)
    pipeline = pipeline_of(lab, model)
    lab.run(pipeline, iter(batches()))
    lab.assert_same(model, reference)
    assert "does not have the part" in pipeline.statistics().undistributed["sparse"]


@pytest.mark.parametrize("second", [{"flip": True}, {}], ids=["differently", "in_the_same_way"])
def test_a_module_called_twice_gets_the_distribution_of_each_call(lab: Any, second: Any) -> None:
    def use(self: Any, batch: Any) -> Any:
        return self.sparse(batch["x"]) + self.sparse(batch["x"], **second)

    pipeline, model = same_as_plain(lab, lambda: Outer(lab, use))
    assert pipeline.statistics().undistributed == {}
    assert [event for event, _ in model.sparse.log].count("forward") == 2


def test_a_recomputation_in_backward_runs_the_modules_own_forward(lab: Any) -> None:
    def use(self: Any, batch: Any) -> Any:
        return checkpoint(self.sparse, batch["x"], use_reentrant=False)

    pipeline, model = same_as_plain(lab, lambda: Outer(lab, use))
    assert pipeline.statistics().undistributed == {}
    assert [event for event, _ in model.sparse.log].count("forward") == 1 + 6


def test_a_module_that_the_first_forward_does_not_call_is_reported(lab: Any) -> None:
    pipeline, _ = same_as_plain(lab, lambda: Outer(lab, lambda self, batch: batch["x"]))
    assert pipeline.statistics().undistributed == {"sparse": "the first forward did not call it"}


def test_the_protocol_is_duck_typed_and_only_the_outermost_module_takes_part(lab: Any) -> None:
    class Whole(lab.FakeSparse):
        def __init__(self) -> None:
            super().__init__()
            self.part = lab.FakeSparse()

    assert isinstance(lab.FakeSparse(), Distributes)
    assert not isinstance(nn.Linear(1, 1), Distributes)

    def uses_none() -> Any:
        model = Outer(lab, lambda self, batch: batch["x"])
        model.sparse, model.other = Whole(), lab.FakeSparse()
        return model

    pipeline, _ = same_as_plain(lab, uses_none)
    assert pipeline.statistics().undistributed.keys() == {"sparse", "other"}  # not "sparse.part"


def test_a_forward_replaced_by_other_code_is_kept(lab: Any) -> None:
    model = lab.sparse_model()
    sparse = model.inner["sparse"]
    own = sparse.forward
    sparse.forward = lambda *args, **kwargs: own(*args, **kwargs)
    replaced = sparse.forward
    lab.run(pipeline_of(lab, model), iter(lab.batches(3)))
    assert vars(sparse)["forward"] is replaced
