"""What a step holds at its fullest moment: predicted, beside what every operation of a step left alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload import MemoryPolicy, OffloadModel
from offload.engine.observed import Recorder
from offload.planning.estimate import Estimate
from offload.planning.memory_profile import MemoryProfile, SavedTensor
from offload.planning.peak_memory import Moment, OutsideBytes, PeakMemory, StepBytes, peak_memory
from offload.planning.plan import Action, Kind, Plan
from offload.planning.planner import plan_step
from offload.planning.residency import Residency
from offload.streaming.lane import Arrival, CopyLane, CopyLanes

WIDTH = 64
DEPTH = 4


class Block(nn.Module):
    """Half of a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(functional.gelu(self.widen(self.norm(x))))
        return x + y


class Living(TorchDispatchMode):
    """Counts the bytes of results of operations that are still referenced."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._nbytes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (made := StorageWeakRef(x.untyped_storage())) not in given:
                self._nbytes[made] = x.untyped_storage().nbytes()
        self._nbytes = {made: nbytes for made, nbytes in self._nbytes.items() if not made.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._nbytes.values()))
        return result


class AtOnce(CopyLane):
    """Copies when it is told to, so that nothing is on its way while layers compute."""

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        with torch.no_grad():
            copy()
        return Here()

    def wait_idle(self) -> None:
        pass

    close = wait_idle


class Here(Arrival):
    def wait(self) -> None:
        pass

    synchronize = wait


def model_of(home: str, monkeypatch: pytest.MonkeyPatch, depth: int = DEPTH, **settings: Any) -> OffloadModel:
    monkeypatch.setattr("offload.model.open_lanes", lambda device, **_: CopyLanes(AtOnce(), AtOnce(), AtOnce()))
    torch.manual_seed(0)
    return OffloadModel(nn.Sequential(*(Block() for _ in range(depth))), "cpu", home, **settings)


def step(model: OffloadModel, x: Tensor) -> None:
    """The user has the output, and autograd its gradient, until backward is over, as a prediction supposes."""
    model.zero_grad()
    output = model(x)
    output.backward(torch.ones_like(output))


def estimate_of(model: OffloadModel, rows: int, *, drain: float = 0.0) -> Estimate:
    """With copies home that take no time, or so many seconds for each byte."""
    each = model._homes.meter.copy_seconds_per_byte
    model._homes.meter.copy_seconds_per_byte = lambda lane: drain if lane == "drain" else each(lane)  # type: ignore[method-assign]
    return model.estimate(rows)


@pytest.mark.parametrize("rows", [16, 128, 1024])
@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_activation": True, "num_slices": DEPTH},
        {"checkpoint_activation": True, "num_slices": 2},
        {"checkpoint_activation": True, "num_slices": DEPTH, "num_microbatches": 2},
        {"checkpoint_activation": False, "num_slices": DEPTH},
        {"checkpoint_activation": False, "num_slices": DEPTH, "num_microbatches": 4},
        {"checkpoint_activation": True, "num_slices": DEPTH, "memory": MemoryPolicy.fixed(graph_bytes="64MiB")},
    ],
    ids=lambda settings: ", ".join(f"{value}" for value in settings.values()),
)
def test_the_predicted_peak_is_what_is_alive_at_the_fullest_moment(
    home: str, settings: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of(home, monkeypatch, **settings), torch.randn(rows, WIDTH)
    step(model, x)
    step(model, x)
    predicted = estimate_of(model, rows).memory_bytes
    homes = model._homes
    fixed = homes.streamer.slots * homes.streamer.slot_bytes
    if home == "cpu":
        fixed += sum(shard.home.nbytes for shard in homes.shards if shard.home is not None)
    model.zero_grad()
    gc.collect()
    with Living() as living:
        step(model, x)
    assert fixed + living.peak_bytes == pytest.approx(predicted, rel=0.15)


def test_the_gradients_of_a_home_in_host_memory_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes them as they are: they are never on the compute device as well."""
    model, x = model_of("cpu", monkeypatch, num_slices=DEPTH, checkpoint_activation=True), torch.randn(4, WIDTH)
    step(model, x)
    estimate, slot = estimate_of(model, 4, drain=1e9), model._homes.streamer.slot_bytes
    boundary = 4 * WIDTH * 4
    # At the end of forward, and the output's gradient; then each cell of backward uses up as much as it makes.
    assert estimate.peak_bytes["device"] == 2 * slot + (DEPTH - 1) * boundary + boundary
    assert model.statistics().peak_device_bytes <= estimate.peak_bytes["device"]
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert estimate.peak_bytes["host"] == 2 * weights
    # Beside slots and homes: gradients, activations of one cell, the boundaries that are left, an output.
    assert estimate.memory_bytes < 2 * slot + 2 * weights + estimate.activation_bytes + 10 * boundary


