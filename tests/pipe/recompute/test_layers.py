"""Layers that run again find buffers, attributes and input as their first run did, and leave no trace of the second."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from pipe.checkpoint import checkpoint
from pipe.recompute.input_writes import InputWrites
from pipe.recompute.replay import Layers, Replay, trial
from tests.gradients import assert_same_step

WIDTH = 6
LARGE = 1 << 15


class Recurrent(nn.Module):
    """Draws, counts its calls in a buffer and in attributes, and carries a hidden state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("absent", None)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.state: Tensor | None = None
        self.calls = 0
        self.seen: list[int] = []
        self.by_name: dict[str, int] = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x if self.state is None else x + self.state))
        self.state = y.detach()
        self.calls += 1
        self.total += 1
        self.seen.append(self.calls)
        self.by_name["calls"] += 1
        return y * float(self.total)

    def held(self) -> list[Any]:
        return [self.state, self.calls, self.seen.copy(), self.by_name.copy(), float(self.total)]


def by_checkpoints(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x)
        return x

    return run


def by_offload(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return OffloadModel(model, "cpu", num_slices=len(model), checkpoint_activation=True)


@pytest.mark.parametrize("wrap", [by_checkpoints, by_offload])
def test_a_hidden_state_enters_the_recomputation_as_it_entered_the_forward(wrap: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(Recurrent(), nn.Linear(WIDTH, WIDTH), Recurrent())
    ours = copy.deepcopy(bare)
    run = wrap(ours)
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        for call in (bare, run):
            (call(x).sum() + call(x * 2).pow(2).sum()).backward()
        assert_same_step([bare], [ours])
        for k in (0, 2):
            assert str(bare[k].held()) == str(ours[k].held())  # type: ignore[operator]


@pytest.mark.parametrize("wrap", [by_checkpoints, by_offload])
def test_a_tensor_that_is_changed_in_place_and_is_no_buffer_is_refused(wrap: Callable[..., Any]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.mul_(2)

    run = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled()))
    with pytest.raises(RuntimeError, match=r"attribute 'scale', a tensor .* in place"):
        run(torch.randn(2, WIDTH))


def test_a_buffer_is_freed_with_the_last_forward_that_read_it() -> None:
    model = Recurrent()
    run(model, Layers(model), torch.zeros(1, WIDTH))
    read = weakref.ref(model.table)
    model.table = torch.ones(4)
    run(model, Layers(model), torch.zeros(1, WIDTH))
    gc.collect()
    assert read() is None


# --- large buffers ----------------------------------------------------------------------------------------------------


def replace(module: Any) -> None:
    module.table = module.table + 1


def give_other_memory(module: Any) -> None:
    module.table.data = module.table + 1


library = torch.library.Library("buffer_tests", "DEF")
library.define("increment(Tensor x) -> Tensor")
library.impl("increment", lambda x: torch.from_numpy(x.numpy().__iadd__(1)).sum(), "CPU")

WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda module: module.table.add_(1),
    "through a view": lambda module: module.table.view(2, -1)[1].add_(1),
    "in a list": lambda module: torch._foreach_add_([module.table], 1),
    "as a result": lambda module: torch.add(module.table, 1, out=module.table),
    "replaced": replace,
    "other memory": give_other_memory,
    "through data": lambda module: module.table.data.mul_(2).add_(1),
    "unannounced": lambda module: torch.ops.buffer_tests.increment(module.table),
}


class Table(nn.Module):
    """Reads a large buffer, and writes it in some of its forwards."""

    def __init__(self, write: Any = None, calls: Any = ()) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(LARGE))
        self.write, self.calls, self.count = write, calls, -1

    def forward(self, x: Any = None) -> Any:
        self.count += 1
        value = self.table.sum() + self.table[3]
        if self.count in self.calls:
            with torch.no_grad():
                self.write(self)
        return value.item()


def run(module: Any, layers: Layers, *args: Any) -> tuple[Any, Replay]:
    replay = layers.begin()
    with replay.first():
        value = module(*args)
    return value, replay


@pytest.mark.parametrize("calls", [(0, 1, 2, 3), (0, 2)])
@pytest.mark.parametrize("how", WRITES)
def test_each_repeated_forward_meets_the_large_buffer_that_it_met(how: str, calls: Any) -> None:
    """What writes without counting a version is found out by its first call."""
    module, plain = Table(WRITES[how], calls), Table(WRITES[how], calls)
    layers, expected = Layers(module), [plain() for _ in range(4)]
    runs = [run(module, layers) for _ in range(4)]
    assert [value for value, _ in runs] == expected
    after = module.table.clone()
    assert torch.equal(after, plain.table)
    for k, (value, replay) in enumerate(runs):
        module.count = k - 1
        with replay.again():
            assert module() == value
        assert torch.equal(module.table, after)


def test_forwards_that_begin_to_write_a_large_buffer_are_refused_once() -> None:
    module = Table(WRITES["in place"], (1, 2))
    layers = Layers(module)
    _, first = run(module, layers)
    with pytest.raises(RuntimeError, match="run the step again"):
        run(module, layers)
    before = module.table.clone()
    value, replay = run(module, layers)
    with replay.again():
        assert torch.equal(module.table, before)
        module.count = 1
        assert module() == value
    with pytest.raises(RuntimeError, match="buffer 'table' of the layer was written in place"):
        first.check("the layer")


@pytest.mark.parametrize("how", WRITES)
def test_a_trial_leaves_no_trace_in_a_large_buffer(how: Any) -> None:
    module = Table(WRITES[how], range(10))
    table = module.table
    with trial([Layers(module)]):
        module()
        assert module.count == 0
    assert module.count == -1, "attributes are those of before, too"
    assert module.table is table
    assert torch.equal(table, torch.zeros(LARGE))


def test_a_compiled_module_s_large_buffers_have_their_values_again() -> None:
    module = Table()

    def forward(x: Any) -> Any:
        module.table.add_(1)
        return x + module.table.sum()

    module.forward = forward
    module.compile(backend="aot_eager")
    first, replay = run(module, Layers(module), torch.zeros(()))
    for _ in range(2):
        with replay.again():
            assert module(torch.zeros(())) == first
    assert torch.equal(module.table, torch.ones(LARGE))


def test_a_buffer_of_inference_mode_counts_no_versions_and_is_kept() -> None:
    module, x = Recurrent(), torch.zeros(1, WIDTH)
    with torch.inference_mode():
        module.total = module.total + 1
        first, replay = run(module, Layers(module), x)
    with replay.again(), torch.inference_mode():
        assert torch.equal(module(x), first)
    assert module.total == 2


# --- input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_a_write_that_another_tensor_would_see_is_refused_and_no_other(shared: bool) -> None:
    storage = torch.ones(6)
    pair = (storage[:4], storage[3:] if shared else storage[4:])
    refused = pytest.raises(RuntimeError, match="shares memory") if shared else contextlib.nullcontext()
    with refused, InputWrites("layer 3").survived(pair, None) as given:
        given[0].mul_(0.5)
    assert torch.equal(storage, torch.ones(6))
