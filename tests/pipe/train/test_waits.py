"""Mutation tests of the stages of train pipelines: without any one of their waits, a stage runs too early.

Each stage has a late lane, whose jobs run when they are waited for, and checks that the stages it needs have run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipe.train import PrefetchTrainPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from pipe.train.distribute import Distribution

KINDS = [TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist]

WAITS = [
    (TrainPipelineBase, "copy", "load"),
    (TrainPipelineBase, "forward", "copy"),
    (TrainPipelineBase, "backward", "forward"),
    (TrainPipelineSparseDist, "copy", "load"),
    (TrainPipelineSparseDist, "distribute", "copy"),
    (TrainPipelineSparseDist, "exchange", "distribute"),
    (TrainPipelineSparseDist, "forward", "exchange"),
    (TrainPipelineSparseDist, "backward", "forward"),
    (PrefetchTrainPipelineSparseDist, "copy", "load"),
    (PrefetchTrainPipelineSparseDist, "distribute", "copy"),
    (PrefetchTrainPipelineSparseDist, "exchange", "distribute"),
    (PrefetchTrainPipelineSparseDist, "prefetch", "exchange"),
    (PrefetchTrainPipelineSparseDist, "forward", "prefetch"),
    (PrefetchTrainPipelineSparseDist, "backward", "forward"),
]


def checked(stage: Any) -> Any:
    """The stage, which says so if it runs on a batch before the stages that it needs."""

    def work(pending: Any) -> None:
        for name in stage.after:
            assert pending.tickets[name].done, f"{stage.name} ran before {name}"
        stage.work(pending)

    return work


def late(lab: Any, kind: Any, stage_name: Any = None, needed: Any = None) -> Any:
    """The pipeline with a late lane for each stage, and one wait taken out of its stages."""

    class Late(kind):
        def stages(self) -> Any:
            stages = [replace(stage, lane=lab.LateLane(), work=checked(stage)) for stage in super().stages()]
            return [
                replace(stage, after=tuple(name for name in stage.after if name != needed))
                if stage.name == stage_name
                else stage
                for stage in stages
            ]

    return Late


def check_training(lab: Any, kind: Any) -> None:
    prefetches = "prefetch" in kind.default_ahead
    reference = lab.sparse_model()
    model = lab.cached_model() if prefetches else lab.sparse_model()
    torch.manual_seed(2)
    expected = lab.plain_loop(reference, [lab.batches(6)], 4)
    torch.manual_seed(2)
    pipeline = kind(model, lab.optimizer(model), "cpu", grad_accum=4)
    outputs = lab.run(pipeline, iter(lab.batches(6)))
    assert len(outputs) == len(expected)
    lab.assert_same(model, reference)
    if kind.default_ahead.get("distribute"):
        # A module whose distribution did not begin ahead runs its own forward: right, but without overlap.
        assert pipeline.statistics().undistributed == {}
        events = [event for event, _ in model.inner["sparse"].log]
        assert events.count("forward") == 1
        assert events.count("prefetch") == (5 if prefetches else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_whose_lanes_are_as_late_as_they_may_be_is_still_a_plain_loop(lab: Any, kind: Any) -> None:
    check_training(lab, late(lab, kind))


@pytest.mark.parametrize(("kind", "stage_name", "needed"), WAITS)
def test_without_this_wait_its_stage_runs_too_early(lab: Any, kind: Any, stage_name: Any, needed: Any) -> None:
    with pytest.raises(AssertionError, match=f"^{stage_name} ran before {needed}"):
        check_training(lab, late(lab, kind, stage_name, needed))


def test_these_are_all_the_waits_there_are(lab: Any) -> None:
    model = lab.model()
    for kind in KINDS:
        stages = kind(model, lab.optimizer(model), "cpu").stages()
        waits = {(stage.name, needed) for stage in stages for needed in stage.after}
        assert waits == {(stage, needed) for k, stage, needed in WAITS if k is kind}


def test_the_wait_inside_the_forward_earns_its_place(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab.sparse_model()
    pipeline = TrainPipelineSparseDist(model, lab.optimizer(model), "cpu")
    monkeypatch.setattr(Distribution, "_distributed", lambda self, request: request.awaitable)
    with pytest.raises(TypeError, match="FakeAwaitable"):
        lab.run(pipeline, iter(lab.batches(4)))