def test_a_tied_weight_is_stored_once() -> None:
    first, second = Block(), Block()
    second.widen.weight = first.widen.weight
    model = OffloadModel(nn.Sequential(first, second), "cpu", num_slices=2, checkpoint_activation=True)
    step(model, torch.randn(2, WIDTH))
    assert model.estimate(2).peak_bytes["host"] == 2 * sum(p.numel() * 4 for p in model.parameters())


def test_gradient_offload_overlaps_the_next_cell_where_the_home_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, WIDTH)
    model = model_of(str(tmp_path), monkeypatch, num_slices=DEPTH, checkpoint_activation=True)
    step(model, x)
    fast, slow = (estimate_of(model, 4, drain=seconds).memory_bytes for seconds in (0.0, 1e9))
    gradients = sum(p.numel() * 4 for p in model._homes.shards[0].parameters)
    boundary = 4 * WIDTH * 4
    assert gradients - 2 * boundary <= slow - fast <= gradients


def test_backward_frees_saved_activations_one_by_one(home: str) -> None:
    """As plain autograd does: what is kept until the last gradient is home stands beside all gradients."""
    model = OffloadModel(
        nn.Sequential(*(Block() for _ in range(DEPTH))), "cpu", home, num_slices=DEPTH, checkpoint_activation=False
    )
    alive: list[int] = []
    kept: list[StorageWeakRef] = []

    def saved(widen: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        kept.append(StorageWeakRef(output.untyped_storage()))

    def seen(block: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        output.register_hook(lambda _: alive.append(sum(not storage.expired() for storage in kept)))

    for block in model.children():
        block.get_submodule("widen").register_forward_hook(saved)
        block.register_forward_hook(seen)
    model(torch.randn(3, WIDTH)).sum().backward()
    assert alive == list(range(DEPTH, 0, -1))


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_backward_that_failed_midway_is_refused_the_second_time(home: str, checkpoint: bool) -> None:
    blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
    model = OffloadModel(blocks, "cpu", home, num_slices=DEPTH, checkpoint_activation=checkpoint)
    x, failing = torch.randn(3, WIDTH), [True]
    list(model.children())[1].register_forward_hook(lambda block, args, output: _Failing.apply(output, failing))
    loss = model(x).sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    failing.clear()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    model.zero_grad()
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_retained_backward_that_failed_can_be_tried_again(home: str) -> None:
    model = OffloadModel(
        nn.Sequential(*(Block() for _ in range(DEPTH))), "cpu", home, checkpoint_activation=True, num_slices=3
    )
    failing = [True]
    list(model.children())[1].register_forward_hook(lambda block, args, output: _Failing.apply(output, failing))
    loss = model(torch.randn(3, WIDTH)).sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward(retain_graph=True)
    failing.clear()
    model.zero_grad()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, failing: list[bool]) -> Tensor:
        ctx.failing = failing
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.failing:
            raise ValueError("on purpose")
        return gradient, None


def test_gradients_in_flight_are_counted_beside_the_cells_they_overlap() -> None:
    plan = Plan.parse("L0 L1 B1.0 B1.1 D1 B0.0 B0.1 D0", 2)
    second = plan.actions.index(Action(Kind.BACKWARD, 0, 1))
    profiles = {0: MemoryProfile(1, [SavedTensor(0, 0, 1)])}

    def peak(drained: dict[int, int]) -> PeakMemory:
        sizes = StepBytes(slot_bytes=0, gradient_bytes=[0, 7], drained=drained, rows=[1, 50], memory_profiles=profiles)
        return peak_memory(plan, sizes)

    assert [peak(drained).memory_bytes for drained in ({1: second - 1}, {1: second}, {})] == [50, 50, 57]
    assert peak({}).device_bytes == 7


# --- the course of one cell -----------------------------------------------------------------------------------------


def test_peaks_of_activations_and_of_weight_gradients_are_not_added() -> None:
    """Four layers of 10 bytes of activations and 10 of weights each."""
    saved_tensors = [saved_tensor for _ in range(4) for saved_tensor in (SavedTensor(10, 0, 0), SavedTensor(0, 10, 10))]
    memory_profile = MemoryProfile(1, saved_tensors)
    assert memory_profile.kept_bytes(1) == 40
    # Always 40 of either kind; one more gradient of a weight, and those of two activations.
    assert memory_profile.peak_bytes(1, 40) == 40 + 10 + 20
    # What another micro-batch left is there from the start.
    assert memory_profile.peak_bytes(1, 40, adds=True) == 40 + 40 + 10 + 10


def test_activations_grow_with_rows_and_weights_do_not() -> None:
    memory_profile = MemoryProfile(2, [SavedTensor(100, 0, 0), SavedTensor(0, 10, 10)])
    assert memory_profile.kept_bytes(6) == 30
    assert memory_profile.peak_bytes(6, 100) == 30 + 100 + 30


def test_a_weight_that_autograd_does_not_save_has_a_gradient_in_the_end() -> None:
    assert MemoryProfile(1, [SavedTensor(0, 10, 10)]).peak_bytes(1, 500) == 500 + 10


def test_what_is_saved_twice_is_kept_once_and_boundaries_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("cpu", monkeypatch, num_slices=1, checkpoint_activation=True)
    streamer = model._homes.streamer
    streamer.load(0)
    streamer.await_load(0)
    shard = streamer.shards[0]
    notes = Recorder(shard, shard.slot)
    boundary, activation = torch.randn(8), torch.randn(8)
    weight = shard.slices[-2].view(shard.slot)
    for saved in (boundary, weight, activation, torch.arange(3), weight.t(), activation[:4]):
        notes.add(saved)
    saved_tensors = notes.saved_tensors(elsewhere=[boundary])
    nbytes = weight.numel() * 4
    del saved, weight  # a view that outlives a load is warned of
    streamer.release()
    assert saved_tensors == [
        SavedTensor(0, 16, 0),
        SavedTensor(nbytes, 0, 0),
        SavedTensor(0, 0, 24),
        SavedTensor(0, 32, 32),
        SavedTensor(0, 0, 0),
        SavedTensor(0, 32, 0),
    ]


def test_boundaries_that_are_written_out_are_not_in_memory() -> None:
    def peak(text: str) -> PeakMemory:
        sizes = StepBytes(
            slot_bytes=50,
            gradient_bytes=[0, 0, 0],
            boundaries=lambda key: 10,
            gradients=lambda key: 20,
            memory_profiles=dict.fromkeys(range(3), MemoryProfile(1, [SavedTensor(0, 0, 1)])),
        )
        return peak_memory(Plan.parse(text, 2), sizes)

    stays = peak("F0.0 F1.0 F2.0 B2.0 D2 B1.0 D1 B0.0 D0")
    assert stays == PeakMemory(100 + 20 + 20, 0, 1, 100 + 10 + 20 + 20 + 1 + 2 * 10, begin_bytes=100)
    # One that is being written out is in memory until the next but one is.
    away = peak("F0.0 F1.0 S1.0 F2.0 S2.0 P2.0 B2.0 D2 P1.0 B1.0 D1 B0.0 D0")
    assert away == PeakMemory(100 + 20 + 10 + 20, 20, 1, 100 + 20 + 10 + 20 + 20 + 1 + 2 * 10, begin_bytes=100)


@given(
    shards=st.integers(1, 5),
    microbatches=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 20), min_size=6, max_size=6),
    budget=st.integers(80, 400),
    kept=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3))),
)
def test_a_plan_that_a_budget_admits_never_holds_more_boundaries_than_it(
    shards: int, microbatches: int, sizes: list[int], budget: int, kept: set[tuple[int, int]]
) -> None:
    plan = plan_step(
        shards,
        slots=2,
        microbatches=microbatches,
        kept=kept,
        boundaries=Residency(budget),
        gradients=Residency(budget, gradients=True),
        boundary_sizes=lambda key: sizes[key[0]],
        gradient_sizes=lambda key: sizes[key[0]],
    )
    bytes_of_step = StepBytes(
        slot_bytes=0,
        gradient_bytes=[0] * shards,
        rows=[1] * microbatches,
        boundaries=lambda key: sizes[key[0]],
        gradients=lambda key: sizes[key[0]],
    )
    assert peak_memory(plan, bytes_of_step).device_bytes <= 2 * budget


