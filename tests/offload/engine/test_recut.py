"""A model that is cut into other shards between steps goes on bit for bit, over the same bytes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import DiskHome, MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.storage.disk import DiskBlock
from offload.streaming.moves import HomeInUseError
from offload.streaming.shard import State
from tests.offload.interrupts import interrupted, lines_of
from tests.offload.test_keep_in_memory import OPTIMIZERS, assert_equal, assert_states_equal, backward, batch, keep
from tests.offload.zoo import WIDTH

LAYERS = 6
CUTS: list[list[int]] = [[6], [1] * 6, [3, 3], [1, 5], [2, 1, 3], [4, 1, 1]]


def layers(*, tied: bool = False, frozen: bool = False, device: str = "cpu") -> nn.Sequential:
    """Linear layers, one without parameters, dropout and norms; ``tied``: across any cut but one."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.LayerNorm(WIDTH)),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )
    if tied:
        model[4].weight = model[0].weight
    if frozen:
        model[0].bias.requires_grad_(False)
        model[3].requires_grad_(False)
    return model


def recut(model: OffloadModel, cuts: Sequence[int]) -> None:
    model._executor.recut(cuts)


def cuts_of(model: OffloadModel) -> list[int]:
    return [len(shard.layers) for shard in model._executor.shards]


def check(model: OffloadModel) -> None:
    """Every part of the engine knows the same shards, and parameters are at home."""
    executor = model._executor
    shards = executor.shards
    assert executor.streamer.shards is shards
    assert [runner.shard for runner in executor.runners] == shards
    for optimizer in executor.streamer.gradient_offload.optimizers:
        assert list(optimizer.param_blocks) == shards
    for shard in shards:
        assert shard.state is State.HOME
        assert all(s.parameter.is_set_to(shard.home_view(s)) for s in shard.own)


def addresses(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(p), p.data_ptr()) for p in model.parameters()]


moves = st.none() | st.sampled_from(CUTS)


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    recompute=st.booleans(),
    frozen=st.booleans(),
    plain_class=st.booleans(),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    steps=st.lists(
        st.tuples(moves, moves, moves, st.sampled_from(["zero", "to zeros", "accumulate"]), st.sets(st.integers(0, 1))),
        min_size=3,
        max_size=5,
    ),
)
def test_a_model_may_be_cut_otherwise_at_any_time_between_steps(
    home: str, recompute: bool, frozen: bool, plain_class: bool, name: str, steps: list[Any]
) -> None:
    kind, arguments = OPTIMIZERS[name]
    bare = layers(frozen=frozen)
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, 3, recompute)
    plain = kind(bare.parameters(), **arguments)
    ours: Any = kind(model.parameters(), **arguments) if plain_class else OffloadOptimizer(model, kind, **arguments)
    before = addresses(model)

    def move(cuts: list[int] | None) -> None:
        if cuts is not None:
            recut(model, cuts)
            assert cuts_of(model) == cuts
            check(model)

    for k, (before_forward, before_step, after_step, zero, resting) in enumerate(steps):
        move(before_forward)
        assert torch.equal(backward(bare, k), backward(model, k))
        move(before_step)
        assert_equal(bare, model)
        plain.step()
        ours.step()
        move(after_step)
        if home != "cpu":
            keep(model, {j for j in resting if j < len(model._executor.shards)})
        if zero != "accumulate":
            plain.zero_grad(zero == "zero")
            ours.zero_grad(zero == "zero")
    recut(model, [2, 2, 2])  # shards that rested in memory are in their files again
    assert_equal(bare, model)
    assert_states_equal(plain, ours)
    assert addresses(model) == before


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_tied_parameters_may_come_together_and_part(home: str, optimizer: str) -> None:
    kind, arguments = OPTIMIZERS[optimizer]
    bare = layers(tied=True)
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, 1, True)
    plain, ours = kind(bare.parameters(), **arguments), OffloadOptimizer(model, kind, **arguments)
    for k, cuts in enumerate([[6], [1] * 6, [5, 1], [2, 2, 2], [1, 5]]):
        recut(model, cuts)
        assert sum(len(shard.loans) for shard in model._executor.shards) == (cuts[0] < 5)
        for run, each in ((bare, plain), (model, ours)):
            each.zero_grad()
            backward(run, k)
        assert_equal(bare, model)
        plain.step()
        ours.step()
    assert_equal(bare, model)
    assert_states_equal(plain, ours)


