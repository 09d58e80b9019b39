"""Forwards and blocks that do what no argument shows: each computes what it did before it was wrapped, in every way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
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


class Model(nn.Module):
    """Calls its blocks one after the other."""

    kind: Callable[..., nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prefix, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer = nn.ModuleList(self.kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layer:
            x = block(x)
        return x


class Remembers(Model):
    """Sets attributes before its blocks, on itself and on a block, that the block and the end read."""

    count = ends = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = x.detach().mean()
        self.layer[1].factor = float(x.detach().max())
        self.left = x.sum() - x.sum().detach()  # zero, with the gradient of its own rows
        y = super().forward(x)
        self.ends += 1
        return y * self.mean + self.count + self.left


class Scopes(Model):
    """Sets a context variable around each block, to a value of its input."""

    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.detach().max())
        for k, block in enumerate(self.layer):
            token = SCOPE.set(scale + k)
            x = block(x)
            SCOPE.reset(token)
        return x


class Objects(Model):
    """Gives its blocks an object and an array, which they read and change."""

    def forward(self, x: Tensor) -> Tensor:
        counter = Counter()
        for block in self.layer:
            counter.training += 1
            counter.array *= 2
            x = block(x, counter, counter.array)
        return x * counter.count


class Generators(Model):
    """Gives its blocks a generator, and another one by an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        for block in self.layer:
            block.noise = torch.Generator().manual_seed(2)
            x = block(x, generator)
        return x + torch.rand((), generator=generator)


class Turned(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        turned = torch.view_as_complex(super().forward(x).view(len(x), -1, 2))
        return x + torch.view_as_real(turned * forth + turned.square() * back).reshape_as(x)


class Tables(Model):
    """Gives its blocks a table and another view of the same memory: its conjugate."""

    kind = Turned

    def forward(self, x: Tensor) -> Tensor:
        table = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 3)
        for block in self.layer:
            x = block(x, *self.views(table))
        return x

    def views(self, table: Tensor) -> tuple[Tensor, Tensor]:
        return table, table.conj()


class NegativeTables(Tables):
    """The views: an imaginary part, and its negative."""

    def views(self, table: Tensor) -> tuple[Tensor, Tensor]:
        return table.imag, table.conj().imag


class Notes(Model):
    """Its blocks write into a list; the end adds it up."""

    def forward(self, x: Tensor) -> Tensor:
        notes: list[Tensor] = []
        for block in self.layer:
            x = block(x, notes)
        return x + sum(notes)


class Calls(Model):
    """Its blocks write into a dict."""

    def forward(self, x: Tensor) -> Tensor:
        notes: dict[str, int] = {}
        for block in self.layer:
            x = block(x, notes)
        return x * notes["calls"]


class Halves(Block):
    """Writes into its input."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x.mul_(0.5))


class AfterWrites(Model):
    """Uses what a block has written into its input."""

    kind = Halves

    def forward(self, x: Tensor) -> Tensor:
        x = self.prefix(x)
        for block in self.layer:
            x = block(x) + x
        return x


class Argument(Model):
    """Gives its blocks a layer as an argument."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layer:
            x = block(x, self.other)
        return x


class Held(Model):
    """Its blocks hold a layer of the model."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.layer:
            block.held = [self.other]


class Neighbour(Model):
    """Its last block holds the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer[3].held = [self.layer[2]]


class Attribute(Model):
    """A tensor with a graph enters a block by an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layer:
            x = block(x)
            self.layer[2].bias_of_forward = self.other(x)
        return x


class Reads(Model):
    """Uses a weight of a block beside it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.layer[0].weight


class Half(Model):
    """Computes in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Down(Model):
    """Runs down its first blocks and up its last ones, in another order for some rows."""

    def forward(self, x: Tensor) -> Tensor:
        order = (0, 1, 3, 2) if float(x.detach().sum()) > 0 else (3, 1, 0, 2)
        skipped = []
        for k in order[:2]:
            x = self.layer[k](x)
            skipped.append(x)
        for k in order[2:]:
            x = self.layer[k](x) + skipped.pop()
        return x


class Leaves(Model):
    """Leaves a block out, and calls another twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer[0](self.layer[3](self.layer[0](self.layer[1](x))))


MODELS = [
    *(Remembers, Scopes, Objects, Generators, Tables, NegativeTables, Notes, Calls, AfterWrites, Argument),
    *(Held, Neighbour, Attribute, Reads, Half, Down, Leaves),
]

WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "kept": {"checkpoint_activation": False},
    "one shard": {"num_slices": 1},
    "cast around": {"num_slices": 2},
    "micro-batches": {"num_microbatches": 2},
    "chunks": {"num_slices": 2},
}


#: Refused where both blocks are in one shard.
REFUSED = {(Neighbour, way) for way in ("one shard", "cast around", "chunks")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_each_trains_as_before_it_was_wrapped(kind: type[Model], way: str) -> None:
    bare = kind()
    choices = {"checkpoint_activation": True, **WAYS[way]}
    model: Any = OffloadModel(copy.deepcopy(bare), "cpu", blocks="layer", **choices)
    # Where weights are cast, sums of several gradients are of numbers of 16 bits, or of 32.
    digits = 0.05 if way == "cast around" or kind is Half else 1e-5
    for seed in range(3):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        parts = x.split(3) if way in ("micro-batches", "chunks") else (x,)
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "cast around"):
            expected = torch.cat([bare(part.clone()) for part in parts])
            if (kind, way) in REFUSED:
                with pytest.raises(RuntimeError, match="Change the layers first"):
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
