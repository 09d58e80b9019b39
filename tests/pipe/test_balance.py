"""Balances come from each layer alone, on any device, and leave the model as it was."""

import copy
from functools import partial
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipe import Pipe
from pipe.balance import balance_by_size, balance_by_time, profile
from pipe.balance.profile import profile_sizes, profile_times
from tests.pipe.test_pipe import Pop, Stash

CPU = torch.device("cpu")


class Costly(nn.Module):
    def __init__(self, clock: Any, seconds: Any) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def __deepcopy__(self, memo: Any) -> Any:
        return Costly(self.clock, self.seconds)

    def forward(self, x: Any) -> Any:
        self.clock.now += next(self.seconds)
        return x * 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that layers set forward."""
    fake = SimpleNamespace(now=0.0, perf_counter=lambda: fake.now)
    monkeypatch.setattr(profile, "time", fake)
    return fake


def test_balance_by_time_levels_the_times(clock: Any) -> None:
    model = nn.Sequential(*(Costly(clock, repeat(seconds)) for seconds in (1, 1, 1, 1, 1, 6)))
    assert balance_by_time(2, model, torch.ones(1, 1), timeout=0, device="cpu") == [5, 1]
    assert balance_by_time(3, model, torch.ones(1, 1), timeout=0, device="cpu") == [2, 3, 1]


def test_times_are_the_median_of_the_rounds_that_fit_after_a_first(clock: Any) -> None:
    seconds = iter([100, 1, 9, 2])

    model = nn.Sequential(Costly(clock, seconds))
    assert profile_times(model, torch.ones(1, 1), 112, CPU) == [2_000_000]
    assert next(seconds, None) is None


@pytest.mark.parametrize("by", ["time", "size"])
def test_defect_pipe_13_models_with_skips_and_in_place_layers_can_be_balanced_without_a_gpu(by: Any) -> None:
    model = nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        Stash(),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        Pop(),
        nn.ReLU(inplace=True),
    )
    x = torch.randn(8, 4)
    before = x.clone()
    if by == "time":
        balance = balance_by_time(3, model, x, timeout=0, device="cpu")
    else:
        balance = balance_by_size(3, model, x, chunks=2, device="cpu")
    assert sum(balance) == len(model)
    assert torch.equal(x, before)
    Pipe(model, balance, ["cpu"] * 3, chunks=2)(x).sum().backward()


@pytest.mark.parametrize("by", [balance_by_time, balance_by_size])
def test_the_model_and_the_generators_are_as_before(by: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    model[0].weight.grad = torch.ones(4, 4)
    x = torch.randn(4, 4)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    by(2, model, x, device="cpu", **({"timeout": 0} if by is balance_by_time else {}))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[1].training
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sizes_are_parameters_times_scale_and_the_activations_of_one_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Identity())
    x = torch.zeros(8, 16)
    rows, parameters = 2, 4 * 16 * 32
    assert profile_sizes(model, x, 4, 3.0, CPU) == [
        # The linear layer saves its input and returns its output; its weight counts as a parameter, not as saved.
        3 * parameters + 4 * rows * (16 + 32),
        # Tanh saves what it returns.
        4 * rows * 32,
        4 * rows * 32,
    ]


def test_what_is_stashed_counts_where_it_is_stashed() -> None:
    sizes = profile_sizes(nn.Sequential(Stash(), Pop()), torch.zeros(4, 8), 1, 2.0, CPU)
    assert sizes[0] == 2 * 4 * 4 * 8


def test_integer_inputs_and_layers_without_parameters_are_measured() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Identity())
    assert len(profile_times(model, torch.arange(3), 0, CPU)) == 2
    assert profile_sizes(model, torch.arange(3), 1, 2.0, CPU)[0] > 2 * 10 * 4 * 4


@pytest.mark.parametrize("by", [balance_by_time, balance_by_size])
def test_bad_arguments_are_named_before_anything_is_measured(by: Any) -> None:
    with pytest.raises(TypeError, match=r"expected nn\.Sequential"):
        by(1, nn.Linear(1, 1), torch.ones(1, 1))
    with pytest.raises(ValueError, match="from 1 to 2 partitions"):
        by(3, nn.Sequential(nn.Identity(), nn.Identity()), torch.ones(1, 1))


class Keeps(nn.Linear):
    """Keeps its output in a list, for a plot."""

    def forward(self, x: Any) -> Any:
        self.kept: list[Any] = [super().forward(x)]
        return self.kept[0]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
        lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
        lambda: Keeps(4, 4),
    ],
)
@pytest.mark.parametrize("by", [partial(balance_by_time, timeout=0), balance_by_size], ids=["time", "size"])
def test_layers_that_keep_a_tensor_with_a_graph_can_be_balanced_after_a_forward(by: Any, make: Any) -> None:
    model, x = nn.Sequential(make(), nn.Tanh(), make()), torch.randn(3, 4)
    model(x).sum().backward()
    kept = [value for layer in model for value in vars(layer).values()]
    assert sum(by(2, model, x, device="cpu")) == 3
    assert all(a is b for a, b in zip(kept, (v for layer in model for v in vars(layer).values()), strict=True))
