"""Claims of how a trace of a step is told: every microsecond is a kernel's or a gap's, and each gap has a cause."""

from typing import Any

from benchmarks.gpu.traced import WAIT, gaps_of


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
