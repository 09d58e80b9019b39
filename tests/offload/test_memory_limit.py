"""The peak of a process stays within the limit of memory, whatever the training loop."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.streaming.heap import anonymous_bytes
from tests.programs import run_program

MIB = 1 << 20
#: A loop whose memory is easy to predict.
PLAIN: dict[str, Any] = {
    "memory": "90MiB",
    "home": "disk",
    "rows": 256,
    "growth": 1,
    "microbatches": 1,
    "accumulation": 1,
    "optimizer": "adamw",
    "in_backward": False,
    "set_to_none": True,
    "saves": False,
}
#: What a process takes at most for a limit: a factor of it, and bytes besides.
TIGHT = 1.03, 8 * MIB
#: The bound of any process on a CPU, with the allocator as it comes.
OF_ANY_PROCESS = 1.10, 32 * MIB
TIED = {"words": 12_000, "tied": True, "memory": "130MiB"}
LOOPS = st.fixed_dictionaries(
    {
        "memory": st.integers(56, 140).map(lambda mib: f"{mib}MiB"),
        "home": st.just("disk"),
        "rows": st.sampled_from([64, 256]),
        "growth": st.sampled_from([1, 3]),
        "microbatches": st.sampled_from([1, 4]),
        "accumulation": st.sampled_from([1, 2]),
        "optimizer": st.sampled_from(["adamw", "momentum"]),
        "in_backward": st.booleans(),
        "set_to_none": st.booleans(),
        "saves": st.booleans(),
    }
)


def check_peak(loop: dict[str, Any], bound: tuple[float, int] = TIGHT) -> None:
    if not anonymous_bytes():
        pytest.skip("needs a system with /proc")
    with tempfile.TemporaryDirectory() as folder:
        code = "from tests.offload.memory_worker import main; main()"
        ended = run_program(code, json.dumps(loop), folder, seconds=300)
    assert ended.status == 0, ended.errors
    found = json.loads(ended.output)
    limit = int(loop["memory"].removesuffix("MiB")) * MIB
    factor, more = bound
    assert found["bytes"] < factor * limit + more, f"{found['bytes'] / MIB:.1f} MiB for {loop}"
    if loop.get("form"):
        assert found["ours"] == pytest.approx(found["theirs"], rel=1e-3)
    elif loop["microbatches"] == 1:
        assert found["ours"] == found["theirs"]
    else:
        assert found["ours"] == pytest.approx(found["theirs"], rel=1e-3)


@pytest.mark.parametrize(
    "loop",
    [
        {"in_backward": True, "memory": "100MiB"},
        {"set_to_none": False, "optimizer": "momentum"},
        {"growth": 4, "memory": "100MiB"},
        {"growth": 4, "memory": "100MiB", "longer": True},
        {"home": "cpu", "accumulation": 2, "memory": "140MiB"},
        {"microbatches": 4, "rows": 1024, "memory": "60MiB"},
        {"words": 12_000, "memory": "80MiB"},
        {"resident": "*.narrow.weight", "memory": "110MiB"},
        {"form": "everything", "memory": "60MiB"},
    ],
    ids=str,
)
def test_the_peak_stays_within_the_limit(loop: dict[str, Any]) -> None:
    check_peak(PLAIN | loop)


def test_the_peak_with_tied_words_stays_within_the_bound_of_any_process() -> None:
    """The tighter bound (141.9 MiB) is not met: steps take 155 to 161 MiB.

    The words are around the blocks, where autograd adds the gradients of both uses. That of the head is a view of a
    product, so it does not add in place, and for a moment there are three tensors of 17.6 MiB: no plan avoids it, and
    a warning says that 130 MiB is too little. The bound here is 175 MiB.
    """
    check_peak(PLAIN | TIED, OF_ANY_PROCESS)


@pytest.mark.xfail(strict=True, reason="155 to 161 MiB: a third tensor of 17.6 MiB while the tied gradient is summed")
def test_tied_words_stay_within_the_limit_of_all_other_loops() -> None:
    check_peak(PLAIN | TIED)


@settings(max_examples=3, derandomize=True)
@given(LOOPS)
def test_the_peak_of_any_loop_stays_within_the_limit(loop: dict[str, Any]) -> None:
    check_peak(loop)
