"""Any training loop gives what the plain model gives, or is refused before anything differs.

A few hundred drawn programs, the same in every run; many more by ``python -m tests.offload.fuzz``.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.offload.fuzz.corpus import CORPUS
from tests.offload.fuzz.draw import programs
from tests.offload.fuzz.known import KNOWN
from tests.offload.fuzz.lockstep import check, run
from tests.offload.fuzz.program import Program
from tests.offload.fuzz.without import MECHANISMS, without

EXPECTED_TO_FAIL = {claim: known for known in KNOWN for claim in known.claims}


def marks(claim: str) -> list[pytest.MarkDecorator]:
    known = EXPECTED_TO_FAIL.get(claim)
    return [] if known is None else [pytest.mark.xfail(strict=True, reason=known.name, run=not known.crashes)]


CLAIMS = [pytest.param(program, id=claim, marks=marks(claim)) for claim, program in CORPUS.items()]


@pytest.mark.parametrize("program", CLAIMS)
def test_claim(program: Program) -> None:
    outcome = check(program)
    assert outcome.kind in ("equal", "refused"), outcome


@settings(max_examples=300, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(program=programs())
def test_any_loop_trains_like_the_plain_model_or_is_refused(program: Program) -> None:
    check(program)


def test_every_known_fault_has_a_program_in_the_corpus() -> None:
    assert set(EXPECTED_TO_FAIL) <= set(CORPUS)


@pytest.mark.parametrize(
    ("mechanism", "claim"), [(name, claim) for name, (_, claims) in MECHANISMS.items() for claim in claims]
)
def test_without_its_mechanism_a_claim_fails(mechanism: str, claim: str) -> None:
    with without(mechanism):
        assert run(CORPUS[claim]).kind == "failed"