def test_updates_in_backward_and_clipped_ones_follow_other_cuts(home: str) -> None:
    for more in ({"max_norm": 0.1}, {"update_in_backward": True}):
        runs = []
        for schedule in ([[3, 3]] * 4, CUTS[:4]):
            model = OffloadModel(layers(), "cpu", home, 2, True)
            ours = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, **more)  # type: ignore[arg-type]
            for k, cuts in enumerate(schedule):
                recut(model, cuts)
                ours.zero_grad()
                backward(model, k)
                ours.step()
            runs.append([p.detach().clone() for p in model.parameters()])
        for a, b in zip(*runs, strict=True):
            # The norms of a whole gradient do not depend on shards; their sum is taken in the order of parameters.
            assert torch.equal(a, b), more


def test_no_byte_is_read_written_or_allocated_for_other_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = OffloadModel(layers(), "cpu", tmp_path, 3, True)
    ours = OffloadOptimizer(model, torch.optim.AdamW)
    for k in range(2):
        ours.zero_grad()
        backward(model, k)
        ours.step()
    backward(model, 2)  # stored gradients
    ours.synchronize()
    files = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    gradients = [p.grad for p in model.parameters()]
    states = [value.data_ptr() for state in ours.state.values() for value in state.values()]
    moved: list[str] = []
    for method in ("read_into", "write"):
        monkeypatch.setattr(DiskBlock, method, lambda *_, method=method, **__: moved.append(method))
    for cuts in CUTS:
        recut(model, cuts)
    assert not moved
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == files
    assert all(a is b.grad for a, b in zip(gradients, model.parameters(), strict=True))
    assert [value.data_ptr() for state in ours.state.values() for value in state.values()] == states


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_each_shard_is_one_range_and_read_by_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[int]
) -> None:
    model = OffloadModel(layers(), "cpu", tmp_path, 2, True)
    whole = sum(p.numel() * 4 for p in model.parameters())
    recut(model, cuts)
    read: list[int] = []
    original = DiskBlock.read_into

    def counted(self: DiskBlock, destination: Tensor, offset: int = 0) -> None:
        read.append(self.nbytes)
        original(self, destination, offset)

    loads, nbytes = model.statistics().shard_loads, model.statistics().bytes_loaded
    monkeypatch.setattr(DiskBlock, "read_into", counted)
    for runner in model._executor.runners:
        runner.compares_always = False
        runner._forwards[runner._modes()] = 9  # else homes are also read to be compared
    with torch.no_grad():
        model(batch())
    assert len(read) == sum(shard.home is not None for shard in model._executor.shards)
    assert model.statistics().shard_loads - loads == len(cuts)
    assert model.statistics().bytes_loaded - nbytes == whole


def test_a_large_layer_begins_on_a_page_whatever_the_cuts(tmp_path: Path) -> None:
    sizes = (3, 200, 5, 150, 1, 1, 180)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(size, 128) for size in sizes))
    offloaded = OffloadModel(model, "cpu", DiskHome(tmp_path, keep=True), 3, True)
    places = [layer[0].offset for layer in offloaded._executor.layer_homes.places]
    assert [offset % 4096 == 0 for offset in places] == [True, True, True, True, True, False, True]
    assert places == sorted(places)
    offloaded.close()


