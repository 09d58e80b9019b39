"""What torchrec's pipelines have beside ``progress``: arguments, ``attach``, ``detach``, ``reset``."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch

from pipe.train import EvalPipelineSparseDist, InlineLane, Lanes, TrainPipelineBase, TrainPipelineSparseDist
from tests.pipe.train.conftest import BOTH, PIPELINES, Counting, FakeSparse, LateLane, numbers, pipeline_of

SPARSE = pytest.mark.parametrize("make", PIPELINES[1:])
SPEED = {"pipeline_postproc", "enable_inplace_copy_batch", "free_features_storage_early", "clear_data_dist_inputs"}


# --- arguments --------------------------------------------------------------------------------------------------------


def test_the_order_of_positional_arguments_stays_and_later_ones_are_taken_by_keyword() -> None:
    parameters = inspect.signature(TrainPipelineSparseDist).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["model", "optimizer", "device", "enable_amp", "enable_grad_scaling", "grad_accum"]
    parameters = {**inspect.signature(TrainPipelineBase).parameters, **parameters}  # it takes those of the base as well
    later = {"execute_all_batches", "apply_jit", "context_type", "custom_model_fwd", "enqueue_batch_after_forward"}
    assert {*later, *SPEED, "dmp_collection_sync_interval_batches"} <= {
        name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY
    }


@SPARSE
def test_what_torchrec_is_asked_for_speed_changes_nothing(lab: Any, make: Any) -> None:
    lab.check_training(partial(make, **dict.fromkeys(SPEED, True)), lab.sparse_model, lambda: [lab.batches(5)])


@BOTH
def test_a_forward_of_the_callers_own_takes_the_models_place(lab: Any, make: Any) -> None:
    reference, model = lab.sparse_model(), lab.sparse_model()
    batches = [(batch, 3.0) for batch in lab.batches(6)]

    def weighted(model: Any, pair: Any) -> Any:
        losses, output = model(pair[0])
        return losses * pair[1], output

    torch.manual_seed(2)
    lab.plain_loop(partial(weighted, reference), [batches], optimizer=lab.optimizer(reference))
    torch.manual_seed(2)
    pipeline = make(model, lab.optimizer(model), "cpu", custom_model_fwd=partial(weighted, model))
    lab.run(pipeline, iter(batches))
    lab.assert_same(model, reference)
    if make is TrainPipelineSparseDist:
        assert pipeline.statistics().undistributed == {}
        assert model.inner["sparse"].count("forward") == 1


@BOTH
def test_without_execute_all_batches_those_in_flight_wait_for_the_next_iterator(lab: Any, make: Any) -> None:
    def failing() -> Any:
        yield from numbers(1, 2)
        raise OSError("disk")  # heard in its turn

    pipeline = pipeline_of(make, Counting(), execute_all_batches=False, grad_accum=2)
    first = numbers(1, 2, 3, 4, 5)
    assert lab.run(pipeline, first) == [1, 2, 3]
    assert lab.run(pipeline, first) == []
    assert pipeline.statistics().steps == 1, "the window of the third batch waits for the fourth"
    assert lab.run(pipeline, numbers(6, 7, 8)) == [4, 5, 6]
    pipeline.reset()
    assert lab.run(pipeline, numbers(9, 10, 11)) == [9]
    assert lab.run(pipeline, numbers()) == []
    assert lab.run(pipeline, numbers(12, 13)) == [10, 11]
    pipeline.reset()
    assert lab.run(pipeline, numbers()) == []
    batches = failing()
    assert [pipeline.progress(batches) for _ in range(2)] == [1, 2]
    with pytest.raises(OSError, match="disk"):
        pipeline.progress(batches)
    assert lab.run(pipeline, numbers(3, 4, 5)) == [3]


@BOTH
def test_without_execute_all_batches_and_with_nothing_ahead_every_batch_runs(lab: Any, make: Any) -> None:
    model = Counting()
    ahead = dict.fromkeys(make.default_ahead, 0)
    pipeline = pipeline_of(make, model, execute_all_batches=False, ahead=ahead, grad_accum=2)
    assert lab.run(pipeline, numbers(1, 2, 3)) == [1, 2, 3]
    assert pipeline.statistics().steps == 2
    assert model.weight.item() == -(10 + 100) / 2 - 1000


@pytest.mark.parametrize(("interval", "size", "expected"), [(1, 1, 5), (2, 1, 3), (1, 2, 3), (None, 1, 0)])
def test_replicated_tables_are_averaged_at_their_interval(lab: Any, interval: Any, size: Any, expected: Any) -> None:
    log = []

    class DMPCollection(Counting):
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
        assert log[::2] == [("sync", 10.0**k) for k in range(1, 6)]


# --- reset ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*PIPELINES, EvalPipelineSparseDist])
@pytest.mark.parametrize("calls", [0, 1, 4, 5])
def test_reset_drops_batches_in_flight_and_continues_with_any_iterator(lab: Any, make: Any, calls: Any) -> None:
    model = Counting()
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
    model, batches = Counting(), numbers(*range(1, 10))
    pipeline = pipeline_of(make, model, grad_accum=3)
    for _ in range(5):
        pipeline.progress(batches)
    pipeline.reset()
    assert model.weight.item() == -1110 / 3
    assert lab.run(pipeline, numbers(3, 6)) == [3, 6]
    assert model.weight.item() == pytest.approx(-1110 / 3 - 1001000 / 2)


@BOTH
def test_a_reset_waits_for_reads_and_copies_that_are_under_way(lab: Any, make: Any) -> None:
    lanes = Lanes(LateLane(), late := LateLane(), InlineLane())
    pipeline, batches = pipeline_of(make, Counting(), lanes=lanes), numbers(*range(1, 9))
    assert pipeline.progress(batches) == 1
    pipeline.reset()
    assert not late.held
    assert int(next(batches)) == 4, "the iterator is the caller's again"
    assert lab.run(pipeline, batches) == [5, 6, 7, 8]


# --- attach and detach ------------------------------------------------------------------------------------------------


@SPARSE
def test_a_model_that_was_detached_may_be_attached_again_or_forgotten_about(lab: Any, make: Any) -> None:
    def run(pipeline: Any, batches: Any) -> Any:
        outputs, model = [], pipeline.detach()
        for k in range(4):
            outputs.append(pipeline.progress(batches))
            assert pipeline.detach() is model
            if k % 2:
                pipeline.attach()
        pipeline.attach(model)
        return outputs + lab.run(pipeline, batches)

    pipeline = lab.check_training(make, lab.sparse_model, lambda: [lab.batches(8)], run=run)
    assert pipeline.statistics().undistributed == {}
    assert pipeline.detach().inner["sparse"].count("forward") == 1


@SPARSE
def test_another_model_runs_the_batches_in_flight_and_all_after_them(lab: Any, make: Any) -> None:
    old, new = lab.sparse_model(), lab.sparse_model(seed=3)
    plain_old, plain_new = copy.deepcopy(old), copy.deepcopy(new)
    batches = lab.batches(8)
    torch.manual_seed(2)
    expected = lab.plain_loop(plain_old, [batches[:3]]) + lab.plain_loop(plain_new, [batches[3:]])
    torch.manual_seed(2)
    pipeline = make(old, torch.optim.SGD([*old.parameters(), *new.parameters()], lr=0.05, momentum=0.9), "cpu")
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
    assert new.inner["sparse"].count("forward") == 1


def test_a_module_inside_the_model_may_be_replaced_between_detach_and_attach(lab: Any) -> None:
    replacement = FakeSparse()

    def run(pipeline: Any, batches: Any) -> Any:
        outputs, model = [pipeline.progress(batches) for _ in range(3)], pipeline.detach()
        replacement.scale = model.inner["sparse"].scale
        model.inner["sparse"] = replacement
        pipeline.attach(model)
        return outputs + lab.run(pipeline, batches)

    pipeline = lab.check_training(TrainPipelineSparseDist, lab.sparse_model, lambda: [lab.batches(8)], run=run)
    assert pipeline.statistics().undistributed == {}
    assert replacement.count("forward") == 1


def test_a_model_that_cannot_be_attached_leaves_the_one_before(lab: Any) -> None:
    model, other = Counting(), Counting()
    pipeline = pipeline_of(TrainPipelineSparseDist, model, grad_accum=2)
    other.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="register_post_accumulate_grad_hook"):
        pipeline.attach(other)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module or None, got int"):
        pipeline.attach(3)
    assert pipeline.detach() is model
    assert lab.run(pipeline, numbers(1, 2)) == [1, 2]
    assert other.ran == []
