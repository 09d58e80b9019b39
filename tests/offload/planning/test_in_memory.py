"""The plan of chunks through layers in memory: inputs and graphs that fit are kept, the others are recomputed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from offload.planning.in_memory import InMemory
from offload.planning.plan import Plan, PlanError, validate


def planned(keep_bytes: int, *, first: int = 0, chunks: int = 2, graphs: Mapping[int, int] | None = None) -> str:
    """A step of three layers whose inputs have 10 bytes each."""
    plan = InMemory(3, first, keep_bytes)
    actions = [action for i in range(chunks) for action in plan.forward(i, graphs or {}, lambda: 10)]
    for together in plan.groups(range(chunks)):
        actions += plan.backward(together)
    return " ".join(map(str, actions))


def test_chunks_whose_inputs_are_kept_go_back_layer_by_layer() -> None:
    assert planned(40) == "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B2.0 B2.1 B1.0 B1.1 B0.0 B0.1"


def test_missing_inputs_are_recomputed_one_chunk_at_a_time_after_the_others() -> None:
    assert planned(30).endswith("B2.0 B1.0 B0.0 R1.1 B2.1 B1.1 B0.1")
    assert planned(0, chunks=1).endswith("R0.0 R1.0 B2.0 B1.0 B0.0")


def test_layers_that_backward_does_not_reach_only_repeat_what_enters_the_first_it_reaches() -> None:
    assert planned(0, first=2, chunks=1).endswith("F2.0 R0.0 R1.0 B2.0")
    assert planned(10, first=2, chunks=1).endswith("F2.0 B2.0")


def test_graphs_that_fit_are_kept() -> None:
    assert planned(25, chunks=1, graphs={2: 15}) == "F0.0 F1.0 K2.0 G2.0 B1.0 B0.0"


def test_a_cell_is_repeated_only_after_it_ran() -> None:
    step = Plan.parse("F0.0 R0.0 B0.0 D0", 1, [0])
    validate(step)
    assert str(step) == "F0.0 R0.0 B0.0 D0"
    with pytest.raises(PlanError, match="repeated before it ran"):
        validate(Plan.parse("R0.0 F0.0", 1, [0]))
