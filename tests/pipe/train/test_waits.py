"""Mutation tests of the stages of train pipelines: without any one of their waits, a stage runs too early.

Each stage checks that the stages it needs have run. Lanes are late: their jobs run when they are waited for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipe.train import InlineLane, Lanes, PrefetchTrainPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from pipe.train.distribute import Distribution

WAITS = {
    TrainPipelineBase: [("copy", "load"), ("forward", "copy")],
    TrainPipelineSparseDist: [
        ("copy", "load"),
        ("distribute", "copy"),
        ("exchange", "distribute"),
        ("forward", "exchange"),
    ],
    PrefetchTrainPipelineSparseDist: [
        ("copy", "load"),
        ("distribute", "copy"),
        ("exchange", "distribute"),
        ("prefetch", "exchange"),
        ("forward", "prefetch"),
    ],
}


def checked(kind: Any) -> Any:
    """The pipeline, each stage of which says so if it runs on a batch before the stage that it needs."""

    def checking(stage: str, needed: str) -> Any:
        def work(self: Any, batch: Any) -> None:
            # A first batch that is not distributed ahead has no such ticket.
            assert needed not in batch.tickets or batch.tickets[needed].done, f"{stage} ran before {needed}"
            getattr(kind, f"_{stage}")(self, batch)

        return work

    return type("Checked", (kind,), {f"_{stage}": checking(stage, needed) for stage, needed in WAITS[kind]})


def check_training(lab: Any, kind: Any, lanes: Any, without: Any = None, late: Any = None) -> None:
    prefetches = "prefetch" in kind.default_ahead
    reference = lab.sparse_model()
    model = lab.cached_model() if prefetches else lab.sparse_model()
    torch.manual_seed(2)
    expected = lab.plain_loop(reference, [lab.batches(6)], 4)
    torch.manual_seed(2)
    pipeline = checked(kind)(model, lab.optimizer(model), "cpu", grad_accum=4, lanes=lanes)
    if late is not None:
        pipeline._lane[late] = lab.LateLane()
    if without == "forward":
        pipeline._arrived = lambda: pipeline._flight[0]
    elif without is not None:
        del pipeline._before[without]
    outputs = lab.run(pipeline, iter(lab.batches(6)))
    assert len(outputs) == len(expected)
    lab.assert_same(model, reference)
    if kind.default_ahead.get("distribute"):
        # A module whose distribution did not begin ahead runs its own forward: right, but without overlap.
        assert pipeline.statistics().undistributed == {}
        events = [event for event, _ in model.inner["sparse"].log]
        assert events.count("forward") == 1
        assert events.count("prefetch") == (5 if prefetches else 0)


@pytest.mark.parametrize("kind", list(WAITS))
def test_a_pipeline_whose_lanes_are_as_late_as_they_may_be_is_still_a_plain_loop(lab: Any, kind: Any) -> None:
    check_training(lab, kind, Lanes(*(lab.LateLane() for _ in range(4))))


@pytest.mark.parametrize(
    ("kind", "stage", "needed"), [(kind, *wait) for kind, waits in WAITS.items() for wait in waits]
)
def test_without_this_wait_its_stage_runs_too_early(lab: Any, kind: Any, stage: Any, needed: Any) -> None:
    lanes = Lanes(*(InlineLane() for _ in range(4)))
    with pytest.raises(AssertionError, match=f"^{stage} ran before {needed}"):
        check_training(lab, kind, lanes, without=stage, late=needed)


def test_these_are_all_the_waits_there_are(lab: Any) -> None:
    model = lab.model()
    for kind, waits in WAITS.items():
        pipeline = kind(model, lab.optimizer(model), "cpu")
        assert [*pipeline._before.items(), ("forward", pipeline._stages[-1])] == waits


def test_the_wait_inside_the_forward_earns_its_place(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab.sparse_model()
    pipeline = TrainPipelineSparseDist(model, lab.optimizer(model), "cpu")
    monkeypatch.setattr(Distribution, "_distributed", lambda self, request: request.awaitable)
    with pytest.raises(TypeError, match="FakeAwaitable"):
        lab.run(pipeline, iter(lab.batches(4)))