def test_the_next_steps_are_planned_with_what_they_measure(tmp_path: Path) -> None:
    bare = layers()
    model = OffloadModel(copy.deepcopy(bare), "cpu", tmp_path, memory="1GiB")
    plain, ours = torch.optim.SGD(bare.parameters(), lr=0.1), OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    for k, cuts in enumerate([*CUTS, *CUTS]):
        recut(model, cuts)
        meter = model._executor.meter
        assert [meter.cells, meter.memory_profiles, meter.kept_profiles] == [{}, {}, {}]  # those of other shards
        for _ in range(3):  # the lean plan, then one that keeps shards in memory
            for run, each in ((bare, plain), (model, ours)):
                each.zero_grad()
                backward(run, k)
                each.step()
        ours.synchronize()
        assert_equal(bare, model)
        assert model.memory_report().shards == len(cuts)
        assert model.estimate(6).seconds > 0
        assert {int(token[1:].partition(".")[0]) for token in str(model.plan()).split()} <= {*range(len(cuts))}


def test_memory_policies_keep_their_slots(home: str) -> None:
    model = OffloadModel(
        layers(), "cpu", home, 4, checkpoint_activation=True, memory=MemoryPolicy.fixed(slots=3, graph_bytes="1MiB")
    )
    for cuts, slots in (([6], 1), ([3, 3], 2), ([1] * 6, 3)):
        recut(model, cuts)
        backward(model, 0)
        assert len(model._executor.streamer.slot_pool._all) == slots
        largest = max(shard.slot_bytes for shard in model._executor.shards)
        assert all(slot.numel() == largest for slot in model._executor.streamer.slot_pool._all)


def test_a_copy_and_a_pickle_have_the_present_cuts(home: str) -> None:
    model = OffloadModel(layers(), "cpu", home, 4, True)
    recut(model, [1, 5])
    twin = copy.deepcopy(model)
    assert cuts_of(twin) == [1, 5]
    assert torch.equal(backward(model, 0), backward(twin, 0))


def test_it_is_refused_where_the_present_shards_are_needed(home: str) -> None:
    model = OffloadModel(layers(), "cpu", home, 3, True)
    before = cuts_of(model)
    for wrong in ([], [6, 0], [2, 2], [7, -1], [3, 4]):
        with pytest.raises(ValueError, match="expected numbers of layers, at least 1 each and 6 in all"):
            recut(model, wrong)
    raised: list[str] = []

    def within(*_: Any) -> None:
        try:
            recut(model, [6])
        except RuntimeError as error:
            raised.append(str(error))

    handle = model[1].register_forward_hook(within)
    loss = model(batch()).sum()
    handle.remove()
    assert raised == ["expected no running forward or backward, but the model was to be cut otherwise within one"]
    with pytest.raises(RuntimeError, match="a forward waits for its backward"):
        recut(model, [6])
    loss.backward()
    assert cuts_of(model) == before
    recut(model, [6])
    other = OffloadModel(layers(), "cpu", home, 3, True)
    model.share_slots([[model], [other]])
    with pytest.raises(RuntimeError, match="expected slots of this model alone"):
        recut(other, [6])
    other.close()
    with pytest.raises(RuntimeError, match="was closed"):
        recut(other, [6])


def test_a_forward_that_was_dropped_needs_no_shards(home: str) -> None:
    model = OffloadModel(layers(), "cpu", home, 3, True)
    out = model(batch())
    cycle: list[Any] = [out]
    cycle.append(cycle)
    del out, cycle
    recut(model, [6])
    assert cuts_of(model) == [6]


def test_blocks_of_a_model_stay_its_shards(home: str) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = OffloadModel(Around(), "cpu", home, blocks="blocks", checkpoint_activation=True)
    with pytest.raises(RuntimeError, match="the blocks of others are their shards"):
        recut(model, [3])


