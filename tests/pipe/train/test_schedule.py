"""The schedule is data: what runs when, without a batch, a loader or a device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipe.train import (
    InlineLane,
    PrefetchTrainPipelineSparseDist,
    Stage,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainSchedule,
    plan,
)


def stage(name: Any, ahead: Any = 0, after: Any = ()) -> Any:
    return Stage(name, InlineLane(), lambda pending: None, ahead, after)


def test_fill_steady_state_and_drain_of_the_sparse_pipeline(lab: Any) -> None:
    model = lab.model()
    stages = TrainPipelineSparseDist(model, lab.optimizer(model), "cpu").stages()
    assert plan(stages, 5).splitlines() == [
        "load.0 load.1 load.2 copy.0 copy.1 copy.2 distribute.0 distribute.1 "
        "exchange.0 forward.0 exchange.1 backward.0",
        "load.3 copy.3 distribute.2 forward.1 exchange.2 backward.1",
        "load.4 copy.4 distribute.3 forward.2 exchange.3 backward.2",
        "distribute.4 forward.3 exchange.4 backward.3",
        "forward.4 backward.4",
    ]


def test_the_prefetch_pipeline_sends_features_beside_the_forward_and_fetches_rows_beside_the_backward(lab: Any) -> None:
    model = lab.model()
    stages = PrefetchTrainPipelineSparseDist(model, lab.optimizer(model), "cpu").stages()
    assert plan(stages, 5).splitlines() == [
        "load.0 load.1 load.2 copy.0 copy.1 copy.2 distribute.0 exchange.0 distribute.1 exchange.1 prefetch.0 "
        "forward.0 prefetch.1 distribute.2 backward.0",
        "load.3 copy.3 exchange.2 forward.1 prefetch.2 distribute.3 backward.1",
        "load.4 copy.4 exchange.3 forward.2 prefetch.3 distribute.4 backward.2",
        "exchange.4 forward.3 prefetch.4 backward.3",
        "forward.4 backward.4",
    ]


def test_a_batch_may_be_copied_behind_the_forward_of_the_batch_before(lab: Any) -> None:
    model = lab.model()
    options = {"enqueue_batch_after_forward": True}
    base = TrainPipelineBase(model, lab.optimizer(model), "cpu", **options).stages()
    assert plan(base, 5).splitlines()[1] == "load.3 forward.1 copy.3 backward.1"
    sparse = TrainPipelineSparseDist(model, lab.optimizer(model), "cpu", **options).stages()
    assert plan(sparse, 5).splitlines()[1] == "load.3 distribute.2 forward.1 copy.3 exchange.2 backward.1"
    prefetching = PrefetchTrainPipelineSparseDist(model, lab.optimizer(model), "cpu", **options).stages()
    assert plan(prefetching, 5).splitlines()[1] == (
        "load.3 exchange.2 forward.1 copy.3 prefetch.2 distribute.3 backward.1"
    )


def test_while_nothing_may_run_ahead_a_tick_brings_one_batch_through(lab: Any) -> None:
    model = lab.model()
    schedule = TrainSchedule(TrainPipelineSparseDist(model, lab.optimizer(model), "cpu").stages())
    ticks = [" ".join(map(str, schedule.tick(i, lambda i=i: i >= 2))) for i in range(4)]
    assert ticks == [
        "load.0 copy.0 distribute.0 exchange.0 forward.0 backward.0",
        "load.1 copy.1 distribute.1 exchange.1 forward.1 backward.1",
        "load.2 load.3 load.4 copy.2 copy.3 copy.4 distribute.2 distribute.3 exchange.2 forward.2 exchange.3 "
        "backward.2",
        "load.5 copy.5 distribute.4 forward.3 exchange.4 backward.3",
    ]


def test_depth_zero_everywhere_is_a_plain_loop(lab: Any) -> None:
    model = lab.model()
    ahead = {"load": 0, "copy": 0, "distribute": 0}
    stages = TrainPipelineSparseDist(model, lab.optimizer(model), "cpu", ahead=ahead).stages()
    line = "load.{0} copy.{0} distribute.{0} exchange.{0} forward.{0} backward.{0}"
    assert plan(stages, 3).splitlines() == [line.format(i) for i in range(3)]


@given(st.data())
def test_every_stage_runs_once_per_batch_in_order_and_after_what_it_needs(data: Any) -> None:
    count = data.draw(st.integers(1, 5))
    names = [f"s{k}" for k in range(count)]
    stages = []
    for k, name in enumerate(names):
        after = tuple(data.draw(st.sets(st.sampled_from(names[:k])))) if k else ()
        stages.append(stage(name, data.draw(st.integers(0, 4)), after))
    stages = data.draw(st.permutations(stages))
    schedule = TrainSchedule(stages)
    done = []
    for i in range(6):
        done += [(action.stage.name, action.batch) for action in schedule.tick(i)]
        assert all((name, i) in done for name in names)
    assert len(done) == len(set(done))
    for k, (name, batch) in enumerate(done):
        assert batch == 0 or (name, batch - 1) in done[:k]
        assert all((needed, batch) in done[:k] for needed in next(s for s in stages if s.name == name).after)


def test_an_action_that_raised_is_yielded_again() -> None:
    schedule = TrainSchedule([stage("a"), stage("b", after=("a",))])
    tick = schedule.tick(0)
    assert [str(next(tick)), str(next(tick))] == ["a.0", "b.0"]
    tick.close()  # type: ignore[attr-defined]  # what happens to a generator whose loop is left by an exception
    assert [str(action) for action in schedule.tick(0)] == ["b.0"]


def test_stages_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        TrainSchedule([stage("a"), stage("a")])