def test_gradients_count_from_their_backward_to_their_update() -> None:
    """Those of pending updates until the cells of their shard, those that are added to all the time."""

    def course(**sizes: Any) -> list[int]:
        moments: list[Moment] = []
        plan = Plan.parse("F0.0 F1.0 F2.0 B2.0 D2 B1.0 D1 B0.0 D0", 0, pending=range(3), in_memory=range(3))
        given = StepBytes(
            slot_bytes=0,
            gradient_bytes=[100, 10, 1],
            waiting=frozenset(range(3)),
            memory_profiles=dict.fromkeys(range(3), MemoryProfile(1, [SavedTensor(0, 0, 0)])),
            **sizes,
        )
        peak = peak_memory(plan, given, moments)
        return [peak.begin_bytes, *(moment.gradients for moment in moments)]

    assert course() == [111, 11, 1, 0, 0, 1, 11]
    assert course(begins=frozenset({1})) == [10, 10, 0, 0, 0, 1, 11]
    assert course(held=frozenset({0, 1, 2})) == [111, 111, 111, 111, 111, 111 + 1, 111 + 10]
    assert course(held=frozenset({0}), begins=frozenset()) == [100, 100, 100, 100, 100, 101, 111]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_outside_of_shards_count_from_the_code_that_makes_them_to_the_end(microbatches: int) -> None:
    """Of a head, a part of which is tied to the embedding, and of adapters in shard 1."""
    cells = "F{0}.0 F{0}.1" if microbatches == 2 else "F{0}.0"
    forward, backward = (cells.replace("F", letter) for letter in "FB")
    plan = Plan.parse(f"{forward.format(0)} {forward.format(1)} {backward.format(1)} D1 {backward.format(0)} D0", 2)
    outside = OutsideBytes(
        values=1000, states=200, held=5, made_before={2: 30, 0: 7}, copied_before={2: 20, 0: 20}, made_in={1: 3}
    )
    moments: list[Moment] = []
    given = StepBytes(
        slot_bytes=0,
        gradient_bytes=[0, 0],
        rows=[1] * microbatches,
        memory_profiles=dict.fromkeys(range(2), MemoryProfile(1, [SavedTensor(0, 0, 0)])),
        outside=outside,
    )
    peak = peak_memory(plan, given, moments)
    assert outside.gradients == 40
    assert peak.begin_bytes == 1205
    # The code before shard 0 runs for each micro-batch after its cell.
    each = {1: [1205, 1205, 1235, 1238], 2: [*[1205] * 4, 1235, 1235, 1238, 1245]}
    assert [moment.outside for moment in moments] == each[microbatches]
    assert peak.memory_bytes == 1245 + 40  # a gradient is copied, and another one added to it in a third tensor


def test_a_shard_with_memory_of_its_own_counts_while_it_is_loaded() -> None:
    profiles = dict.fromkeys(range(4), MemoryProfile(1, ()))
    sizes = StepBytes(slot_bytes=2, own_slots={0: 9, 3: 7}, gradient_bytes=[0] * 4, memory_profiles=profiles)
    assert peak_memory(plan_step(4, slots=4), sizes).device_bytes == 4 * 2 + 9 + 7
    course: list[Moment] = []
    assert peak_memory(plan_step(4, slots=2), sizes, course).device_bytes == 2 * 2 + 9
    assert [moment.weights - 2 * 2 for moment in course] == [9, 0, 7, 7, 7, 0, 9, 9]
