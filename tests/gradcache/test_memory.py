"""The argument ``memory`` of GradCache, and chunk sizes that are chosen by it."""

from __future__ import annotations

import copy
import itertools
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.limits
from gradcache import GradCache
from gradcache.loss import SimpleContrastiveLoss
from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from tests.gradcache.towers import energy
from tests.gradients import assert_same_step

GRADIENT_BYTES = 3 * 4 * (8 * 8 + 8)


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def step_of(models: Any, memory: Any = None, **options: Any) -> GradCache:
    return GradCache(models, 2, energy, memory=memory, **options)


def test_a_number_that_holds_no_gradients_says_the_least_that_works() -> None:
    with pytest.raises(ValueError, match=r"which is [\d.,]+ \w+ short: pass memory=\d+, the least") as raised:
        step_of([tower()], 100)
    least = int(str(raised.value).split("pass memory=")[1].split(",")[0])
    assert least > GRADIENT_BYTES
    step_of([tower()], least)(torch.randn(4, 8))


@pytest.mark.parametrize("memory", ["lots", 1.5, {"gpu": 1}])
def test_what_is_no_memory_is_named(memory: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="memory"):
        step_of([tower()], memory)


def test_the_memory_of_an_offloaded_tower_is_the_models() -> None:
    model = OffloadModel(tower(), "cpu", num_slices=3, checkpoint_activation=True)
    with pytest.raises(ValueError, match=r"that of the model, got memory=MemoryPolicy\(8\); pass it to the model"):
        step_of([model, model], 8)
    plain = tower()
    step = step_of([plain, model], "1MiB")  # of the plain one
    assert step.memory.activation_bytes(plain, step.towers) == ((1 << 20) - GRADIENT_BYTES) // 2
    step.models = [model, model]
    with pytest.raises(ValueError, match="that of the model"):
        step(torch.randn(4, 8), torch.randn(4, 8))


def test_steps_that_say_auto_share_the_machine_with_models_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.limits, "_living", weakref.WeakValueDictionary())
    monkeypatch.setattr(offload.limits, "free_bytes", lambda place: 1 << 30)
    model = tower()
    step = step_of([model], "auto")

    def kept() -> int:
        return step.memory.activation_bytes(model, step.towers)

    alone = kept()
    other = OffloadModel(copy.deepcopy(model), "cpu", memory="auto")
    assert 0 < kept() < 0.6 * alone
    other.close()
    assert kept() == alone


WIDE = 96


def wide_tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.LayerNorm(WIDE)) for _ in range(6)])


def trained(model: nn.Module, optimizer: Any, **options: Any) -> list[Tensor]:
    """The losses and parameters of a short training in chunks of 4 rows."""
    step = GradCache([model, model], 4, SimpleContrastiveLoss(), **options)
    losses = []
    for k in range(5):
        torch.manual_seed(k)
        losses.append(step(torch.randn(24, WIDE), torch.randn(24, WIDE)))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def disturb(patch: pytest.MonkeyPatch) -> None:
    """Lets clocks run unevenly, and processes seem to hold more memory than they do."""
    now, ticks = time.perf_counter, itertools.count()
    patch.setattr(time, "perf_counter", lambda: now() + next(ticks) ** 2 % 7 * 1e-3 + next(ticks))
    patch.setattr("offload.telemetry.peak.PeakMeter.rise", lambda self: 2 << 20)


@pytest.mark.parametrize(
    ("memory", "joins"),
    [
        ("4MiB", False),
        ("32MiB", False),
        (MemoryPolicy("4MiB", join_chunks=True), False),
        (MemoryPolicy("8MiB", activation_bytes="60KB"), True),
        (MemoryPolicy("8MiB", activation_bytes="7MiB"), True),
    ],
    ids=str,
)
def test_the_bits_of_a_training_depend_on_no_clock_and_no_measured_memory(
    memory: Any, joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = OffloadModel(wide_tower(), "cpu", num_slices=6, checkpoint_activation=True)
    expected = trained(plain, OffloadOptimizer(plain, torch.optim.AdamW, lr=1e-3))
    found, rows = [], set()
    for how in range(2):
        with monkeypatch.context() as patch:
            if how:
                disturb(patch)
            model = OffloadModel(wide_tower(), "cpu", tmp_path / str(how), memory=memory)
            handle = model.get_submodule("1").register_forward_pre_hook(lambda _m, x: rows.add(len(x[0])))
            found.append(trained(model, OffloadOptimizer(model, torch.optim.AdamW, lr=1e-3)))
            handle.remove()
            model.close()
    assert all(map(torch.equal, *found))
    assert (rows > {4}) == joins
    assert all(map(torch.equal, found[0], expected)) != joins


@pytest.mark.parametrize(
    "memory",
    [
        *("1MiB", {"host": "1MiB"}, "auto", 1 << 20),
        *(MemoryPolicy(boundary_bytes=100), MemoryPolicy("64MiB", join_chunks=True)),
    ],
    ids=str,
)
def test_a_memory_changes_no_bit_of_a_training_of_plain_towers(memory: Any) -> None:
    plain, ours = wide_tower(), wide_tower()
    results = [
        trained(each, torch.optim.AdamW(each.parameters(), lr=1e-3), memory=given)
        for each, given in ((plain, None), (ours, memory))
    ]
    assert all(map(torch.equal, *results))


# Input (32 bytes a row) is saved by the first layer, its output (64) by tanh, which returns what the second saves.
BYTES_PER_ROW = 32 + 64


def small_tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))


