"""What torchrec's pipelines have beside ``progress``: arguments, ``attach``, ``detach``, ``reset``."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pipe.train import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

BOTH = pytest.mark.parametrize("make", [TrainPipelineBase, TrainPipelineSparseDist])
SPARSE = pytest.mark.parametrize("make", [TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist])


class Summing(nn.Module):
    """Adds the numbers of its batches up in a buffer and in its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.ran: list[int] = []

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.ran.append(int(batch))
        return self.weight * float(batch), int(batch)


def pipeline_of(make: Any, model: Any, **options: Any) -> Any:
    return make(model, torch.optim.SGD(model.parameters(), 1.0), "cpu", **options)


def numbers(*values: Any) -> Any:
    return iter([torch.tensor(k) for k in values])


# --- arguments --------------------------------------------------------------------------------------------------------


def test_the_order_of_positional_arguments_stays_and_later_ones_are_taken_by_keyword() -> None:
    parameters = inspect.signature(TrainPipelineSparseDist).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["model", "optimizer", "device", "enable_amp", "enable_grad_scaling", "grad_accum"]
    parameters = {**inspect.signature(TrainPipelineBase).parameters, **parameters}  # it takes those of the base as well
    assert {
        "execute_all_batches",
        "apply_jit",
        "context_type",
        "pipeline_postproc",
        "custom_model_fwd",
        "dmp_collection_sync_interval_batches",
        "enqueue_batch_after_forward",
        "enable_inplace_copy_batch",
        "free_features_storage_early",
        "clear_data_dist_inputs",
    } <= {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


@SPARSE
def test_what_torchrec_is_asked_for_speed_changes_nothing(lab: Any, make: Any) -> None:
    reference, model = lab.sparse_model(), lab.sparse_model()
    torch.manual_seed(2)
    lab.plain_loop(reference, [lab.batches(5)])
    torch.manual_seed(2)
    wishes = {"pipeline_postproc", "enable_inplace_copy_batch", "free_features_storage_early", "clear_data_dist_inputs"}
    pipeline = make(model, lab.optimizer(model), "cpu", **dict.fromkeys(wishes, True))
    lab.run(pipeline, iter(lab.batches(5)))
    lab.assert_same(model, reference)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"apply_jit": True}, ValueError, "apply_jit=False"),
        ({"context_type": dict}, ValueError, "context_type=None"),
        ({"custom_model_fwd": 3}, TypeError, "custom_model_fwd"),
        ({"dmp_collection_sync_interval_batches": 0}, ValueError, "dmp_collection_sync_interval_batches >= 1"),
        ({"dmp_collection_sync_interval_batches": 1.5}, TypeError, "dmp_collection_sync_interval_batches"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
    ],
)
def test_arguments_that_cannot_be_met_are_refused_by_name(options: Any, error: Any, message: Any) -> None:
    with pytest.raises(error, match=message):
        pipeline_of(TrainPipelineSparseDist, Summing(), **options)


@BOTH
def test_a_forward_of_the_callers_own_takes_the_models_place(lab: Any, make: Any) -> None:
    reference, model = lab.sparse_model(), lab.sparse_model()
    batches = [(batch, 3.0) for batch in lab.batches(6)]

    def weighted(pair: Any) -> Any:
        (losses, output), factor = model(pair[0]), pair[1]
        return losses * factor, output

    optimizer = lab.optimizer(reference)
    torch.manual_seed(2)
    for batch, factor in batches:
        optimizer.zero_grad()
        (reference(batch)[0].sum() * factor).backward()
        optimizer.step()
    torch.manual_seed(2)
    pipeline = make(model, lab.optimizer(model), "cpu", custom_model_fwd=weighted)
    lab.run(pipeline, iter(batches))
    lab.assert_same(model, reference)
    if make is TrainPipelineSparseDist:
        assert pipeline.statistics().undistributed == {}
        assert [event for event, _ in model.inner["sparse"].log].count("forward") == 1


