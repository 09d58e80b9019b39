"""What runs when: the order in which a call of ``progress`` runs the stages of the batches in flight."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipe.train import Lanes, PrefetchTrainPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from tests.pipe.train.conftest import PIPELINES

COUNT = 5


def calls_of(lab: Any, kind: Any, **options: Any) -> list[str]:
    """The stages that each call runs, on lanes that run them at once, for the batches that there are."""
    log: list[list[str]] = []
    numbers: dict[Any, int] = {}

    class Noting(kind):
        def _work(self, stage: Any, batch: Any) -> None:
            note(stage, batch)
            super()._work(stage, batch)

        def _forward(self, batch: Any) -> None:
            note("forward", batch)
            super()._forward(batch)

    def note(stage: str, batch: Any) -> None:
        number = numbers.setdefault(batch, len(numbers))
        if number < COUNT:
            log[-1].append(f"{stage}.{number}")

    model = lab.sparse_model()
    pipeline = Noting(model, lab.optimizer(model), "cpu", lanes=Lanes.serial(), **options)
    backward = pipeline._window.backward

    def noted(*arguments: Any) -> None:
        note("backward", pipeline._flight[0])
        backward(*arguments)

    pipeline._window.backward = noted
    batches = iter(lab.batches(COUNT))
    for _ in range(COUNT):
        log.append([])
        pipeline.progress(batches)
    return [" ".join(call) for call in log]


@pytest.mark.parametrize(
    ("kind", "fill", "steady", "behind"),
    [
        (
            TrainPipelineBase,
            "forward.0 backward.0",
            "load.3 copy.3 forward.1 backward.1",
            "load.3 forward.1 copy.3 backward.1",
        ),
        (
            TrainPipelineSparseDist,  # the first forward shows what to distribute
            "forward.0 distribute.1 exchange.1 backward.0",
            "load.3 copy.3 distribute.2 forward.1 exchange.2 backward.1",
            "load.3 distribute.2 forward.1 copy.3 exchange.2 backward.1",
        ),
        (
            PrefetchTrainPipelineSparseDist,  # exchanges beside the forward, fetches rows beside the backward
            "forward.0 distribute.1 exchange.1 prefetch.1 distribute.2 backward.0",
            "load.3 copy.3 exchange.2 forward.1 prefetch.2 distribute.3 backward.1",
            "load.3 exchange.2 forward.1 copy.3 prefetch.2 distribute.3 backward.1",
        ),
    ],
)
def test_fill_steady_state_drain_and_late_copies(lab: Any, kind: Any, fill: Any, steady: Any, behind: Any) -> None:
    def later(calls: int) -> str:
        """The same so many calls later, without what is read behind the end."""
        moved = re.sub(r"\d+", lambda found: str(int(found[0]) + calls), steady)
        return " ".join(event for event in moved.split() if int(event.split(".")[1]) < COUNT)

    filled = f"load.0 load.1 load.2 copy.0 copy.1 copy.2 {fill}"
    assert calls_of(lab, kind) == [filled, steady, later(1), later(2), later(3)]
    assert calls_of(lab, kind, enqueue_batch_after_forward=True)[1] == behind


@settings(max_examples=30)
@given(
    kind=st.sampled_from(PIPELINES),
    data=st.data(),
    behind=st.booleans(),
)
def test_stages_run_once_a_batch_in_order_after_what_they_need(lab: Any, kind: Any, data: Any, behind: Any) -> None:
    ahead = {name: data.draw(st.sampled_from([0, 1, 2, 4]), name) for name in kind.default_ahead}
    calls = calls_of(lab, kind, ahead=ahead, enqueue_batch_after_forward=behind)
    events = [event for call in calls for event in call.split()]
    chain = [*kind._stages, "forward", "backward"]
    for i, call in enumerate(calls):
        assert f"forward.{i}" in call
        assert f"backward.{i}" in call
        stages = [stage for stage in chain if i or stage in ("load", "copy", "forward", "backward")]
        assert [event.split(".")[0] for event in events if event.endswith(f".{i}")] == stages
    for stage in chain:
        order = [event for event in events if event.startswith(f"{stage}.")]
        assert order == sorted(order)
    if not any(ahead.values()):
        assert [call.split()[0] for call in calls] == [f"load.{i}" for i in range(COUNT)]