def rows_run(model: nn.Module) -> list[int]:
    runs: list[int] = []
    model.register_forward_hook(lambda _m, args, _o: runs.append(args[0].size(0)))
    return runs


@pytest.mark.parametrize("rows_that_fit", [1, 2, 5, 11, 100])
def test_auto_takes_as_many_rows_as_the_budget_holds(rows_that_fit: int) -> None:
    bare, ours = small_tower(), small_tower()
    x = torch.randn(12, 8)
    energy(bare(x)).backward()
    runs = rows_run(ours)
    GradCache([ours], "auto", energy, memory=MemoryPolicy(activation_bytes=BYTES_PER_ROW * rows_that_fit + 10))(x)
    trial, first_pass = runs[:2], runs[2]
    assert trial == [2, 4]
    assert first_pass == min(rows_that_fit, 12)
    assert_same_step([bare], [ours])


def test_the_trial_runs_once_per_shape_and_leaves_buffers_and_generators_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    once = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    once.load_state_dict(model.state_dict())
    x = torch.randn(8, 8)
    torch.manual_seed(1)
    once(x)
    expected = torch.get_rng_state()
    torch.manual_seed(1)
    step = GradCache([model], "auto", energy, memory=MemoryPolicy(activation_bytes=1 << 20))
    step(x)
    assert torch.equal(torch.get_rng_state(), expected)
    torch.testing.assert_close(model[1].running_mean, once[1].running_mean)
    runs = rows_run(model)
    step(x)
    assert runs == [8, 8]


def test_budget_below_one_row_and_other_misuse_are_named() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=f"one row keeps {BYTES_PER_ROW}"):
        GradCache([small_tower()], "auto", energy, memory=MemoryPolicy(activation_bytes=20))(x)
    with pytest.raises(ValueError, match="activation_bytes=0"):
        GradCache([small_tower()], "auto", energy, memory=MemoryPolicy(activation_bytes=0))
    with pytest.raises(ValueError, match="at least 1 row"):
        GradCache([small_tower()], "large", energy)


def test_without_a_budget_half_of_the_free_memory_is_taken() -> None:
    model = small_tower()
    runs = rows_run(model)
    GradCache([model, model], ["auto", 2], energy)(torch.randn(6, 8), torch.randn(4, 8))
    assert runs == [2, 4, 6, 2, 2, 6, 2, 2]


def test_auto_over_an_offloaded_model_counts_the_shard_that_keeps_most() -> None:
    """Linear and tanh save their inputs or outputs: 32 + 64 bytes a row in the first shard, 64 in the second."""
    bare = small_tower()
    layers = copy.deepcopy(bare)
    memory = MemoryPolicy(activation_bytes=5 * BYTES_PER_ROW + 10)
    model = OffloadModel([layers[:2], layers[2:]], "cpu", memory=memory)
    x = torch.randn(12, 8)
    runs = rows_run(layers[0])
    assert [model.activation_bytes(x[:rows]) for rows in (1, 4)] == [BYTES_PER_ROW, 4 * BYTES_PER_ROW]
    runs.clear()
    GradCache([model], "auto", energy)(x)
    # The third tells whether two of them may run together; backward runs the last chunk first.
    assert runs == [2, 4, 5, 5, 5, 2, 2, 5, 5]
    energy(bare(x)).backward()
    assert_same_step([bare], [layers])


def test_measuring_an_offloaded_model_leaves_no_trace_and_measures_a_frozen_one_too() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    layers.requires_grad_(False)
    before = copy.deepcopy(layers.state_dict())
    model = OffloadModel(layers, "cpu", num_slices=4, memory=MemoryPolicy.fixed(activation_bytes=4 * 64))
    x = torch.randn(12, 8)
    state = torch.get_rng_state()
    assert model.activation_bytes(x) == 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())
