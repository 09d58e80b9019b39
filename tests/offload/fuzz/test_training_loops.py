"""Any training loop gives what the plain model gives, or is refused before anything differs.

A few hundred drawn programs, the same in every run; many more by ``python -m tests.offload.fuzz``.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.offload.fuzz.corpus import CORPUS
from tests.offload.fuzz.draw import programs
from tests.offload.fuzz.known import CRASHES, KNOWN
from tests.offload.fuzz.lockstep import check
from tests.offload.fuzz.program import Program

EXPECTED_TO_FAIL = {claim: known.name for known in KNOWN for claim in known.claims}


def claims() -> list[object]:
    return [
        pytest.param(
            program,
            id=claim,
            marks=[
                pytest.mark.xfail(strict=True, reason=EXPECTED_TO_FAIL[claim], run=claim not in CRASHES),
            ]
            if claim in EXPECTED_TO_FAIL
            else [],
        )
        for claim, program in CORPUS.items()
    ]


@pytest.mark.parametrize("program", claims())
def test_claim(program: Program) -> None:
    outcome = check(program)
    assert outcome.kind in ("equal", "refused"), outcome


@settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(program=programs())
def test_any_loop_trains_like_the_plain_model_or_is_refused(program: Program) -> None:
    check(program)


def test_every_known_fault_has_a_program_in_the_corpus() -> None:
    assert set(EXPECTED_TO_FAIL) <= set(CORPUS)