@BOTH
def test_without_execute_all_batches_those_in_flight_wait_for_the_next_iterator(lab: Any, make: Any) -> None:
    model = Summing()
    pipeline = pipeline_of(make, model, execute_all_batches=False)
    first = numbers(1, 2, 3, 4, 5)
    assert lab.run(pipeline, first) == [1, 2, 3]
    assert lab.run(pipeline, first) == []
    assert lab.run(pipeline, numbers(6, 7, 8)) == [4, 5, 6]
    pipeline.reset()
    assert lab.run(pipeline, numbers(9, 10, 11)) == [9]
    assert lab.run(pipeline, numbers()) == []
    assert lab.run(pipeline, numbers(12, 13)) == [10, 11]
    pipeline.reset()
    assert lab.run(pipeline, numbers()) == []


@BOTH
def test_without_execute_all_batches_a_loaders_failure_is_heard_in_its_turn(lab: Any, make: Any) -> None:
    def failing() -> Any:
        yield from numbers(1, 2)
        raise OSError("disk")

    pipeline = pipeline_of(make, Summing(), execute_all_batches=False)
    batches = failing()
    assert [pipeline.progress(batches) for _ in range(2)] == [1, 2]
    with pytest.raises(OSError, match="disk"):
        pipeline.progress(batches)
    assert lab.run(pipeline, numbers(3, 4, 5)) == [3]


@BOTH
def test_without_execute_all_batches_and_with_nothing_ahead_every_batch_runs(lab: Any, make: Any) -> None:
    model = Summing()
    ahead = dict.fromkeys(make.default_ahead, 0)
    pipeline = pipeline_of(make, model, execute_all_batches=False, ahead=ahead, grad_accum=2)
    assert lab.run(pipeline, numbers(1, 2, 3)) == [1, 2, 3]
    assert pipeline.statistics().steps == 2
    assert model.weight.item() == -4.5


@pytest.mark.parametrize(("interval", "size", "expected"), [(1, 1, 5), (2, 1, 3), (1, 2, 3), (None, 1, 0)])
def test_replicated_tables_are_averaged_before_the_steps_whose_turn_it_is(
    lab: Any, interval: Any, size: Any, expected: Any
) -> None:
    log = []

    class DMPCollection(Summing):
        def sync(self) -> None:
            log.append(("sync", self.weight.grad.item()))

    model = DMPCollection()
    pipeline = pipeline_of(
        TrainPipelineSparseDist, model, dmp_collection_sync_interval_batches=interval, grad_accum=size
    )
    pipeline._window.optimizers[0].register_step_pre_hook(lambda *_: log.append("step"))
    lab.run(pipeline, numbers(1, 2, 3, 4, 5))
    assert len([event for event in log if event != "step"]) == expected
    assert all(log[k + 1] == "step" for k, event in enumerate(log) if event != "step")
    if expected == 5:
        assert log[::2] == [("sync", float(k)) for k in range(1, 6)]


# --- reset ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist, EvalPipelineSparseDist]
)
@pytest.mark.parametrize("calls", [0, 1, 4, 5])
def test_reset_drops_batches_in_flight_and_continues_with_any_iterator(lab: Any, make: Any, calls: Any) -> None:
    model = Summing()
    pipeline = pipeline_of(make, model)
    batches = numbers(*range(1, 9))
    for k in range(calls):
        assert pipeline.progress(batches) == k + 1
    pipeline.reset()
    read = min(calls + 2, 8) if calls else 0
    assert lab.run(pipeline, batches) == list(range(read + 1, 9))
    pipeline.progress(numbers(20, 21, 22, 23))
    pipeline.reset()
    pipeline.reset()
    assert lab.run(pipeline, numbers(30, 31)) == [30, 31]


@BOTH
def test_a_reset_drops_the_open_window_and_keeps_the_parameters(lab: Any, make: Any) -> None:
    model = Summing()
    pipeline = pipeline_of(make, model, grad_accum=3)
    batches = numbers(*range(1, 10))
    for _ in range(5):
        pipeline.progress(batches)
    assert model.weight.item() == -2
    pipeline.reset()
    assert model.weight.item() == -2
    assert lab.run(pipeline, numbers(3, 6)) == [3, 6]
    assert model.weight.item() == -2 - 4.5


@BOTH
def test_a_reset_waits_for_reads_and_copies_that_are_under_way(lab: Any, make: Any) -> None:
    class Late(make):
        def stages(self) -> Any:
            return [replace(s, lane=lab.LateLane()) if s.name in ("load", "copy") else s for s in super().stages()]

    model = Summing()
    pipeline, batches = pipeline_of(Late, model), numbers(*range(1, 9))
    assert pipeline.progress(batches) == 1
    pipeline.reset()
    assert int(next(batches)) == 4, "the iterator is the caller's again"
    assert lab.run(pipeline, batches) == [5, 6, 7, 8]


