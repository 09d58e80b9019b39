"""What is replaced after wrapping is what runs from then on; a recomputation never runs anything but its forward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipe import Pipe
from pipe.batchnorm import DeferredBatchNorm
from pipe.checkpoint import checkpoint
from tests.pipe.test_pipe import MODES, assert_same
from tests.pipe.turns import Turner

WIDTH = 4


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH)))


def pipe(mode: str = "except_last", chunks: int = 2) -> Pipe:
    return Pipe(layers(), [1, 2], ["cpu", "cpu"], chunks=chunks, checkpoint=mode)


class LowRank(nn.Module):
    """Adds a trainable product of two small matrices to a layer that is frozen."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(WIDTH, 2))
        self.b = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a @ self.b  # type: ignore[no-any-return]


def by_name(model: Pipe) -> None:
    setattr(model, "0", LowRank(model[0]))  # type: ignore[arg-type]


def inside_a_layer(model: Pipe) -> None:
    model[2][0] = LowRank(model[2][0])  # type: ignore[index, operator, arg-type]


def in_the_dictionary(model: Pipe) -> None:
    model._modules["1"] = nn.Identity()


CHANGES: list[Callable[[Pipe], None]] = [by_name, inside_a_layer, in_the_dictionary]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_replaced_layer_is_what_runs(change: Callable[[Pipe], None], used: bool, step: bool, mode: str) -> None:
    model = pipe(mode, chunks=1 if not step else 2)
    x = torch.randn(6, WIDTH)
    if used:
        model(x)
    change(model)
    model.double()
    x = x.double()
    bare = nn.Sequential(*copy.deepcopy(list(model)))
    parts = x.split(3) if step else [x]
    loss = sum(bare(part).square().mean() / len(parts) for part in parts)
    assert isinstance(loss, Tensor)
    loss.backward()
    if step:
        model.train_step(x, torch.zeros_like(x), nn.MSELoss())
    else:
        model(x).square().mean().backward()
    assert [type(layer) for part in model.partitions for layer in part] == [type(layer) for layer in bare]
    assert list(model.state_dict()) == list(bare.state_dict())
    assert_same(model, bare, x, x)


def test_hooks_of_a_partition_stay_when_a_layer_of_it_is_replaced() -> None:
    model, calls = pipe(), []
    model.partitions[0].register_forward_hook(lambda *_: calls.append(1))
    by_name(model)
    model(torch.randn(4, WIDTH))
    assert len(calls) == 2


def test_an_in_place_layer_that_is_put_in_later_leaves_the_input_alone() -> None:
    model = Pipe(nn.Sequential(nn.Sequential(nn.Tanh()), nn.Linear(WIDTH, WIDTH)), [1, 1], chunks=2)
    model[0][0] = nn.ReLU(inplace=True)  # type: ignore[index, operator]
    x = torch.randn(4, WIDTH)
    before = x.clone()
    model(x).sum().backward()
    assert torch.equal(x, before)


@pytest.mark.parametrize("chunks", [2, 3])
def test_a_deferred_batch_norm_that_is_put_in_later_counts_mini_batches(chunks: int) -> None:
    model, bare = pipe(chunks=chunks), nn.BatchNorm1d(WIDTH)
    model.partitions[1][1][0] = DeferredBatchNorm(WIDTH, chunks=99)  # type: ignore[index, operator]
    seen: list[Tensor] = []
    model[2].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(torch.randn(6, WIDTH))
    bare(torch.cat(seen))
    norm = model[2][0]  # type: ignore[index]
    torch.testing.assert_close(norm.running_mean, bare.running_mean)
    torch.testing.assert_close(norm.running_var, bare.running_var)
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.add_module("head", nn.Linear(WIDTH, 1)), "make a new Pipe"),
        (lambda m: delattr(m, "1"), "make a new Pipe"),
        (lambda m: m.partitions[0].append(nn.Tanh()), "replaced in its partitions"),
        (lambda m: m.partitions[0].__setitem__(0, nn.Tanh()), "replaced in its partitions"),
        (lambda m: setattr(m, "1", None), r"\['0', '1', '2'\], got \['0', '2'\]"),
        (lambda m: setattr(m, "1", Turner(nn.Tanh())), "layers that take turns"),
    ],
)
def test_other_changes_are_refused_before_a_layer_runs(change: Callable[[Pipe], object], message: str) -> None:
    model = pipe()
    change(model)
    x = torch.randn(4, WIDTH)
    with model.recording() as trace:
        with pytest.raises(RuntimeError, match=message):
            model(x)
        with pytest.raises(RuntimeError, match=message):
            model.train_step(x, x, nn.MSELoss())
    assert not trace


@pytest.mark.parametrize(
    "own",
    [
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_buffer("steps", torch.zeros(())),
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(()))),
    ],
)
def test_attributes_of_a_sequential_besides_layers_are_refused(own: Callable[[nn.Module], object]) -> None:
    module = layers()
    own(module)
    with pytest.raises(TypeError, match="of layers alone"):
        Pipe(module, [3])


def test_a_layer_that_is_replaced_between_forward_and_backward_runs_again_in_its_own_recomputation() -> None:
    """The stage of an earlier forward keeps the layers that it ran, as a graph would."""
    model = pipe("always")
    bare = copy.deepcopy(model[0])
    old, x = model[0], torch.randn(4, WIDTH)
    y = model(x)
    setattr(model, "0", nn.Linear(WIDTH, WIDTH))
    later = model(x)
    y.sum().backward()
    assert old.weight.grad is not None
    assert model[0].weight.grad is None
    later.sum().backward()
    assert model[0].weight.grad is not None
    assert torch.equal(old.weight, bare.weight)  # type: ignore[arg-type]


def test_parameters_of_a_functional_call_are_not_exchanged_in_silence() -> None:
    model = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), [1, 1], chunks=2, checkpoint="always")
    others = {name: torch.randn_like(p, requires_grad=True) for name, p in model.named_parameters()}
    y = torch.func.functional_call(model, others, (torch.randn(4, WIDTH),))
    with pytest.raises(RuntimeError, match=r"place of parameter '0\.weight', parameter '0\.bias'"):
        y.sum().backward()


def test_a_parameter_that_only_moved_is_the_same() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    y = checkpoint(layer, torch.randn(2, WIDTH))
    layer.weight.data = torch.zeros(WIDTH, WIDTH)
    y.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("more", [3, 7])
def test_the_number_of_micro_batches_can_change_between_calls(more: int) -> None:
    model = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), [1, 1], ["cpu", "cpu"], chunks=2)
    x = torch.randn(6, WIDTH)
    model(x)
    model.chunks = more
    with model.recording() as trace:
        torch.testing.assert_close(model(x), model[1](model[0](x)))
    assert len(trace) == 2 * min(more, 6)
    model.chunks = 1
    model.train_step(x, x, nn.MSELoss())
