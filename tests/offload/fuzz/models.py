"""Small models in float64, each of which does one thing that training loops meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.offload.fuzz.blocks import BLOCKS
from tests.offload.fuzz.layers import ROWS, WIDTH, Trip, linear
from tests.offload.zoo import Unused


class Call(nn.Module):
    """A function of a layer of its own, and of the input."""

    def __init__(self, function: Callable[[Any, Any], Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, linear() if layer is None else layer

    def forward(self, x: Any) -> Any:
        return self.function(self.layer, x)


def look_up(table: nn.Embedding, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Passes the whole table on: a parameter itself leaves the layer."""
    return table(ids), table.weight


def on_first(layer: nn.Linear, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.tanh(layer(pair[0])), pair[1]


class Queries(nn.Module):
    """Learned queries: a view of a parameter leaves the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.latent.expand(x.size(0), WIDTH)


def attend(layer: nn.Linear, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return layer(pair[0]), pair[1] * 2 + pair[0].tanh()


def summed(_: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0] + pair[1]


def with_parameter(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    return layer(x), layer.weight


def renormed(layer: nn.Linear, x: Tensor) -> Tensor:
    """Gives its weight another ``.data`` in each forward of training."""
    if layer.training:
        layer.weight.data = layer.weight.data.renorm(2, 0, 0.5)
    return layer(x)


def clamped(layer: nn.Linear, x: Tensor) -> Tensor:
    """Writes its own weight in place before using it, in a way that torch counts."""
    with torch.no_grad():
        layer.weight.clamp_(-0.4, 0.4)
    return layer(x)


class Residual(nn.Sequential):
    """An own forward, and a parameter without dimensions beside its children."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * super().forward(x)


def hooked(layer: nn.Linear, x: Tensor) -> Tensor:
    """A closure over the detached weight, which a hook uses in backward."""
    y, weight = layer(x), layer.weight.detach()
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


def branching(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Another path by ``item()``."""
    left, right = layers
    return left(x) if left(x).sum().item() > 0 else torch.tanh(right(x))


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


def recurrent(layer: Any, x: Tensor) -> Tensor:
    """Remembers its last output as a plain attribute."""
    y = torch.tanh(layer(x) + getattr(layer, "last", 0.0))
    layer.last = y.detach().mean(0)
    return y


class OwnGenerator(nn.Module):
    """Draws its noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


def checkpointing(layer: nn.Linear, x: Tensor) -> Tensor:
    """Recomputes a layer of its own."""
    return torch.tanh(checkpoint(layer, x, use_reentrant=False))


def double(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """One tensor twice, at both places of a pair."""
    h = layer(x)
    return h, h


def write_first(_: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Writes the first of a pair in place, and uses the second."""
    pair[0].mul_(2)
    return pair[0] + 3 * pair[1]


def auxiliary(layer: Any, x: Tensor) -> Tensor:
    """Leaves a loss of its own as an attribute."""
    y: Tensor = layer(x)
    layer.loss = y.pow(2).mean()
    return y


def single(layer: nn.Linear, x: Tensor) -> Tensor:
    """Computes in float32 between layers in float64."""
    return layer(x.float()).double()


def nested(layer: nn.Linear, x: Tensor) -> dict[str, Any]:
    """Returns what is nested, with an integer and a constant before what needs a gradient."""
    y = layer(x)
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
    "table": lambda: [Call(look_up, nn.Embedding(ROWS, WIDTH)), Call(on_first), Call(on_first), TiedHead()],
    "queries": lambda: [linear(), Queries(), Call(attend), Call(attend), Call(summed, nn.Identity()), linear()],
    "parameter": lambda: [linear(), nn.Tanh(), linear(), Call(with_parameter)],
    "actnorm": lambda: [ActNorm(WIDTH), linear(), ActNorm(WIDTH), linear()],
    "renormed": lambda: [linear(), Call(renormed), linear(), Call(renormed)],
    "clamped": lambda: [linear(), Call(clamped), linear(), Call(clamped)],
    "residual": lambda: [linear(), nn.Tanh(), linear()],
    "residual_inside": lambda: [linear(), Residual(linear(), nn.Tanh()), linear(), Residual(linear())],
    "custom": lambda: [Custom(WIDTH), Custom(WIDTH), linear(), Custom(WIDTH)],
    "closure": lambda: [Call(hooked), linear(), Call(hooked), nn.Tanh()],
    "routed": lambda: [Routed(), linear(), Routed(), linear()],
    "branching": lambda: [
        linear(),
        Call(branching, nn.ModuleList([linear(), linear()])),
        Call(branching, nn.ModuleList([linear(), linear()])),
        linear(),
    ],
    "counting": lambda: [linear(), Counting(), linear(), Counting(), linear()],
    "recurrent": lambda: [linear(), Call(recurrent), linear()],
    "generator": lambda: [linear(), OwnGenerator(), linear(), OwnGenerator()],
    "checkpointing": lambda: [linear(), Call(checkpointing), Call(checkpointing)],
    "double": lambda: [linear(), Call(double), Call(write_first, nn.Identity()), linear()],
    "double_output": lambda: [linear(), linear(), Call(double)],
    "auxiliary": lambda: [linear(), Call(auxiliary), linear(), linear()],
    "unused": lambda: [linear(), Unused(WIDTH), linear(), Unused(WIDTH)],
    "mixed": lambda: [linear(), Call(single), linear(), Call(single)],
    "nested": lambda: [linear(), nn.Tanh(), linear(), Call(nested)],
    "spectral": lambda: [linear(), nn.utils.parametrizations.spectral_norm(linear()), linear()],
    "max_norm": lambda: [nn.Embedding(ROWS, WIDTH, max_norm=0.8), linear(), nn.Tanh(), linear()],
}

#: Models that not every loop can train: a sparse gradient cannot be clipped, for example.
OTHERS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "sparse": lambda: [nn.Embedding(ROWS, WIDTH, sparse=True), linear(), nn.Tanh(), linear()]
}

#: Models whose input are row numbers of a table.
IDS = frozenset({"table", "max_norm", "blocks_words", "sparse"})
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
    for layer in (MODELS | OTHERS)[name]():
        layers += [layer, Trip()] if trips else [layer]
    model = (Residual if name == "residual" else nn.Sequential)(*layers)
    model.double()
    for module in model.modules():
        if isinstance(module, Call) and module.function is single:
            module.float()
    return model


class TiedHead(nn.Module):
    """Multiplies by a table that an earlier layer passed on."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] @ pair[1].t()


class KeepsTransposed(torch.autograd.Function):
    """Keeps a view of the weight as an attribute of the context, past autograd's saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.transposed = weight.t()
        return x @ ctx.transposed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient @ ctx.transposed.t(), gradient.t() @ ctx.saved_tensors[0]


class Custom(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(KeepsTransposed.apply(x, self.weight))  # type: ignore[no-untyped-call]


class ActNorm(nn.Module):
    """Initialises itself from the first batch that it sees."""

    def __init__(self, width: int, *, assigns: bool = False) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.register_buffer("ready", torch.tensor(0))
        self.assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            if self.assigns:
                self.shift.data = -x.detach().mean(0)
            else:
                with torch.no_grad():
                    self.shift.copy_(-x.detach().mean(0))
            self.ready.fill_(1)
        return x + self.shift
