"""A run that is interrupted and continued from its state is the run that was not interrupted."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipe.train import TrainPipelineBase, TrainPipelineSparseDist
from tests.pipe.train.conftest import Counting, numbers, pipeline_of


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@settings(max_examples=40)
@given(
    grad_accum=st.sampled_from([None, 1, 2, 3, 5]),
    count=st.integers(1, 9),
    stop=st.integers(0, 9),
    sparse=st.booleans(),
    ahead=st.integers(0, 4),
    fp16=st.booleans(),
)
def test_a_continued_run_equals_an_uninterrupted_one(
    lab: Any, grad_accum: Any, count: Any, stop: Any, sparse: Any, ahead: Any, fp16: Any
) -> None:
    make = TrainPipelineBase
    options = {"grad_accum": grad_accum, "ahead": {"load": ahead, "copy": ahead}}
    if sparse:
        make = partial(TrainPipelineSparseDist, amp_dtype=torch.float16, enable_amp=fp16)
    elif fp16:
        options["amp_dtype"] = torch.float16
    reference = lab.model()
    torch.manual_seed(2)
    pipeline = make(reference, lab.optimizer(reference), "cpu", **options)
    uninterrupted = lab.run(pipeline, iter(lab.batches(count))) + lab.run(pipeline, iter(lab.batches(3, seed=5)))

    model = lab.model()
    optimizer = lab.optimizer(model)
    torch.manual_seed(2)
    pipeline = make(model, optimizer, "cpu", **options)
    loader = iter(lab.batches(count))
    stop = min(stop, count)
    outputs = [pipeline.progress(loader) for _ in range(stop)]
    assert len(list(copy.copy(loader))) == count - stop - len(pipeline.state_dict()["in_flight"])
    saved = through_a_file([pipeline.state_dict(), model.state_dict(), optimizer.state_dict()])
    generator_state = torch.get_rng_state()

    model = lab.model(seed=7)
    optimizer = lab.optimizer(model)
    continued = make(model, optimizer, "cpu", **options)
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    continued.load_state_dict(saved[0])
    torch.set_rng_state(generator_state)
    outputs += lab.run(continued, loader)
    outputs += lab.run(continued, iter(lab.batches(3, seed=5)))
    assert len(outputs) == len(uninterrupted)
    lab.assert_same(model, reference)
    assert continued.statistics().batches == count + 3


def test_the_state_is_a_copy_that_training_does_not_change_and_may_be_loaded_after_a_reset(lab: Any) -> None:
    pipeline, batches = pipeline_of(TrainPipelineBase, Counting(), grad_accum=3), numbers(*range(9))
    pipeline.progress(batches)
    state = pipeline.state_dict()
    before = copy.deepcopy(state)
    pipeline.progress(batches)
    assert state == before
    assert (state["window"]["position"], len(state["in_flight"])) == (1, 2)
    pipeline.reset()
    pipeline.load_state_dict(state)
    assert lab.run(pipeline, numbers(7, 8)) == [1, 2, 7, 8]


def test_a_state_that_had_seen_the_end_reads_nothing_before_the_end_is_told(lab: Any) -> None:
    first, second = (pipeline_of(TrainPipelineBase, Counting()) for _ in range(2))
    batches = numbers(0, 1, 2)
    first.progress(batches)
    first.progress(batches)
    second.load_state_dict(first.state_dict())
    fresh = numbers(3, 4, 5)
    assert second.progress(fresh) == 2
    with pytest.raises(StopIteration):
        second.progress(fresh)
    assert lab.run(second, fresh) == [3, 4, 5]


def test_batches_of_a_state_stay_in_the_state_until_they_run_and_meanwhile_no_other_is_loaded(lab: Any) -> None:
    first, second = (
        pipeline_of(TrainPipelineBase, Counting(), ahead={"load": ahead, "copy": ahead}) for ahead in (4, 0)
    )
    batches = numbers(*range(8))
    first.progress(batches)
    second.load_state_dict(first.state_dict())
    for left in (4, 3, 2):
        assert len(second.state_dict()["in_flight"]) == left
        for pipeline in (first, second):
            with pytest.raises(ValueError, match="without batches in flight"):
                pipeline.load_state_dict(first.state_dict())
        second.progress(batches)
    assert lab.run(second, batches) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_accum": 4}, "with .*'grad_accum': 4.*got .*'grad_accum': 3"),
        ({"grad_accum": 3, "amp_dtype": torch.float16}, "'gradient scaling': True}, got .*'gradient scaling': False"),
    ],
)
def test_a_state_of_another_kind_of_pipeline_is_refused_and_changes_nothing(options: Any, message: Any) -> None:
    pipeline, model = pipeline_of(TrainPipelineBase, Counting(), grad_accum=3), Counting()
    other = pipeline_of(TrainPipelineBase, model, **options)
    pipeline.progress(numbers(*range(5)))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(pipeline.state_dict())
    assert model.weight.grad is None
    assert other.statistics().batches == 0
