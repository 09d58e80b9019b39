"""Small models in float64, each of which does one thing that training loops meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.offload.fuzz.blocks import BLOCKS
from tests.offload.fuzz.sizes import ROWS, WIDTH, linear
from tests.offload.fuzz.trips import Trip
from tests.offload.parameters_outside import ActNorm, Custom, TiedHead

__all__ = ["IDS", "MODELS", "RANDOM", "ROWS", "ROWWISE", "STATEFUL", "WIDTH", "WRITERS", "build"]


class Tables(nn.Module):
    """Looks up rows, and passes the whole table on: a parameter itself leaves the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), self.table.weight


class OnFirst(nn.Module):
    """Works on the first of two, passes the second on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(pair[0])), pair[1]


class Queries(nn.Module):
    """Learned queries: a view of a parameter leaves the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.latent.expand(x.size(0), WIDTH)


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(pair[0]), pair[1] * 2 + pair[0].tanh()


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class WithParameter(nn.Module):
    """Returns its parameter beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight


class Renormed(nn.Module):
    """Gives its weight another ``.data`` in each forward of training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.linear.weight.data = self.linear.weight.data.renorm(2, 0, 0.5)
        return self.linear(x)


class Clamped(nn.Module):
    """Writes its own weight in place before using it, in a way that torch counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.7, 0.7)
        return x @ self.weight


class Residual(nn.Sequential):
    """An own forward, and a parameter beside its children."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * super().forward(x)


