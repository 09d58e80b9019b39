"""What uses the memory of a step within a limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.planning.choose import NothingFitsError, choose, least_bytes, predict
from offload.planning.memory_profile import MemoryProfile, SavedTensor
from offload.planning.step_model import Choice, Costs, StepModel, Updates
from offload.policy import MemoryPolicy

MIB = 1 << 20


def model_of(
    shards: int = 6,
    *,
    weights: int = 20 * MIB,
    activations: int = 60 * MIB,
    microbatches: int = 1,
    load: float = 0.02,
    forward: float = 0.08,
    update: float = 0.08,
) -> StepModel:
    """Equal shards, AdamW on disk."""
    parts = [
        part for _ in range(4) for part in (SavedTensor(weights // 4, 0, 0), SavedTensor(0, *[activations // 4] * 2))
    ]
    profiles = {j: MemoryProfile(1, parts) for j in range(shards)}
    return StepModel(
        shards=shards,
        first=0,
        costs=Costs(
            forward=[forward] * shards,
            backward=[3 * forward] * shards,
            kept_backward=[2 * forward] * shards,
            load=load / weights,
            drain=load / weights,
            update=update / weights,
            boundary=0.001 / (2 * MIB),
        ),
        slot_bytes=[weights] * shards,
        loaded_bytes=[weights] * shards,
        gradient_bytes=[weights] * shards,
        rows=[1] * microbatches,
        boundaries=lambda j, rows: 2 * MIB,
        gradients=lambda j, rows: 2 * MIB,
        recomputed=profiles,
        kept=profiles,
        transfer_bytes=3 * MIB,
        updates=Updates(pending=frozenset(range(shards))),
        resting_bytes=dict.fromkeys(range(shards), 3 * weights),
        gradients_wait=True,
    )


MODELS = st.builds(
    model_of,
    st.integers(1, 6),
    weights=st.integers(1, 30).map(lambda n: n * MIB),
    activations=st.integers(0, 50).map(lambda n: 4 * n * MIB),
    microbatches=st.integers(1, 3),
    load=st.floats(0.001, 0.3),
    forward=st.floats(0.01, 0.1),
    update=st.floats(0.0, 0.5),
)


def least_of(model: StepModel) -> int:
    with pytest.raises(NothingFitsError) as raised:
        choose(model, 1)
    return raised.value.least_bytes


@given(MODELS, st.floats(1.0, 6.0), st.floats(1.0, 3.0))
@settings(max_examples=40)
def test_bytes_go_to_whole_shards_first_then_to_graphs(model: StepModel, share: float, more: float) -> None:
    limit = int(least_of(model) * share) + MIB
    found, richer = choose(model, limit), choose(model, int(limit * more))
    assert len(richer.in_memory) >= len(found.in_memory)
    if richer.in_memory == found.in_memory:
        assert len(richer.kept) >= len(found.kept)
    bare = replace(found, kept=frozenset(), waiting=frozenset(), slots=min(2, model.shards - len(found.in_memory)))
    another = frozenset(range(len(found.in_memory) + 1))
    if len(another) < model.shards:
        tried = replace(bare, in_memory=another, slots=min(2, model.shards - len(another)))
        assert least_bytes(model, tried) > limit


def on_a_device(model: StepModel, host_bytes: int) -> StepModel:
    """The same beside host memory of its own, where gradients wait, and are copied to."""
    costs = replace(model.costs, drain_to_memory=0.001 / (20 * MIB))
    return replace(model, costs=costs, resting_bytes={}, host_bytes=host_bytes)


def test_gradients_that_wait_in_host_memory_take_none_of_a_device() -> None:
    alone = replace(model_of(6), resting_bytes={})
    limit = least_of(alone)
    found = predict(on_a_device(alone, 3 * 20 * MIB), choose(on_a_device(alone, 3 * 20 * MIB), limit))
    assert len(found.choice.waiting) == 3, "as many as host memory holds"
    without = replace(found.choice, waiting=frozenset())
    assert found.memory_bytes == predict(on_a_device(alone, 0), without).memory_bytes <= limit
    assert found.peak.begin == found.choice.slots * 20 * MIB + 3 * MIB
    fewer = replace(on_a_device(alone, 1 << 40), given=MemoryPolicy(gradient_bytes=2 * 20 * MIB))
    assert len(choose(fewer, limit).waiting) == 2


def test_what_is_given_is_not_searched() -> None:
    model = replace(
        model_of(),
        given=MemoryPolicy(
            slots=2, resident_bytes=170 * MIB, graph_bytes=130 * MIB, boundary_bytes=4 * MIB, gradient_bytes=0
        ),
    )
    choice = choose(model, 4000 * MIB)
    assert choice == Choice(
        2, frozenset({0, 1}), frozenset({(5, 0), (4, 0)}), boundary_bytes=2 * MIB, waiting=frozenset()
    )
