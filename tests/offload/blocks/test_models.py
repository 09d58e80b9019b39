"""Forwards and blocks that do what no argument shows: each computes what it did before it was wrapped, in every way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from tests.offload.blocks.towers import WIDTH

SCOPE: ContextVar[float] = ContextVar("scope", default=1.0)


class Block(nn.Linear):
    """A residual layer, and what a forward may give it beside its input."""

    factor = 1.0
    bias_of_forward: Tensor | None = None
    noise: torch.Generator | None = None

    def __init__(self, held: nn.Module | None = None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.held = [held]  # where no module is registered

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = super().forward(x) * self.factor * SCOPE.get()
        for other in (*others, *self.held):
            if isinstance(other, nn.Module):
                y = y + other(x)
            elif isinstance(other, list):
                other.append(y)
            elif isinstance(other, dict):
                other["calls"] = other.get("calls", 0) + 1
            elif isinstance(other, Counter):
                other.count *= 1.5
                y = y * other.count * other.training
            elif isinstance(other, np.ndarray):
                y = y * torch.from_numpy(other.copy())
            elif isinstance(other, torch.Generator):
                y = y + torch.rand(x.shape, generator=other) + torch.rand(x.shape, generator=self.noise)
        y = y if self.bias_of_forward is None else y + self.bias_of_forward
        return x + torch.tanh(y)


class Counter:
    """An argument of blocks that keeps a number, and an array of NumPy beside it."""

    def __init__(self) -> None:
        self.count, self.array = 1.0, np.ones(WIDTH, dtype=np.float32)
        self.training = 1.0  # modules have an attribute of this name


class Turned(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        turned = torch.view_as_complex(super().forward(x).view(len(x), -1, 2))
        return x + torch.view_as_real(turned * forth + turned.square() * back).reshape_as(x)


class Halves(Block):
    """Writes into its input."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x.mul_(0.5))


class Model(nn.Module):
    """Blocks, and a forward that is a function of the model and of the input."""

    count = ends = 0

    def __init__(self, run: Callable[[Any, Tensor], Tensor], kind: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prefix, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer = nn.ModuleList(kind() for _ in range(4))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def in_turn(model: Any, x: Tensor, *others: Any) -> Tensor:
    for block in model.layer:
        x = block(x, *others)
    return x


def remembers(model: Any, x: Tensor) -> Tensor:
    """Sets attributes before its blocks, on itself and on a block, that the block and the end read."""
    model.count += 1
    model.mean = x.detach().mean()
    model.layer[1].factor = float(x.detach().max())
    model.left = x.sum() - x.sum().detach()  # zero, with the gradient of its own rows
    y = in_turn(model, x)
    model.ends += 1
    return y * model.mean + model.count + model.left


def scopes(model: Any, x: Tensor) -> Tensor:
    """Sets a context variable around each block, to a value of its input."""
    scale = float(x.detach().max())
    for k, block in enumerate(model.layer):
        token = SCOPE.set(scale + k)
        x = block(x)
        SCOPE.reset(token)
    return x


def objects(model: Any, x: Tensor) -> Tensor:
    """Gives its blocks an object and an array, which they read and change."""
    counter = Counter()
    for block in model.layer:
        counter.training += 1
        counter.array *= 2
        x = block(x, counter, counter.array)
    return x * counter.count


def generators(model: Any, x: Tensor) -> Tensor:
    """Gives its blocks a generator, and another one by an attribute."""
    generator = torch.Generator().manual_seed(1)
    for block in model.layer:
        block.noise = torch.Generator().manual_seed(2)
        x = block(x, generator)
    return x + torch.rand((), generator=generator)


def tables(model: Any, x: Tensor) -> Tensor:
    """Gives its blocks a table and another view of the same memory: its conjugate."""
    table = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 3)
    return in_turn(model, x, table, table.conj())


def negative_tables(model: Any, x: Tensor) -> Tensor:
    """The views: an imaginary part, and its negative."""
    table = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 3)
    return in_turn(model, x, table.imag, table.conj().imag)


def notes(model: Any, x: Tensor) -> Tensor:
    """Its blocks write into a list and into a dict, which the end reads."""
    written, calls = list[Tensor](), dict[str, int]()
    x = in_turn(model, x, written, calls)
    return (x + sum(written)) * calls["calls"]


def after_writes(model: Any, x: Tensor) -> Tensor:
    """Uses what a block has written into its input."""
    x = model.prefix(x)
    for block in model.layer:
        x = block(x) + x
    return x


def argument(model: Any, x: Tensor) -> Tensor:
    """Gives its blocks a layer as an argument."""
    return in_turn(model, x, model.other)


def held() -> Model:
    """Its blocks hold a layer of the model."""
    model = Model(in_turn)
    for block in model.layer:
        block.held = [model.other]
    return model


def neighbour() -> Model:
    """Its last block holds the one before it."""
    model = Model(in_turn)
    model.layer[3].held = [model.layer[2]]
    return model


def attribute(model: Any, x: Tensor) -> Tensor:
    """A tensor with a graph enters a block by an attribute."""
    for block in model.layer:
        x = block(x)
        model.layer[2].bias_of_forward = model.other(x)
    return x


def reads(model: Any, x: Tensor) -> Tensor:
    """Uses a weight of a block beside it."""
    return in_turn(model, x) @ model.layer[0].weight


def half(model: Any, x: Tensor) -> Tensor:
    """Computes in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return in_turn(model, x).float()


MODELS: dict[str, Callable[[], Model]] = {
    **{run.__name__: partial(Model, run) for run in (remembers, scopes, objects, generators, notes, argument)},
    **{run.__name__: partial(Model, run) for run in (attribute, reads, half)},
    **{run.__name__: partial(Model, run, Turned) for run in (tables, negative_tables)},
    "after_writes": partial(Model, after_writes, Halves),
    "held": held,
    "neighbour": neighbour,
}

WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "kept": {"checkpoint_activation": False},
    "one shard": {"num_slices": 1},
    "cast around": {"num_slices": 2},
    "micro-batches": {"num_microbatches": 2},
    "chunks": {"num_slices": 2},
}


#: Refused where both blocks are in one shard.
REFUSED = {("neighbour", way) for way in ("one shard", "cast around", "chunks")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_each_trains_as_before_it_was_wrapped(kind: str, way: str) -> None:
    bare = MODELS[kind]()
    choices = {"checkpoint_activation": True, **WAYS[way]}
    model: Any = OffloadModel(copy.deepcopy(bare), "cpu", blocks="layer", **choices)
    # Where weights are cast, sums of several gradients are of numbers of 16 bits, or of 32.
    digits = 0.05 if way == "cast around" or kind == "half" else 1e-5
    for seed in range(3):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        parts = x.split(3) if way in ("micro-batches", "chunks") else (x,)
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "cast around"):
            expected = torch.cat([bare(part.clone()) for part in parts])
            if (kind, way) in REFUSED:
                with pytest.raises(RuntimeError, match="change the layers first"):
                    model(x)
                return
            given = [part.clone() for part in parts]
            output = torch.cat(model.forward_chunks(given)) if way == "chunks" else model(x.clone())
        assert torch.equal(output, expected)
        for each in (expected, output):
            each.float().square().mean().backward()
        for (name, p), q in zip(bare.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q), name
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or (p.grad - q.grad).abs().max() <= digits * p.grad.abs().max().clamp(min=1), name
    assert SCOPE.get() == 1.0
    for name in ("count", "ends", "mean"):
        assert getattr(model, name, None) == getattr(bare, name, None)
