"""The search for the fastest plan within a limit of memory."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload.planning.filling import NothingFitsError
from offload.planning.memory_profile import MemoryProfile, SavedTensor
from offload.planning.peak_memory import StepBytes
from offload.planning.plan import validate
from offload.planning.planner import Updates
from offload.planning.search import fill, search
from offload.planning.simulate import Costs
from offload.planning.step_model import Choice, Given, StepModel, costs_of, predict, predicted_bytes

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
    contention: float = 0.0,
) -> StepModel:
    """Equal shards, AdamW on disk."""
    parts = [
        part for _ in range(4) for part in (SavedTensor(weights // 4, 0, 0), SavedTensor(0, *[activations // 4] * 2))
    ]
    return StepModel(
        shards=shards,
        first=0,
        costs=Costs(
            load=[load] * shards,
            forward=[forward] * shards,
            backward=[3 * forward] * shards,
            kept_backward=[2 * forward] * shards,
            drain=[load] * shards,
            update=[update] * shards,
            boundary=[0.001] * (shards + 1),
            contention=contention,
        ),
        sizes=StepBytes(
            slot_bytes=weights,
            gradient_bytes=[weights] * shards,
            rows=[1] * microbatches,
            boundaries=lambda key: 2 * MIB,
            gradients=lambda key: 2 * MIB,
            memory_profiles={j: MemoryProfile(1, parts) for j in range(shards)},
            constant_bytes=3 * MIB,
        ),
        updates=Updates(pending=frozenset(range(shards)), updates=False, clips=True),
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
    contention=st.sampled_from([0.0, 0.3, 1.0]),
)


def least_of(model: StepModel) -> int:
    with pytest.raises(NothingFitsError) as raised:
        search(model, 1)
    return raised.value.least_bytes


@given(MODELS, st.floats(1.0, 6.0))
@settings(max_examples=60)
def test_a_plan_that_is_found_can_run_and_never_holds_more_than_the_limit(model: StepModel, share: float) -> None:
    limit = int(least_of(model) * share) + MIB
    found = search(model, limit).best
    validate(found.plan)
    assert found.memory_bytes <= limit
    assert found.memory_bytes == predict(model, found.choice).memory_bytes
    assert max(moment.nbytes for moment in found.course) <= found.memory_bytes


@given(MODELS, st.floats(1.0, 3.0), st.floats(1.0, 3.0))
@settings(max_examples=40)
def test_more_memory_is_not_predicted_to_be_slower(model: StepModel, share: float, more: float) -> None:
    limit = int(least_of(model) * share) + MIB
    assert search(model, int(limit * more)).best.seconds <= search(model, limit).best.seconds * 1.05


@given(MODELS, st.floats(1.0, 5.0))
@settings(max_examples=25)
def test_no_combination_of_slots_shards_in_memory_and_graphs_is_five_percent_faster(
    model: StepModel, share: float
) -> None:
    limit = int(least_of(model) * share) + MIB
    found = search(model, limit).best
    cells = [(j, i) for j in reversed(range(model.shards)) for i in range(len(model.sizes.rows))]
    best = math.inf
    for slots, resting, kept in itertools.product((2, 3), range(model.shards + 1), range(len(cells) + 1)):
        choice = Choice(
            min(slots, model.shards - resting), frozenset(range(resting)), frozenset(cells[:kept]), math.inf
        )
        tried = predict(model, choice)
        if tried.memory_bytes <= limit:
            best = min(best, tried.seconds)
    assert found.seconds <= 1.05 * best


def test_with_enough_memory_nothing_is_loaded_and_nothing_recomputed() -> None:
    model = model_of(contention=0.3)
    found = search(model, 10_000 * MIB).best
    assert found.choice.in_memory == frozenset(range(6))
    assert len(found.choice.kept) == 6
    assert found.plan.loads == ()


def test_whole_graphs_in_place_of_recipes_have_a_limit_of_their_own() -> None:
    """Their blocks are the same in each step, so they leave fewer gaps and may take more of the memory."""
    known = model_of(contention=0.3, update=0.0)
    model = replace(known, sizes=replace(known.sizes, graph_bytes_per_row=dict.fromkeys(range(6), 30.0 * MIB)))
    whole = predict(model, Choice(0, frozenset(range(6)), frozenset((j, 0) for j in range(6)), cheap_recompute=False))
    limit = whole.memory_bytes - 10 * MIB
    assert search(model, limit).best.choice.cheap_recompute
    assert search(model, limit, whole.memory_bytes).best.choice == whole.choice
    assert search(model, limit, whole.memory_bytes - 1).best.choice.cheap_recompute
    assert fill(model, Choice(0, whole.choice.in_memory), limit, whole.memory_bytes) == whole.choice


def test_gradients_wait_in_the_memory_that_graphs_have_left() -> None:
    """When backward is at the first shards, the graphs of the last ones are freed."""
    model = replace(model_of(12), resting_bytes={})
    limit = 500 * MIB
    found = search(model, limit).best
    without = fill(replace(model, gradients_wait=False), Choice(found.choice.slots), limit)
    assert found.choice.kept == without.kept
    assert len(found.choice.waiting) > 3


def on_a_device(model: StepModel, host_bytes: int) -> StepModel:
    """The same beside host memory of its own, where gradients wait, and are copied to."""
    costs = replace(model.costs, waiting_drain=[0.001] * model.shards)
    return replace(model, costs=costs, resting_bytes={}, host_bytes=host_bytes)


def test_gradients_that_wait_in_host_memory_take_none_of_a_device() -> None:
    alone = replace(model_of(6), resting_bytes={})
    limit = least_of(alone)
    found = search(on_a_device(alone, 3 * 20 * MIB), limit).best
    assert len(found.choice.waiting) == 3, "as many as host memory holds"
    without = replace(found.choice, waiting=frozenset())
    assert found.memory_bytes == predict(on_a_device(alone, 0), without).memory_bytes <= limit
    assert found.peak.begin_bytes == found.choice.slots * 20 * MIB + 3 * MIB
    fewer = replace(on_a_device(alone, 1 << 40), given=Given(gradient_bytes=2 * 20 * MIB))
    assert len(search(fewer, limit).best.choice.waiting) == 2


def test_gradients_that_wait_beside_a_device_are_copied_there() -> None:
    model = on_a_device(model_of(2, load=0.5), 1 << 40)
    assert costs_of(model, Choice(2, waiting=frozenset({0}))).drain == [0.001, 0.5]
    assert costs_of(replace(model, costs=replace(model.costs, waiting_drain=())), Choice(2, frozenset({1}))).drain == [
        0.5,
        0.0,
    ]


def test_a_device_keeps_whole_graphs_where_all_of_them_fit() -> None:
    """The host finds recipes operation by operation, and a device waits for it."""
    alone = model_of(contention=0.3, update=0.0)
    alone = replace(alone, sizes=replace(alone.sizes, graph_bytes_per_row=dict.fromkeys(range(6), 30.0 * MIB)))
    for limit, whole in ((2000 * MIB, True), (420 * MIB, False)):
        choice = search(on_a_device(alone, 1 << 40), limit).best.choice
        assert (len(choice.kept), choice.cheap_recompute) == (6, not whole)
    assert search(replace(alone, resting_bytes={}), 2000 * MIB).best.choice.cheap_recompute, "memory others could use"


def test_a_recomputation_that_hides_behind_loads_keeps_no_graph_that_another_use_needs() -> None:
    """The disk is the bound: shards in memory save time, graphs save none."""
    model = model_of(8, load=1.0, forward=0.01, activations=60 * MIB, update=0.0)
    limit = least_of(model) + 4 * (3 * 20 + 20) * MIB
    found = search(model, limit).best
    assert len(found.choice.in_memory) >= 3


def test_shards_in_memory_are_spread_where_cells_of_them_hide_the_loads_of_the_others() -> None:
    """Loads of neighbours wait for slots; between them, cells of shards in memory compute."""
    model = model_of(16, load=0.2, forward=0.1, activations=0, update=0.0)
    limit = least_of(model) + 8 * (3 * 20 + 20) * MIB
    found = search(model, limit).best
    first = fill(model, Choice(2, frozenset(range(len(found.choice.in_memory)))), limit)
    assert found.choice.in_memory != first.in_memory
    assert found.seconds < 0.97 * predict(model, first).seconds


def test_graphs_leave_for_gradients_that_wait_where_writing_these_takes_longer() -> None:
    model = model_of(6, weights=40 * MIB, activations=40 * MIB, forward=0.002, load=0.5)
    model = replace(model, resting_bytes={})
    limit = least_of(model) + 120 * MIB
    greedy = fill(replace(model, gradients_wait=False), Choice(2), limit)
    assert greedy.kept
    assert len(search(model, limit).best.choice.waiting) > 0


def test_what_is_given_is_not_searched() -> None:
    model = replace(
        model_of(),
        given=Given(slots=2, resident_bytes=170 * MIB, graph_bytes=130 * MIB, boundary_bytes=4 * MIB, gradient_bytes=0),
    )
    choice = search(model, 4000 * MIB).best.choice
    assert choice == Choice(
        2, frozenset({0, 1}), frozenset({(5, 0), (4, 0)}), boundary_bytes=2 * MIB, waiting=frozenset()
    )


def test_nothing_fits_says_the_least_that_works() -> None:
    model = model_of()
    least = least_of(model)
    assert search(model, least).best.memory_bytes <= least
    with pytest.raises(NothingFitsError, match=f"{least:,} bytes, 1 more"):
        search(model, least - 1)


def test_a_margin_is_a_part_of_what_is_predicted() -> None:
    model = model_of()
    wider = replace(model, margin_bytes=100 * MIB)
    limit = 400 * MIB
    assert search(wider, limit).best.memory_bytes <= limit
    assert len(search(wider, limit).best.choice.kept) < len(search(model, limit).best.choice.kept)


def stepwise(model: StepModel, limit: int) -> float:
    """Seconds of the plan that is found where each number is tried, one after the other."""
    cells = [(j, i) for j in reversed(range(model.shards)) for i in range(len(model.sizes.rows))]
    boundaries = 2 * MIB * (model.shards - 1) * len(model.sizes.rows)

    def first_that_fits(choices: Iterable[Choice]) -> Choice | None:
        return next((choice for choice in choices if predicted_bytes(model, choice) <= limit), None)

    best: tuple[float, Choice] | None = None
    for slots, resting in itertools.product((2, 3), range(model.shards + 1)):
        choice = Choice(min(slots, model.shards - resting), frozenset(range(resting)))
        shares = [math.inf, *(boundaries * share / 32 for share in range(32, -1, -1))]
        spilling = first_that_fits(replace(choice, boundary_bytes=share) for share in shares)
        if spilling is None:
            continue
        counts = range(len(cells), -1, -1)
        filled = first_that_fits(replace(spilling, kept=frozenset(cells[:count])) for count in counts)
        assert filled is not None
        seconds = predict(model, filled).seconds
        if best is None or seconds < best[0]:
            best = seconds, filled
    assert best is not None
    away = [j for j in range(model.shards) if j not in best[1].in_memory]
    waiting = (replace(best[1], waiting=frozenset(away[:count])) for count in range(len(away), -1, -1))
    found = first_that_fits(waiting)
    assert found is not None
    return predict(model, found).seconds


# Next to the least, memory does not always grow with the bytes of boundaries.
@example(
    model=model_of(4, weights=MIB, activations=0, microbatches=3, load=0.25, forward=0.0625, update=0.0), share=1.0
)
@given(MODELS, st.floats(1.0, 8.0))
@settings(max_examples=30)
def test_a_search_finds_what_trying_every_number_would_find(model: StepModel, share: float) -> None:
    limit = int(least_of(model) * share) + MIB
    assert search(model, limit).best.seconds <= stepwise(model, limit) * (1 + 1e-9)


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that a function runs, also in the functions that it calls."""
    count = 0

    def traced(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)  # type: ignore[arg-type]
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("resting", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("boundary_bytes", [10 * MIB, math.inf])
@pytest.mark.parametrize("load", [0.002, 0.5])
def test_the_work_of_a_prediction_grows_in_proportion_to_the_shards(
    load: float, boundary_bytes: float, resting: float, microbatches: int
) -> None:
    """Lines of Python: a scan of all shards within a loop over all shards would show."""
    lines = []
    for shards in (25, 100):
        model = model_of(shards, contention=0.3, microbatches=microbatches, load=load)
        in_memory = frozenset(range(int(resting * shards)))
        kept = frozenset((j, 0) for j in range(shards // 2, shards))
        choice = Choice(min(3, shards - len(in_memory)), in_memory, kept, boundary_bytes)
        lines.append(lines_run(lambda model=model, choice=choice: predict(model, choice)))  # type: ignore[misc]
    assert lines[1] < 1.1 * 4 * lines[0]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("share", [1.02, 3.0, 1000.0])
def test_a_search_makes_a_bounded_number_of_plans(share: float, microbatches: int) -> None:
    """Not in proportion to the number of shards: seconds on any machine follow."""
    for shards in (25, 50, 100):
        model = model_of(shards, contention=0.3, microbatches=microbatches)
        assert search(model, int(least_of(model) * share)).tried < 120


@pytest.mark.parametrize(
    ("shards", "microbatches", "load", "update", "share"),
    [(90, 1, 0.02, 0.08, 1.5), (100, 1, 0.1, 0.3, 3.0), (100, 1, 0.002, 0.01, 8.0), (50, 2, 0.02, 0.3, 3.0)],
)
def test_fewer_plans_among_many_cells_are_within_two_percent_of_a_finer_search(
    shards: int, microbatches: int, load: float, update: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(
        shards, weights=5 * MIB, contention=0.3, microbatches=microbatches, load=load, forward=0.01, update=update
    )
    limit = int(least_of(model) * share)
    found = search(model, limit)
    monkeypatch.setattr("offload.planning.search.MANY_CELLS", 10**9)
    finer = search(model, limit)
    assert found.tried < finer.tried
    assert found.best.seconds <= 1.02 * finer.best.seconds


def test_slots_are_as_large_as_the_largest_shard_that_is_loaded() -> None:
    """Also where all shards rest in memory while a plan for others is searched."""
    model = replace(model_of(3), slot_bytes=[10 * MIB, 30 * MIB, 20 * MIB])
    for in_memory, expected in (((), 60), ((1,), 40), ((1, 2), 20), ((0, 1, 2), 0)):
        assert predict(model, Choice(2, frozenset(in_memory))).course[0].weights == expected * MIB
