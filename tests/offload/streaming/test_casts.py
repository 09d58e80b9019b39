"""Keep mode under autocast: what autograd saves of a casted weight is a reference, too."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from offload import MemoryPolicy, OffloadModel
from tests.offload.zoo import reference

WIDTH = 24
SHARDS = 3


class Conv(nn.Module):
    """A convolution with dense strides of its own, over rows seen as pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.view(-1, 6, 2, 2)).flatten(1)


class ByHand(nn.Module):
    """Casts by itself, a part of its weight only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() @ self.weight[:, ::2].double().t()).to(x.dtype)


class Conjugate(nn.Module):
    """Computes with the conjugate of its weight, which is a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) * self.weight.conj().sum(0) * self.weight.conj()[0]).abs().to(x.dtype)


class WritesAfterUse(nn.Module):
    """Writes its weight after a cast of it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        with torch.no_grad():
            self.weight.mul_(0.5)
        return y


class WritesCast(nn.Module):
    """Changes the cast before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        cast = self.weight.to(torch.bfloat16)
        cast.mul_(0.5)
        return x @ cast


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "conv": Conv,
    "by hand": ByHand,
    "conjugate": Conjugate,
    "lstm": lambda: First(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "writes after use": WritesAfterUse,
    "writes the cast": WritesCast,
}


class First(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x.unsqueeze(1))[0]
        return y.squeeze(1)


def build(kind: str = "linear", *, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    first, middle, last = nn.Linear(WIDTH, WIDTH), KINDS[kind](), nn.Linear(WIDTH, WIDTH)
    if tied:
        last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last, nn.Tanh())


def offloaded(bare: nn.Module, home: str, **arguments: Any) -> OffloadModel:
    return OffloadModel(copy.deepcopy(bare), "cpu", home, SHARDS, **arguments)


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], *, cache: bool = True) -> list[Tensor | None]:
    """Of the input and of the parameters, after the output, of one step under autocast."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
        output = run(x)
    output.float().pow(2).sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters()), *(p.detach() for p in model.parameters())]


def assert_equal(ours: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    # A recomputation sees a weight as its layer left it.
    [(kind, recompute) for kind in KINDS for recompute in (False, True) if not recompute or kind != "writes after use"],
)
def test_under_autocast_every_gradient_is_the_bare_model_s_bit_for_bit(kind: str, recompute: bool, home: str) -> None:
    bare = build(kind)
    model = offloaded(bare, home, checkpoint_activation=recompute)
    for _ in range(2):
        assert_equal(gradients(model, model), gradients(bare, bare))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_each_use_of_a_weight_sums_its_gradient_in_the_weight_s_own_type(
    microbatches: int, tied: bool, recompute: bool, home: str
) -> None:
    """With its cache, autocast sums gradients of several uses of one weight in bfloat16; without it, in float32."""
    bare = build(tied=tied)
    model = offloaded(bare, home, checkpoint_activation=recompute, num_microbatches=microbatches)
    whole = lambda x: reference(bare, [2, 2, 2], x, microbatches)  # noqa: E731
    assert_equal(gradients(model, model), gradients(bare, whole, cache=False))


class Counts(TorchDispatchMode):
    """The storages of all casts to bfloat16 of tensors as large as a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        if is_cast and result.numel() == WIDTH * WIDTH:
            self.storages.append(StorageWeakRef(result.untyped_storage()))
        return result

    def alive(self) -> int:
        gc.collect()
        return sum(not storage.expired() for storage in self.storages)


@pytest.mark.parametrize("kind", ["linear", "frozen"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_between_forward_and_backward_no_cast_of_a_weight_is_alive(kind: str, microbatches: int, tied: bool) -> None:
    bare = build(kind, tied=tied)
    model = offloaded(bare, "cpu", checkpoint_activation=False, num_microbatches=microbatches)
    counts = Counts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with counts:
            output = model(torch.randn(8, WIDTH).requires_grad_())
        assert len(counts.storages) == 3 * microbatches
        assert counts.alive() == 0, "also as long as the user's autocast context lasts"
    output.float().sum().backward()
    assert counts.alive() == 0


def test_a_graph_that_recomputation_keeps_refers_to_casts_as_well() -> None:
    model = offloaded(build(), "cpu", checkpoint_activation=True, memory=MemoryPolicy.fixed(graph_bytes="1MiB"))
    gradients(model, model)  # the first step measures
    counts = Counts()
    with torch.autocast("cpu", dtype=torch.bfloat16), counts:
        output = model(torch.randn(8, WIDTH))
    assert counts.alive() == 0
    output.sum().backward()


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_cast_is_made_again_once_in_a_visit(microbatches: int) -> None:
    model = offloaded(build(), "cpu", checkpoint_activation=False, num_microbatches=microbatches)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.randn(8, WIDTH).requires_grad_())
    counts = Counts()
    with counts:
        output.float().sum().backward()
    assert len(counts.storages) == 3  # one for each layer's weight


class CastsLater(nn.Module):
    """Casts its weight from the third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.weight if self.calls < 3 else (x.double() @ self.weight.double()).to(x.dtype)


def test_a_cast_that_no_forward_had_before_is_saved_as_any_other_tensor(home: str) -> None:
    bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), CastsLater())
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=2, checkpoint_activation=False)
    for _ in range(4):
        x = torch.randn(3, WIDTH)
        for run in (bare, model):
            run.zero_grad()
            run(x).square().sum().backward()
        for p, q in zip(bare.parameters(), model.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
