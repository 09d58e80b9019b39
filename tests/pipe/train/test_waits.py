"""Mutation tests of the stages of train pipelines: without any one of their waits, a stage runs too early.

Each stage checks that the stage before it has run. Lanes are late: their jobs run when they are waited for.
"""

from __future__ import annotations

from typing import Any

import pytest

from pipe.train import InlineLane, Lanes, TrainPipelineBase, TrainPipelineSparseDist
from pipe.train.distribute import Distribution
from tests.pipe.train.conftest import PIPELINES, FakeCached, LateLane


def waits(kind: Any) -> Any:
    """Each stage, and the one that it waits for."""
    chain = [*kind._stages, "forward"]
    return list(zip(chain[1:], chain, strict=False))


def check_training(lab: Any, kind: Any, lanes: Any, without: Any = None, late: Any = None) -> None:
    def checking(stage: str, needed: str) -> Any:
        def work(self: Any, batch: Any) -> None:
            # A first batch that is not distributed ahead has no such ticket.
            assert needed not in batch.tickets or batch.tickets[needed].done, f"{stage} ran before {needed}"
            getattr(kind, f"_{stage}")(self, batch)

        return work

    def make(*arguments: Any, **options: Any) -> Any:
        checked = type("Checked", (kind,), {f"_{stage}": checking(stage, needed) for stage, needed in waits(kind)})
        pipeline = checked(*arguments, lanes=lanes, **options)
        if late is not None:
            pipeline._lane[late] = LateLane()
        if without == "forward":
            pipeline._arrived = lambda: pipeline._flight[0]
        elif without is not None:
            del pipeline._before[without]
        return pipeline

    pipeline = lab.check_training(make, lambda: lab.sparse_model(FakeCached), lambda: [lab.batches(6)], 4)
    if kind is not TrainPipelineBase:
        # A module whose distribution did not begin ahead runs its own forward: right, but without overlap.
        assert pipeline.statistics().undistributed == {}
        assert pipeline.detach().inner["sparse"].count("forward") == 1


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_pipeline_whose_lanes_are_as_late_as_they_may_be_is_still_a_plain_loop(lab: Any, kind: Any) -> None:
    check_training(lab, kind, Lanes(*(LateLane() for _ in range(4))))


@pytest.mark.parametrize(("kind", "stage", "needed"), [(kind, *wait) for kind in PIPELINES for wait in waits(kind)])
def test_without_this_wait_its_stage_runs_too_early(lab: Any, kind: Any, stage: Any, needed: Any) -> None:
    lanes = Lanes(*(InlineLane() for _ in range(4)))
    with pytest.raises(AssertionError, match=f"^{stage} ran before {needed}"):
        check_training(lab, kind, lanes, without=stage, late=needed)


def test_the_wait_inside_the_forward_earns_its_place(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab.sparse_model()
    pipeline = TrainPipelineSparseDist(model, lab.optimizer(model), "cpu")
    monkeypatch.setattr(Distribution, "_distributed", lambda self, request: request.awaitable)
    with pytest.raises(TypeError, match="SimpleNamespace"):
        lab.run(pipeline, iter(lab.batches(4)))