class Hooked(nn.Module):
    """A closure over the detached weight, which a hook uses in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y, weight = x @ self.weight, self.weight.detach()
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + weight.sum())
        return y


class Routed(nn.Module):
    """Chooses an expert by values read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = linear()
        self.experts = nn.Parameter(torch.randn(WIDTH, WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        values = self.gate(x.mean(0, keepdim=True)).tolist()[0]
        return torch.tanh(x @ self.experts[values.index(max(values))])


class Branching(nn.Module):
    """Another path by ``item()``."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if self.left(x).sum().item() > 0 else torch.tanh(self.right(x))


class Counting(nn.Module):
    """Counts in a buffer that it writes in place, and replaces another buffer by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x * (1 + self.mean.abs())


class Recurrent(nn.Module):
    """Remembers its last output as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.last: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) + self.last)
        self.last = y.detach().mean(0)
        return y


class OwnGenerator(nn.Module):
    """Draws its noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


class Checkpointing(nn.Module):
    """Recomputes a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return torch.tanh(y)


class Double(nn.Module):
    """One tensor twice, at both places of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return h, h


class WriteFirst(nn.Module):
    """Writes the first of a pair in place, and uses the second."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        pair[0].mul_(2)
        return pair[0] + 3 * pair[1]


class Auxiliary(nn.Module):
    """Leaves a loss of its own as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.loss = y.pow(2).mean()
        return y


class Unused(nn.Module):
    """Has a parameter that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Single(nn.Module):
    """Computes in float32 between layers in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.float()).double()


class Nested(nn.Module):
    """Returns what is nested, with an integer and a constant before what needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"best": y.argmax(1), "one": torch.ones(x.size(0)), "pair": (y, [y.sin(), None])}


def frozen() -> list[nn.Module]:
    first, middle = linear(), linear()
    first.requires_grad_(False)
    middle.weight.requires_grad_(False)
    return [first, nn.Tanh(), linear(), middle, linear()]


def tied() -> list[nn.Module]:
    first, last = linear(), linear()
    last.weight = first.weight
    return [first, nn.Tanh(), linear(), last]


MODELS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "mlp": lambda: [linear(), nn.Tanh(), linear(), linear(), nn.Tanh(), linear()],
    "dropout": lambda: [linear(), nn.Dropout(0.3), linear(), linear(), nn.Dropout(0.2), linear()],
    "batchnorm": lambda: [linear(), nn.BatchNorm1d(WIDTH), linear(), nn.Tanh(), linear()],
    "inplace": lambda: [linear(), nn.ReLU(inplace=True), linear(), nn.LayerNorm(WIDTH), linear()],
    "tied": tied,
    "frozen": frozen,
    "table": lambda: [Tables(), OnFirst(), OnFirst(), TiedHead()],
    "queries": lambda: [linear(), Queries(), Attend(), Attend(), Sum(), linear()],
    "parameter": lambda: [linear(), nn.Tanh(), linear(), WithParameter()],
    "actnorm": lambda: [ActNorm(WIDTH), linear(), ActNorm(WIDTH), linear()],
    "renormed": lambda: [linear(), Renormed(), linear(), Renormed()],
    "clamped": lambda: [linear(), Clamped(), linear(), Clamped()],
    "residual": lambda: [linear(), nn.Tanh(), linear()],
    "residual_inside": lambda: [linear(), Residual(linear(), nn.Tanh()), linear(), Residual(linear())],
    "custom": lambda: [Custom(WIDTH), Custom(WIDTH), linear(), Custom(WIDTH)],
    "closure": lambda: [Hooked(), linear(), Hooked(), nn.Tanh()],
    "routed": lambda: [Routed(), linear(), Routed(), linear()],
    "branching": lambda: [linear(), Branching(), Branching(), linear()],
    "counting": lambda: [linear(), Counting(), linear(), Counting(), linear()],
    "recurrent": lambda: [linear(), Recurrent(), linear()],
    "generator": lambda: [linear(), OwnGenerator(), linear(), OwnGenerator()],
    "checkpointing": lambda: [linear(), Checkpointing(), Checkpointing()],
    "double": lambda: [linear(), Double(), WriteFirst(), linear()],
    "double_output": lambda: [linear(), linear(), Double()],
    "auxiliary": lambda: [linear(), Auxiliary(), linear(), linear()],
    "unused": lambda: [linear(), Unused(), linear(), Unused()],
    "mixed": lambda: [linear(), Single(), linear(), Single()],
    "nested": lambda: [linear(), nn.Tanh(), linear(), Nested()],
    "spectral": lambda: [linear(), nn.utils.parametrizations.spectral_norm(linear()), linear()],
    "max_norm": lambda: [nn.Embedding(ROWS, WIDTH, max_norm=0.8), linear(), nn.Tanh(), linear()],
}

#: Models whose input are row numbers of a table.
IDS = frozenset({"table", "max_norm", "blocks_words"})
#: Models that compute each row on its own, and none of which keeps anything: micro-batches change nothing.
ROWWISE = frozenset(
    {"mlp", "inplace", "tied", "frozen", "queries", "residual_inside", "custom", "double", "unused", *BLOCKS}
) - {"blocks_passed", "blocks_dropped", "blocks_normed", "blocks_limited"}
#: Models whose forward writes parameters.
WRITERS = frozenset({"actnorm", "renormed", "clamped", "max_norm", "blocks_limited"})
#: Models that leave something behind in each forward: what runs them twice for one result, differs in torch as well.
STATEFUL = frozenset(
    {"batchnorm", "actnorm", "counting", "recurrent", "generator", "auxiliary", "spectral", "blocks_normed"}
)
#: Models that draw random numbers.
RANDOM = frozenset({"dropout", "generator", "blocks_dropped"})


def build(name: str, *, trips: bool = False) -> nn.Module:
    """A model of this name; the same weights every time."""
    torch.manual_seed(0)
    if name in BLOCKS:
        return BLOCKS[name](trips).double()
    layers: list[nn.Module] = []
    for layer in MODELS[name]():
        layers += [layer, Trip()] if trips else [layer]
    model = (Residual if name == "residual" else nn.Sequential)(*layers)
    model.double()
    for module in model.modules():
        if isinstance(module, Single):
            module.float()
    return model
