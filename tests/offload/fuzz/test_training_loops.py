"""Any training loop gives what the plain model gives, or is refused before anything differs.

A few hundred drawn programs, the same in every run; thousands of new ones by ``--hypothesis-profile=long``.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.offload.fuzz.blocks import BLOCKS
from tests.offload.fuzz.corpus import CORPUS
from tests.offload.fuzz.draw import programs
from tests.offload.fuzz.gradients import TrainStep
from tests.offload.fuzz.lockstep import check
from tests.offload.fuzz.loops import FORMS, LOOPS, loop
from tests.offload.fuzz.models import MODELS
from tests.offload.fuzz.passes import Forward
from tests.offload.fuzz.program import Program, Setup

#: Of the corpus, what ours refuses; everything else ends equal.
REFUSED = {
    *(
        "forward_mode_is_refused_or_right",
        "torch_func_grad_is_refused_or_right",
        "a_functional_call_is_refused_or_right",
    ),
    *("torch_func_grad_of_a_model_with_blocks_is_refused_or_right", "a_state_loaded_by_assignment_trains"),
    *("a_hook_writes_weights_of_a_forward_that_waits_for_its_recomputation", "adapters_are_followed_or_refused"),
    *("a_state_that_is_kept_by_reference_keeps_its_numbers", "a_replaced_layer_is_followed_or_refused"),
    *("a_replaced_parameter_is_followed_or_refused", "weight_norm_is_followed_or_refused"),
    *("spectral_norm_is_followed_or_refused", "other_data_between_forward_and_backward_is_kept"),
    *("other_data_is_noticed_although_another_forward_has_run", "a_kept_home_is_not_closed_without_a_replaced_layer"),
    *(
        "an_own_forward_of_a_sequential_is_run_or_refused",
        "a_backward_that_is_refused_leaves_no_gradient_around_blocks",
        "a_backward_with_a_graph_that_is_refused_leaves_no_gradient_around_blocks",
    ),
}


#: How each model trains.
WAYS: list[dict[str, Any]] = [
    {"home": "disk", "checkpoint": True, "boundary": 0, "late": True},
    {"slices": 2, "updates": "offload", "max_norm": 0.5},
    {"home": "disk", "checkpoint": True, "graphs": 1 << 20, "updates": "offload", "optimizer": "momentum"},
]


@pytest.mark.parametrize("claim", CORPUS)
def test_claim(claim: str) -> None:
    outcome = check(CORPUS[claim])
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


@settings(max_examples=max(300, settings().max_examples), database=None, suppress_health_check=list(HealthCheck))
@given(program=programs())
def test_any_loop_trains_like_the_plain_model_or_is_refused(program: Program) -> None:
    check(program)
