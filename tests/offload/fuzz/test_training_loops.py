"""Any training loop gives what the plain model gives, or is refused before anything differs.

A few hundred drawn programs, the same in every run; thousands of new ones by ``--hypothesis-profile=long``.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.offload.fuzz.blocks import BLOCKS
from tests.offload.fuzz.corpus import EQUAL, REFUSED
from tests.offload.fuzz.draw import programs
from tests.offload.fuzz.gradients import Rate, TrainStep
from tests.offload.fuzz.lockstep import check
from tests.offload.fuzz.loops import FORMS, LOOPS, loop
from tests.offload.fuzz.models import MODELS
from tests.offload.fuzz.passes import Forward
from tests.offload.fuzz.program import Program, Setup
from tests.offload.fuzz.weights import Checkpoint
from tests.offload.fuzz.world import OPTIMIZERS

#: How each model trains.
WAYS: list[dict[str, Any]] = [
    {"home": "disk", "checkpoint": True, "boundary": 0, "late": 1},
    {"slices": 2, "updates": "offload", "max_norm": 0.5},
    {"home": "disk", "checkpoint": True, "graphs": 1 << 20, "updates": "offload", "optimizer": "momentum"},
]
#: How each optimizer updates.
UPDATES: list[dict[str, Any]] = [
    {"updates": "offload", "grouped": True, "block_bytes": 64},
    {"updates": "offload", "home": "disk", "checkpoint": True, "max_norm": 0.2, "block_bytes": 300, "late": 3},
    {"updates": "backward", "home": "disk", "checkpoint": True, "late": 1},
]


@pytest.mark.parametrize("claim", [*EQUAL, *REFUSED])
def test_claim(claim: str) -> None:
    outcome = check((EQUAL | REFUSED)[claim])
    assert outcome.kind == ("refused" if claim in REFUSED else "equal"), outcome


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_any_module_trains_like_the_plain_model(name: str, form: str) -> None:
    assert check(loop(name, form)).kind == "equal"


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("model", [*MODELS, *BLOCKS])
def test_every_model_trains_like_the_plain_one(model: str, way: dict[str, Any]) -> None:
    training = (TrainStep(), TrainStep(), Forward(mode="no_grad"), TrainStep())
    outcome = check(Program(Setup(model=model, **way), training))
    assert outcome.kind == ("refused" if model == "residual" else "equal"), outcome


@pytest.mark.parametrize("way", UPDATES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains_like_the_plain_one(optimizer: str, way: dict[str, Any]) -> None:
    step = TrainStep(accumulate=2, set_to_none=False)
    training = (TrainStep(), step, Rate(), Forward(mode="eval"), step, Checkpoint(), TrainStep(), Checkpoint(load=True))
    assert check(Program(Setup(optimizer=optimizer, **way), (*training, TrainStep()))).kind == "equal"


@settings(max_examples=max(300, settings().max_examples), database=None, suppress_health_check=list(HealthCheck))
@given(program=programs())
def test_any_loop_trains_like_the_plain_model_or_is_refused(program: Program) -> None:
    check(program)
