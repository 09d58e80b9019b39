"""Towers of every kind, and the ways to take a step over them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from gradcache import Accumulation, GradCache
from gradcache.functional import cached, cat_input_tensor
from offload import OffloadModel


def tower(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 6))


def energy(*reps: Tensor) -> Tensor:
    """A loss of whose gradient no two rows are alike."""
    return torch.stack([(rep * rep.detach().exp()).sum() for rep in reps]).sum()


def offloaded(model: nn.Sequential, home: Any = "cpu", **options: Any) -> OffloadModel:
    options = {"num_slices": len(model), "checkpoint_activation": True, **options}
    return OffloadModel(model, "cpu", home, **options)


# --- towers ----------------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    """A module of a function."""

    def __init__(self, function: Callable[..., Any], *members: nn.Module, **buffers: Tensor) -> None:
        super().__init__()
        self.function, self.members = function, nn.ModuleList(members)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Output(dict[str, Any]):
    """Drops fields that are None, and has the others as attributes, as the outputs of transformers do."""

    def __init__(self, **fields: Any) -> None:
        super().__init__({name: value for name, value in fields.items() if value is not None})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: Output(**dict(zip(names, values, strict=True))),
    serialized_type_name="tests.gradcache.Output",
)


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def by_function(self: Any, x: Tensor) -> Tensor:
    """Its statistics are written by torch's kernel, without a new version of the tensor."""
    return F.batch_norm(self.members[0](x), self.mean, self.var, training=True)


def replaced(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.members[0](x) * (self.mean + 1)
    self.mean = 0.5 * self.mean + 0.5 * out.detach().mean(0)
    return out


def queue(self: Any, x: Tensor) -> Tensor:
    """Reads a large buffer, and puts rows into it in some forwards."""
    out: Tensor = self.members[0](x) + self.queue[:64].mean(0).clone()
    with torch.no_grad():
        if x.sum() > 0:
            self.queue[: len(out)] = out
    return out * self.queue[1].clone()


def exchanging(self: Any, x: Tensor) -> Tensor:
    """Which of two branches is gated, and so saved, depends on a draw: the same operations, another flow of data."""
    u, v = (member(x) for member in self.members)
    return F.gelu(v) + u if torch.rand(()) < 0.5 else F.gelu(u) + v


def drawing(self: Any, x: Tensor) -> Tensor:
    """From the generators of Python, NumPy and torch."""
    return self.members[0](x) * (random.random() + float(np.random.rand()) + float(torch.rand(())))


class OwnNoise(nn.Linear):
    """Draws from a generator that it holds itself."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=self.generator)


def statistics() -> dict[str, Tensor]:
    return {"mean": torch.zeros(8), "var": torch.ones(8)}


#: Layers from 8 channels to 8.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "its average": lambda: nn.BatchNorm1d(8, momentum=None),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "a function": lambda: Calls(by_function, linear(), **statistics()),
    "a replaced buffer": lambda: Calls(replaced, linear(), **statistics()),
    "a large buffer": lambda: Calls(queue, linear(), queue=torch.randn(4096, 8)),
    "its input": lambda: Calls(lambda self, x: self.members[0](x.mul_(2.0)), linear()),
    "across rows": lambda: Calls(lambda self, x: x - x.mean(0)),
    "frozen": lambda: linear().requires_grad_(False),
    "checkpoint": lambda: Calls(inside, linear()),
    "reentrant checkpoint": lambda: Calls(lambda self, x: checkpoint(self.members[0], x, use_reentrant=True), linear()),
    "a generator of its own": OwnNoise,
    "dropout": lambda: nn.Dropout(0.5),
    "another flow of data": lambda: Calls(exchanging, linear(), linear()),
    "three generators": lambda: Calls(drawing, linear()),
}
DRAWS = ("dropout", "another flow of data", "three generators")  # in the order of chunks, if these run one by one


def inside(self: Any, x: Tensor) -> Any:
    return checkpoint(self.members[0], x, use_reentrant=False)


def half(weight: Tensor) -> Tensor:
    return weight * 0.5


def twice(self: Any, x: Tensor) -> Tensor:
    table = self.members[0]
    return (table(x) + table(x.flip(0))) @ table.weight.T @ table.weight


def embedding(**options: Any) -> nn.Embedding:
    return nn.Embedding(20, 8, **options)


#: Embedding tables, whose gradients chunks add up.
TABLES: dict[str, Callable[[], nn.Module]] = {
    "plain": embedding,
    "padding": lambda: embedding(padding_idx=3),
    "norm": lambda: embedding(max_norm=1.0),
    "sparse": lambda: embedding(sparse=True),
    "frozen table": lambda: embedding().requires_grad_(False),
    "bfloat16": lambda: embedding(dtype=torch.bfloat16),
    "twice": lambda: Calls(twice, embedding()),
    "inside a checkpoint": lambda: Calls(inside, embedding()),
    "parametrized": lambda: parametrize.register_parametrization(embedding(), "weight", Calls(lambda self, w: half(w))),
}


def kind_of(name: str) -> tuple[nn.Sequential, Tensor]:
    """A tower with this layer or table in it, and its rows."""
    torch.manual_seed(0)
    if name in TABLES:
        mean = Calls(lambda self, x: torch.tanh(x.float()).mean(1))
        return nn.Sequential(TABLES[name](), mean, linear()), torch.randint(0, 20, (8, 6))
    return nn.Sequential(linear(), LAYERS[name](), linear()), torch.randn(8, 8)


class Sentences(nn.Module):
    """Speaks as a SentenceTransformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = tower(1)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.encoder(features["input_ids"])}


# --- ways to take a step ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def draws_in_between() -> Iterator[None]:
    """The caller draws before the second pass, which leaves the generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.rand(7)
        before = torch.get_rng_state()
        yield
        assert torch.equal(torch.get_rng_state(), before)


def by_step(models: Sequence[Any], size: Any, loss: Callable[..., Tensor], *inputs: Any, **how: Any) -> Tensor:
    return GradCache(models, size, loss, **how)(*inputs)


def by_encode(models: Sequence[Any], size: Any, loss: Callable[..., Tensor], *inputs: Any, **how: Any) -> Tensor:
    value = loss(*GradCache(models, size, energy, **how).encode(*inputs))
    with draws_in_between():
        value.backward()
    return value.detach()


def by_cached_calls(models: Sequence[Any], size: int, loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    pairs = zip(models, inputs, strict=True)
    calls = [[cached(model)(part) for part in given.split(size)] for model, given in pairs]
    value = cat_input_tensor(loss)(*([leaf for leaf, _ in side] for side in calls))
    value.backward()
    parameters = [parameter for model in dict.fromkeys(models) for parameter in model.parameters()]
    with draws_in_between(), Accumulation(parameters) as accumulation:
        for leaf, again in (call for side in calls for call in side):
            again(leaf)
        accumulation.commit()
    return value.detach()


WAYS = {"step": by_step, "encode": by_encode, "cached": by_cached_calls}


def in_chunks(models: Sequence[nn.Module], size: int, loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What they are compared with: all chunks in one graph."""
    pairs = zip(models, inputs, strict=True)
    value = loss(*(torch.cat([model(part.clone()) for part in given.split(size)]) for model, given in pairs))
    value.backward()
    return value.detach()