def test_a_state_may_be_loaded_after_a_reset(lab: Any) -> None:
    model = lab.model()
    pipeline = TrainPipelineBase(model, lab.optimizer(model), "cpu", grad_accum=3)
    batches = iter(lab.batches(7))
    pipeline.progress(batches)
    state = pipeline.state_dict()
    pipeline.progress(batches)
    pipeline.reset()
    pipeline.load_state_dict(state)
    assert len(lab.run(pipeline, iter(lab.batches(2)))) == 4


# --- attach and detach ------------------------------------------------------------------------------------------------


@SPARSE
def test_a_model_that_was_detached_may_be_attached_again_or_forgotten_about(lab: Any, make: Any) -> None:
    reference, model = lab.sparse_model(), lab.sparse_model()
    torch.manual_seed(2)
    lab.plain_loop(reference, [lab.batches(8)])
    torch.manual_seed(2)
    pipeline, batches = make(model, lab.optimizer(model), "cpu"), iter(lab.batches(8))
    for k in range(4):
        pipeline.progress(batches)
        assert pipeline.detach() is model
        if k % 2:
            pipeline.attach()
    pipeline.attach(model)
    lab.run(pipeline, batches)
    lab.assert_same(model, reference)
    assert pipeline.statistics().undistributed == {}
    assert [event for event, _ in model.inner["sparse"].log].count("forward") == 1


@SPARSE
def test_another_model_runs_the_batches_in_flight_and_all_after_them(lab: Any, make: Any) -> None:
    old, new = lab.sparse_model(), lab.sparse_model(seed=3)
    plain_old, plain_new = copy.deepcopy(old), copy.deepcopy(new)
    batches = lab.batches(8)
    parameters = [*old.parameters(), *new.parameters()]
    torch.manual_seed(2)
    expected = lab.plain_loop(plain_old, [batches[:3]])
    expected += lab.plain_loop(plain_new, [batches[3:]])
    torch.manual_seed(2)
    pipeline = make(old, torch.optim.SGD(parameters, lr=0.05, momentum=0.9), "cpu")
    iterator = iter(batches)
    outputs = [pipeline.progress(iterator) for _ in range(3)]
    pipeline.detach()
    pipeline.attach(new)
    outputs += lab.run(pipeline, iterator)
    torch.testing.assert_close(outputs, expected)
    lab.assert_same(new, plain_new)
    lab.assert_same(old, plain_old)
    assert pipeline.detach() is new
    assert pipeline.statistics().undistributed == {}
    # Its first forward shows what to distribute.
    assert [event for event, _ in new.inner["sparse"].log].count("forward") == 1


def test_a_module_inside_the_model_may_be_replaced_between_detach_and_attach(lab: Any) -> None:
    reference, model = lab.sparse_model(), lab.sparse_model()
    replacement = lab.FakeSparse()
    replacement.scale = model.inner["sparse"].scale
    torch.manual_seed(2)
    lab.plain_loop(reference, [lab.batches(8)])
    torch.manual_seed(2)
    pipeline, batches = TrainPipelineSparseDist(model, lab.optimizer(model), "cpu"), iter(lab.batches(8))
    for _ in range(3):
        pipeline.progress(batches)
    pipeline.detach().inner["sparse"] = replacement
    pipeline.attach(model)
    lab.run(pipeline, batches)
    lab.assert_same(model, reference)
    assert pipeline.statistics().undistributed == {}
    assert [event for event, _ in replacement.log].count("forward") == 1


def test_a_model_that_cannot_be_attached_leaves_the_one_before(lab: Any) -> None:
    model, other = Summing(), Summing()
    pipeline = pipeline_of(TrainPipelineSparseDist, model, grad_accum=2)
    other.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="register_post_accumulate_grad_hook"):
        pipeline.attach(other)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module or None, got int"):
        pipeline.attach(3)
    assert pipeline.detach() is model
    assert lab.run(pipeline, numbers(1, 2)) == [1, 2]
    assert other.ran == []
