"""The benchmark ``gpu`` without one: what ``--dry-run`` does; and what a trace of a step tells."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.gaps import WAIT, gaps_of
from tests.benchmarks.here import outcomes_of, run_here

pytestmark = pytest.mark.usefixtures("in_its_own_folder")


def test_gpu_begins_with_one_loss_in_every_way_and_broken_tests_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest finds nothing at a path that is not there. Without transformers only the blocks are trained."""
    monkeypatch.setattr("benchmarks.gpu.TEST_OPTIONS", ["-q", "-n0", "--noconftest"])
    assert (
        run_here("gpu", "--dry-run --tests nowhere --traces new/folder --sizes small qwen3-0.6b contrastive", "g") == 1
    )
    groups = outcomes_of("g")
    assert [*groups] == ["tests", "products", "small", "qwen3-0.6b", "contrastive"]  # what is worth most is told first
    (tests,) = groups["tests"]
    assert (tests.failure or "").startswith("exit status 1: RuntimeError: pytest ended with status 4")
    assert "nowhere" in tests.steps[0]["tail"]
    assert "nowhere" in Path("new/folder/tests.txt").read_text()
    found = importlib.util.find_spec("transformers") is not None
    for size, methods in (("small", 9), ("qwen3-0.6b", 8 * found), ("contrastive", 2 * found)):
        done = [case for case in groups[size] if case.result is not None]
        assert len(done) == methods, size
        assert all(case.values("loss")[-1] < case.values("loss")[0] for case in done)
    assert "## small" in Path("g.md").read_text()
    assert "first losses" not in Path("g.md").read_text()


def event(kind: str, name: str, begin: float, end: float, correlation: int = 0) -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": begin, "dur": end - begin, "args": {"correlation": correlation}}


def test_a_step_is_kernels_and_gaps_by_cause() -> None:
    events = [
        event("cuda_runtime", WAIT, -100, 0),
        event("cuda_runtime", "cudaLaunchKernel", 900, 950, 1),
        event("kernel", "matmul", 1_000, 3_000, 1),  # the host ran until 900; then 100 of launching
        event("cuda_runtime", "cudaLaunchKernel", 1_100, 1_150, 2),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2_000, 4_000),
        event("kernel", "matmul", 4_000, 5_000, 2),  # waited 1,000 for a copy
        event("cuda_runtime", "cudaEventSynchronize", 5_200, 5_700),
        event("cuda_runtime", "cudaLaunchKernel", 6_000, 6_050, 3),
        event("kernel", "matmul", 6_000, 7_000, 3),  # the host waited 500 and ran 500
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 7_000, 7_400),
        event("cuda_runtime", WAIT, 7_000, 10_000),
    ]
    found = gaps_of(events)
    assert found["step"] == 10
    assert found["kernels"] == 4
    assert (found["host_runs"], found["host_waits"]) == (0.9 + 0.5 + 2.6, 0.5)
    assert (found["copies"], found["other"]) == (1 + 0.4, 0.1)
    assert (found["to_device"], found["to_host"], found["launches"]) == (2, 0.4, 3)
    causes = ("kernels", "host_runs", "host_waits", "copies", "other")
    assert abs(sum(found[cause] for cause in causes) - found["step"]) < 1e-9
