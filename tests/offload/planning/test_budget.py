"""A budget in bytes becomes a layout that keeps it, or an error that says what would."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from offload import OffloadModel, OffloadOptimizer
from offload.arguments import layer_bytes
from offload.engine.shape_inference import inferred_boundaries
from offload.planning.budget import fit, parse_bytes
from tests.offload.zoo import WIDTH

pytestmark = pytest.mark.filterwarnings("ignore:OffloadModel.memory_budget=:DeprecationWarning")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(5, 5), ("5", 5), ("2GiB", 2 << 30), ("1.5 KiB", 1536), ("3MB", 3_000_000), ("1tib", 1 << 40), ("7b", 7)],
)
def test_bytes_are_read_as_people_write_them(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("2 gallons", ValueError),
        ("", ValueError),
        ("-1GiB", ValueError),
        (0, ValueError),
        (1.5, TypeError),
        (True, TypeError),
    ],
)
def test_what_is_no_number_of_bytes_is_named(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="memory_budget="):
        parse_bytes(value)  # type: ignore[arg-type]


@example(sizes=[1, 0], budget=3, shards=None)
@example(sizes=[9, 1], budget=30, shards=2)
@given(
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=12),
    budget=st.integers(1, 3000),
    shards=st.none() | st.integers(1, 12),
)
def test_a_layout_fits_or_the_error_says_what_does(sizes: list[int], budget: int, shards: int | None) -> None:
    shards = None if shards is None else min(shards, len(sizes))
    try:
        layout = fit(sizes, sizes, budget, shards=shards)
    except ValueError as error:
        message = str(error)
        assert "bytes short" in message
        if "the least that fits" in message:
            least = int(message.split("memory_budget=")[2].split()[0])
            fit(sizes, sizes, least, shards=None)
            if least > 1:
                with pytest.raises(ValueError, match="short"):
                    fit(sizes, sizes, least - 1, shards=None)
        else:
            fit(sizes, sizes, budget, shards=int(message.split("num_slices=")[2].split()[0]))
        return
    blocks, first = [], 0
    for cut in layout.cuts:
        blocks.append(sum(sizes[first : first + cut]))
        first += cut
    assert first == len(sizes)
    largest = max(blocks)
    assert layout.boundary_bytes >= 8
    # One set of gradients is summed while that of the next shard is on its way home.
    gradients = max((sum(pair) for pair in itertools.pairwise(blocks)), default=largest)
    assert layout.slots * largest + gradients + layout.boundary_bytes == budget
    assert min(2, len(blocks)) <= layout.slots <= len(blocks)


def model_of(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def test_a_larger_input_is_refused_before_anything_moves_and_one_that_ran_never(tmp_path: Path) -> None:
    model = OffloadModel(model_of(4), "cpu", tmp_path, num_slices=4, checkpoint_activation=True, memory_budget=4992)
    x = torch.randn(12, WIDTH)
    model(x).sum().backward()
    loads = model.statistics().shard_loads
    with pytest.raises(ValueError, match="use more micro-batches"):
        model(torch.randn(13, WIDTH))
    with pytest.raises(ValueError, match="use more micro-batches"):
        model.plan(13)
    assert model.statistics().shard_loads == loads
    for _ in range(2):
        model(x).sum().backward()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_first_input_that_is_too_large_is_refused_before_anything_moves(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """Layers of torch tell its size without computing."""
    wide = nn.Sequential(
        nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 2), nn.LayerNorm(2) if dtype else nn.BatchNorm1d(2)
    )
    before = {name: value.clone() for name, value in wide.state_dict().items()}
    model = OffloadModel(
        wide, "cpu", tmp_path, num_slices=4, checkpoint_activation=True, memory_budget=4992, param_dtype=dtype
    )
    few = 24 if dtype else 12
    large, generator = torch.randn(2 * few, 2), torch.get_rng_state()
    with pytest.raises(ValueError, match="use more micro-batches"):
        model(large)
    assert model.statistics().shard_loads == 0
    assert torch.equal(torch.get_rng_state(), generator)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    model(torch.randn(few, 2)).sum().backward()


def counting_calls(calls: list[Any], x: torch.Tensor) -> torch.Tensor:
    calls.append(x)
    return x * torch.rand(())


@pytest.mark.parametrize("where", ["class", "hook", "forward", "activation", "patched class", "compiled"])
def test_code_that_could_notice_it_is_not_run_to_learn_sizes(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    layer: nn.Module = nn.Linear(WIDTH, WIDTH)
    if where == "class":
        layer = Doubled(WIDTH, WIDTH)
        layer.calls = calls
    elif where == "hook":
        layer.register_forward_hook(lambda module, args, output: calls.append(output))
    elif where == "forward":
        layer.forward = partial(counting_calls, calls)
    elif where == "activation":
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, activation=partial(counting_calls, calls))
    elif where == "patched class":
        monkeypatch.setattr(nn.Linear, "forward", lambda module, x: counting_calls(calls, x))
    else:
        layer.compile(backend=lambda graph, inputs: partial(counting_calls, calls))
    bare = nn.Sequential(nn.Identity(), layer)
    model = OffloadModel(bare, "cpu", tmp_path, num_slices=2, checkpoint_activation=True, memory_budget=1 << 16)
    call, generator = ((torch.randn(2, WIDTH),), {}), torch.get_rng_state()
    assert inferred_boundaries([[module] for module in model.children()], call, None) == [8 * WIDTH]
    assert not calls
    assert torch.equal(torch.get_rng_state(), generator)


class Doubled(nn.Linear):
    """Notices that it was called."""

    calls: list[Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(x)
        return super().forward(x)


def test_attributes_of_layers_are_not_copied_to_learn_sizes(tmp_path: Path) -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    first.lock = threading.Lock()  # cannot be copied
    second.derived = second.weight * 2
    call = (torch.randn(2, WIDTH),), {}
    assert inferred_boundaries([[first], [second]], call, None) == [8 * WIDTH] * 2


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(depth=6, budget=5632, rows=60, microbatches=5)
@example(depth=2, budget=3840, rows=57, microbatches=6)
@given(
    depth=st.integers(2, 12),
    budget=st.integers(2_000, 20_000),
    rows=st.integers(1, 60),
    microbatches=st.integers(1, 6),
)
def test_training_stays_within_the_budget_and_is_exact(
    tmp_path: Path, depth: int, budget: int, rows: int, microbatches: int
) -> None:
    bare = model_of(depth)
    model = OffloadModel(
        copy.deepcopy(bare),
        "cpu",
        tmp_path,
        num_slices=None,
        checkpoint_activation=True,
        num_microbatches=microbatches,
        memory_budget=budget,
    )
    x = torch.randn(rows, WIDTH)
    cell = -(-rows // min(rows, microbatches)) * WIDTH * 4
    if 4 * cell > model._executor.policy.boundary_bytes // 2:
        with pytest.raises(ValueError, match="use more micro-batches"):
            model(x).pow(2).sum().backward()
        return
    model(x).pow(2).sum().backward()
    assert model.statistics().peak_device_bytes <= model.estimate(rows).peak_bytes["device"] <= budget
    bare(x).pow(2).sum().backward()
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spare=st.integers(1_000, 1_500_000),
    events=st.lists(st.integers(1, 6_000) | st.sampled_from(["optimizer", "no optimizer"]), min_size=2, max_size=12),
    microbatches=st.integers(1, 3),
)
def test_a_size_that_once_ran_never_fails_later(
    tmp_path: Path, spare: int, events: list[int | str], microbatches: int
) -> None:
    """Whatever ran in between or was refused, and whatever optimizers were made and ended."""
    model = OffloadModel(
        model_of(4),
        "cpu",
        tmp_path,
        num_slices=4,
        num_slots=2,
        checkpoint_activation=True,
        num_microbatches=microbatches,
        memory_budget=4 * layer_bytes([nn.Linear(WIDTH, WIDTH)])[0] + spare,
    )
    ran: set[int] = set()
    optimizer: OffloadOptimizer | None = None
    for event in [*events, *(event for event in events if isinstance(event, int))]:
        if isinstance(event, str):
            optimizer = None
            gc.collect()
            if event == "optimizer":
                with contextlib.suppress(ValueError):
                    optimizer = OffloadOptimizer(model, torch.optim.AdamW)
            continue
        try:
            model(torch.randn(event, WIDTH)).sum().backward()
        except ValueError:
            assert event not in ran
            continue
        ran.add(event)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def test_a_size_that_was_refused_takes_nothing_from_an_optimizer(tmp_path: Path) -> None:
    model = OffloadModel(model_of(4), "cpu", tmp_path, 4, num_slots=2, checkpoint_activation=True, memory_budget="1MiB")
    with pytest.raises(ValueError, match="use more micro-batches"):
        model(torch.randn(5000, WIDTH))
    assert OffloadOptimizer(model, torch.optim.AdamW) is not None


def test_a_large_budget_makes_slots_a_cache(tmp_path: Path) -> None:
    model = OffloadModel(model_of(6), "cpu", tmp_path, num_slices=6, checkpoint_activation=True, memory_budget="1MiB")
    model(torch.randn(3, WIDTH)).sum().backward()
    assert model.statistics().shard_loads == 6


def test_a_budget_that_cannot_hold_the_model_says_what_can() -> None:
    # Two slots, two sets of gradients, and the smallest boundaries that move.
    need = 4 * layer_bytes([nn.Linear(WIDTH, WIDTH)])[0] + 8
    with pytest.raises(ValueError, match=rf"short of slots.*least that fits is memory_budget={need} .*split layer 0"):
        OffloadModel(model_of(4), "cpu", num_slices=None, checkpoint_activation=True, memory_budget=1000)
    with pytest.raises(ValueError, match=rf"num_slices=4 needs {need:,} bytes"):
        OffloadModel(model_of(4), "cpu", num_slices=2, checkpoint_activation=True, memory_budget=need)


def test_the_constructor_refuses_what_leaves_no_input_a_boundary(tmp_path: Path) -> None:
    need = 4 * layer_bytes([nn.Linear(1, 1)])[0]

    def make(budget: int) -> OffloadModel:
        layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
        return OffloadModel(layers, "cpu", tmp_path, num_slices=3, checkpoint_activation=True, memory_budget=budget)

    with pytest.raises(ValueError, match="memory_budget="):
        make(need + 7)
    model = make(need + 2 * 4 * 4)
    model(torch.randn(1, 1)).sum().backward()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"memory_budget": "1MiB"}, "checkpoint_activation=True"),
        ({"memory_budget": "1MiB", "checkpoint_activation": True, "boundary_bytes": 5}, "do not pass boundary_bytes"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        OffloadModel(model_of(4), "cpu", **arguments)  # type: ignore[arg-type]


def test_an_estimate_counts_what_a_step_then_moves(tmp_path: Path) -> None:
    model = OffloadModel(model_of(6), "cpu", tmp_path, num_slices=6, checkpoint_activation=True, num_microbatches=3)
    with pytest.raises(RuntimeError, match="run one training step first"):
        model.estimate(9)
    model(torch.randn(9, WIDTH)).sum().backward()
    before = model.statistics()
    estimate = model.estimate(9)
    model(torch.randn(9, WIDTH)).sum().backward()
    after = model.statistics()
    assert estimate.bytes_loaded == after.bytes_loaded - before.bytes_loaded
    assert estimate.bytes_stored == after.bytes_stored - before.bytes_stored
    assert estimate.seconds >= estimate.compute_seconds > 0
    assert after.peak_device_bytes <= estimate.peak_bytes["device"]


def test_an_optimizer_on_disk_has_its_buffers_from_the_budget_or_is_refused(tmp_path: Path) -> None:
    def make(home: Path | str, budget: int) -> OffloadModel:
        layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        return OffloadModel(layers, "cpu", home, 4, num_slots=2, checkpoint_activation=True, memory_budget=budget)

    fixed = make(tmp_path, 4 << 20)
    taken = (4 << 20) - fixed._executor.policy.boundary_bytes
    model = make(tmp_path, taken + (1 << 20))
    steps = model._executor.steps
    before = steps._budget_bytes
    optimizer = OffloadOptimizer(model, torch.optim.AdamW)
    assert 0 < steps.reserved_bytes <= model._executor.policy.boundary_bytes // 2
    assert steps._budget_bytes == before - steps.reserved_bytes // 2
    for _ in range(2):
        model(torch.randn(4, 256)).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    io_buffers = [*optimizer.buffer_pool._idle, *optimizer.buffer_pool._prefetched]
    assert 0 < sum(io_buffer._memory.numel() for io_buffer in io_buffers) <= steps.reserved_bytes
    assert model.estimate(4).peak_bytes["staging"] >= steps.reserved_bytes
    del optimizer, io_buffers
    gc.collect()
    assert steps.reserved_bytes == 0
    small = make(tmp_path, taken + 100_000)
    with pytest.raises(ValueError, match="optimizer states are on disk: their buffers take at least"):
        OffloadOptimizer(small, torch.optim.AdamW)
    assert OffloadOptimizer(make("cpu", taken + 100_000), torch.optim.AdamW) is not None
