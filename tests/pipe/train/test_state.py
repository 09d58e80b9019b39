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


def test_the_state_is_a_copy_that_training_does_not_change(lab: Any) -> None:
    model = lab.model()
    pipeline = TrainPipelineBase(model, lab.optimizer(model), "cpu", grad_accum=3)
    loader = iter(lab.batches(9))
    pipeline.progress(loader)
    state = pipeline.state_dict()
    before = copy.deepcopy(state["window"])
    pipeline.progress(loader)
    torch.testing.assert_close(state["window"], before)
    assert state["window"]["position"] == 1
    assert len(state["in_flight"]) == 2


def test_a_state_that_had_seen_the_end_reads_nothing_before_the_end_is_told(lab: Any) -> None:
    model = lab.model()
    first = TrainPipelineBase(model, lab.optimizer(model), "cpu")
    loader = iter(lab.batches(3))
    first.progress(loader)
    first.progress(loader)
    second = TrainPipelineBase(model, lab.optimizer(model), "cpu")
    second.load_state_dict(first.state_dict())
    fresh = iter(lab.batches(4))
    assert len(lab.run(second, fresh)) == 1
    assert len(list(fresh)) == 4
    assert len(lab.run(second, iter(lab.batches(2)))) == 2


def test_batches_of_a_state_that_are_not_in_flight_yet_stay_in_the_state(lab: Any) -> None:
    def pipeline_of(ahead: int) -> Any:
        model = lab.model()
        return TrainPipelineBase(model, lab.optimizer(model), "cpu", ahead={"load": ahead, "copy": ahead})

    loader = iter(lab.batches(8))
    first, second = pipeline_of(4), pipeline_of(0)
    first.progress(loader)
    second.load_state_dict(first.state_dict())
    for left in (4, 3, 2):
        assert len(second.state_dict()["in_flight"]) == left
        with pytest.raises(ValueError, match="without batches in flight"):
            second.load_state_dict(first.state_dict())
        second.progress(loader)
    assert len(lab.run(second, loader)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_accum": 4}, "with .*'grad_accum': 4.*got .*'grad_accum': 3"),
        ({"grad_accum": 3, "amp_dtype": torch.float16}, "'gradient scaling': True}, got .*'gradient scaling': False"),
    ],
)
def test_a_state_of_another_kind_of_pipeline_is_refused_and_changes_nothing(
    lab: Any, options: Any, message: Any
) -> None:
    model = lab.model()
    pipeline = TrainPipelineBase(model, lab.optimizer(model), "cpu", grad_accum=3)
    pipeline.progress(iter(lab.batches(5)))
    other_model = lab.model()
    other = TrainPipelineBase(other_model, lab.optimizer(other_model), "cpu", **options)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(pipeline.state_dict())
    assert all(parameter.grad is None for parameter in other_model.parameters())
    assert other.statistics().batches == 0


def test_a_pipeline_with_batches_in_flight_takes_no_state(lab: Any) -> None:
    model = lab.model()
    pipeline = TrainPipelineBase(model, lab.optimizer(model), "cpu")
    loader = iter(lab.batches(5))
    pipeline.progress(loader)
    with pytest.raises(ValueError, match="without batches in flight"):
        pipeline.load_state_dict(pipeline.state_dict())
    assert len(lab.run(pipeline, loader)) == 4