@pytest.mark.parametrize("holder", ["a state_dict", "an array"])
def test_memory_that_other_code_views_is_not_taken_from_it(home: str, holder: str) -> None:
    model = OffloadModel(layers(), "cpu", home, 3, True)
    held = model.state_dict() if holder == "a state_dict" else next(model.parameters()).detach().numpy()
    with pytest.raises(HomeInUseError, match="nor be cut otherwise: other code holds views"):
        recut(model, [6])
    assert len(cuts_of(model)) == 3
    del held
    recut(model, [6])


def test_updates_still_overlap_with_the_next_forward(tmp_path: Path) -> None:
    """The references of the new shards are known: none counts as other code's."""
    model = OffloadModel(layers(frozen=True), "cpu", tmp_path, 3, True)
    ours = OffloadOptimizer(model, torch.optim.AdamW)
    for cuts in CUTS:
        backward(model, 0)
        recut(model, cuts)
        for _ in range(2):
            backward(model, 1)
            ours.step()
            gc.collect()
            # No list of shards: they refer to the parameters.
            shards = model._executor.shards
            assert all(s.pending is not None for s in shards if any(p.parameter.requires_grad for p in s.own))
            ours.zero_grad()


def test_a_gradient_file_for_each_shard_is_made_again_once_the_old_ones_are_empty(tmp_path: Path) -> None:
    model = OffloadModel(layers(), "cpu", tmp_path, 2, True)

    def files() -> list[str]:
        gc.collect()
        return sorted(path.name.partition("-")[2] for path in tmp_path.rglob("*gradients*"))

    backward(model, 0)
    assert files() == ["shard0-gradients", "shard1-gradients"]
    recut(model, [6])
    backward(model, 1)
    assert files() == ["shard0-gradients", "shard1-gradients"]  # added to where they are
    model.zero_grad()
    backward(model, 2)
    assert files() == ["shard0-gradients"]
    recut(model, [1] * 6)
    model.zero_grad()
    backward(model, 3)
    assert files() == [f"shard{j}-gradients" for j in (0, 1, 3, 4, 5)]


#: What an interrupt of other changes than cuts meets is tested with these.
CUTTING = ("engine/recut.py", "engine/shard_parts.py", "streaming/layer_homes.py", "streaming/stored_gradients.py")
CUTTING += ("engine/executor.py", "engine/references.py", "engine/cell.py", "optim/moves.py", "optim/param_block.py")
CUTTING += ("optim/disk_update.py", "streaming/slot_pool.py", "streaming/streamer.py", "telemetry/statistics.py")
CUTTING += ("optim/state_files.py", "engine/backward_passes.py")


def test_an_interrupt_at_any_line_leaves_the_old_cuts_or_the_new(tmp_path: Path) -> None:
    bare = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    bare[2].weight = bare[0].weight
    model = OffloadModel(copy.deepcopy(bare), "cpu", tmp_path, 1, True)
    plain = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
    ours = OffloadOptimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    two = ([3], [2, 1])

    def step(k: int) -> None:
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(k))
        for run, optimizer in ((bare, plain), (model, ours)):
            optimizer.zero_grad()
            run(x).square().sum().backward()
            optimizer.step()  # pending, until the cuts change

    def other() -> list[int]:
        return next(cuts for cuts in two if cuts != cuts_of(model))

    lines = []
    for k in range(2):
        step(k)
        lines += lines_of(lambda: recut(model, other()))
    seen: dict[Any, Any] = {}
    for line in lines:
        if line.file.endswith(CUTTING):
            seen.setdefault(line[:2], line)
    raised = 0
    for k, line in enumerate(seen.values()):
        step(k)
        before, after = cuts_of(model), other()
        raised += interrupted(lambda after=after: recut(model, after), line) == "raised"  # type: ignore[misc]
        assert cuts_of(model) in (before, after), line
        ours.synchronize()
        check(model)
        assert_equal(bare, model)
    assert raised > 0.5 * len(seen)
    step(0)
    assert_equal(bare, model)
    assert_states_equal(plain, ours)
