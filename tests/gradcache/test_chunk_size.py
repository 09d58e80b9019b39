"""Chunk sizes from memory: as many rows as fit, found out without a trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradcache import GradCache
from offload import MemoryPolicy, OffloadModel
from tests.gradcache.towers import assert_same_gradients, energy

# Input (32 bytes a row) is saved by the first layer, its output (64) by tanh, which returns what the second saves.
BYTES_PER_ROW = 32 + 64


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))


def rows_run(model: nn.Module) -> list[int]:
    runs: list[int] = []
    model.register_forward_hook(lambda _m, args, _o: runs.append(args[0].size(0)))
    return runs


@pytest.mark.parametrize("rows_that_fit", [1, 2, 5, 11, 100])
def test_auto_takes_as_many_rows_as_the_budget_holds(rows_that_fit: int) -> None:
    bare, ours = tower(), tower()
    x = torch.randn(12, 8)
    energy(bare(x)).backward()
    runs = rows_run(ours)
    GradCache([ours], "auto", energy, memory=MemoryPolicy(activation_bytes=BYTES_PER_ROW * rows_that_fit + 10))(x)
    trial, first_pass = runs[:2], runs[2]
    assert trial == [2, 4]
    assert first_pass == min(rows_that_fit, 12)
    assert_same_gradients([bare], [ours])


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
        GradCache([tower()], "auto", energy, memory=MemoryPolicy(activation_bytes=20))(x)
    with pytest.raises(ValueError, match="activation_bytes=0"):
        GradCache([tower()], "auto", energy, memory=MemoryPolicy(activation_bytes=0))
    with pytest.raises(ValueError, match="at least 1 row"):
        GradCache([tower()], "large", energy)


def test_without_a_budget_half_of_the_free_memory_is_taken() -> None:
    model = tower()
    runs = rows_run(model)
    GradCache([model, model], ["auto", 2], energy)(torch.randn(6, 8), torch.randn(4, 8))
    assert runs == [2, 4, 6, 2, 2, 6, 2, 2]


def test_auto_over_an_offloaded_model_counts_the_shard_that_keeps_most() -> None:
    """Linear and tanh save their inputs or outputs: 32 + 64 bytes a row in the first shard, 64 in the second."""
    bare = tower()
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
    for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


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
