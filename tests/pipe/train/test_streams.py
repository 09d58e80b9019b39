"""Streams and events, on a device that runs as late as it may: a stage has run when another one that needs it runs."""

from __future__ import annotations

from typing import Any

import pytest

from pipe.train import InlineLane, Lanes, ThreadLane
from tests.late_cuda import LateCuda, LateStream
from tests.pipe.train.conftest import PIPELINES, FakeCached


@pytest.mark.parametrize("first", ["compute", "lanes"])
@pytest.mark.parametrize("kind", PIPELINES)
def test_every_stage_is_issued_on_a_stream_that_waits_for_the_stages_before_and_for_no_compute(
    lab: Any, kind: Any, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, numbers = LateCuda(monkeypatch), dict[Any, int]()
    ran: list[tuple[str, int]] = []

    def noting(name: str) -> Any:
        def work(self: Any, batch: Any) -> None:
            stage = name, numbers.setdefault(batch, len(numbers))
            cuda.launch(lambda: ran.append(stage))
            getattr(kind, f"_{name}")(self, batch)

        return work

    chain = [*kind._stages[1:], "forward"]
    observed = type("Observed", (kind,), {f"_{name}": noting(name) for name in chain})
    copy, distribute, prefetch = (LateStream() for _ in range(3))
    lanes = Lanes(ThreadLane("load"), ThreadLane("copy", copy), InlineLane(distribute), InlineLane(prefetch))
    model = lab.sparse_model(FakeCached)
    pipeline = observed(model, lab.optimizer(model), "cpu", lanes=lanes)
    assert len(lab.run(pipeline, iter(lab.batches(6)))) == 6
    if first == "lanes":
        for stream in (prefetch, distribute, copy):
            stream.synchronize()
        assert not [stage for stage in ran if stage[0] == "forward"]
    cuda.synchronize()
    # The first batch is not distributed ahead.
    expected = [[name for name in chain if i or name in ("copy", "forward")] for i in range(6)]
    assert [[name for name, number in ran if number == i] for i in range(6)] == expected
    assert [number for name, number in ran if name == "copy"] == [*range(6)]
