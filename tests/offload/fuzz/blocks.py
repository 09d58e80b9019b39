"""Small models whose own forward calls blocks, which stream; each does one thing around its blocks, or between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.offload.fuzz.layers import ROWS, WIDTH, Trip, linear


class Block(nn.Module):
    """A residual block, with a factor and a summand that may enter it as well."""

    def __init__(self, trips: bool) -> None:
        super().__init__()
        self.linear = linear()
        self.trip = Trip() if trips else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None, *, bias: Tensor | None = None) -> Tensor:
        y = self.linear(self.trip(x))
        if mask is not None:
            y = y * mask
        if bias is not None:
            y = y + bias
        return x + torch.tanh(y)


class Passing(Block):
    """Makes a bias if none enters it, and passes it on, with a sum over the blocks."""

    def forward(self, x: Tensor, *, bias: Tensor | None = None, total: Any = 0) -> Any:  # type: ignore[override]
        y = super().forward(x, bias=bias)
        return {"x": y, "bias": y.sin() if bias is None else bias, "total": total + y.square().mean()}


class Pair(Block):
    """Two halves of a reversible block."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return b, a + super().forward(b)


class Through(Block):
    """Returns its own input beside its output, and a view of that output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, x, y[:, :2]


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.dropout(super().forward(x), 0.3, self.training)


class Numbered(Block):
    """Counts its calls in a buffer, and keeps a mean in another."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x) * (1 + self.mean.abs())


class Limited(Block):
    """Writes its own weight in place."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        with torch.no_grad():
            self.linear.weight.clamp_(-0.4, 0.4)
        return super().forward(x)


class Adapted(Block):
    """Its base is frozen; an addition of low rank trains."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips)
        self.linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + x @ self.down.t() @ self.up.t()


class Model(nn.Module):
    """A stem, blocks, and a head, with a forward that is a function of it and of the input.

    ``trips``: whether there are layers in which an interrupt can strike; ``more``: makes further layers by name.
    """

    def __init__(
        self,
        trips: bool,
        run: Callable[[Any, Tensor], Any],
        kind: type[Block] = Block,
        count: int = 3,
        **more: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.stem = linear()
        self.blocks = nn.ModuleList(kind(trips) for _ in range(count))
        self.head = linear()
        self.trip = Trip() if trips else nn.Identity()
        self.run = run
        for name, make in more.items():
            setattr(self, name, make())

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def plain(model: Any, x: Tensor) -> Tensor:
    x = torch.tanh(model.stem(x))
    for block in model.blocks:
        x = block(x)
    return model.head(model.trip(x))


def glued(model: Any, x: Tensor) -> Tensor:
    """Parameters are used between the blocks: one of them a part each time, one whole, several times."""
    x = model.stem(x)
    for k, block in enumerate(model.blocks):
        x = model.trip(block(x * model.scales.weight[k].sigmoid()))
        x = x + torch.tanh(model.middle(x)) * 0.3
    return model.head(x)


def sided(model: Any, x: Tensor) -> Tensor:
    """All blocks get a mask and a bias of the prefix, which take gradients; the suffix uses the mask, too."""
    mask, bias = torch.sigmoid(model.gate(x)), x.mean(1, keepdim=True)
    x = model.stem(x)
    for block in model.blocks:
        x = block(x, mask, bias=bias)
    return model.head(model.trip(x) * mask)


def passed(model: Any, x: Tensor) -> Any:
    """What the first block makes enters the others, and a part of it is an output of the model."""
    found: dict[str, Any] = {"x": model.stem(x), "bias": None, "total": 0}
    for block in model.blocks:
        found = block(model.trip(found["x"]), bias=found["bias"], total=found["total"])
    return {"y": model.head(found["x"]), "total": found["total"], "bias": found["bias"]}


def around(model: Any, x: Tensor) -> Tensor:
    """A residual around all blocks, and one from the output of the first to the input of the last."""
    first = model.stem(x)
    one = model.blocks[0](first)
    two = model.trip(model.blocks[1](one))
    return model.head(model.blocks[2](two + one.sin()) + first)


def reversible(model: Any, x: Tensor) -> Tensor:
    a = model.stem(x)
    b = model.trip(a)
    for block in model.blocks:
        a, b = block(a, b)
    return model.head(a + b)


def through(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Uses what a block returns of its input, and writes into its output in place."""
    x = model.stem(x)
    part: Any = 0
    for block in model.blocks:
        x, before, view = block(x)
        part = part + view.sum(1) * 0.1
        x = x * 0.5 + model.trip(before)
        x += 0.25
    return model.head(x), part


def hidden(model: Any, x: Tensor) -> dict[str, Any]:
    """Returns the outputs of all blocks, as they are."""
    every = [model.stem(x)]
    for block in model.blocks:
        every.append(model.trip(block(every[-1])))
    return {"y": model.head(every[-1]), "hidden": tuple(every), "best": every[-1].argmax(1)}


class Words(Model):
    """Its head is its table."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips, words)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight


def words(model: Any, ids: Tensor) -> Tensor:
    return plain(model, model.table(ids))


def dropped(model: Any, x: Tensor) -> Tensor:
    """Draws between blocks and in them."""
    x = model.stem(x)
    for block in model.blocks:
        x = block(F.dropout(model.trip(x), 0.2, model.training))
    return model.head(x)


def normed(model: Any, x: Tensor) -> Tensor:
    """Running statistics between blocks, and counts in them."""
    x = model.stem(x)
    for block in model.blocks:
        x = model.norm(model.trip(block(x))) if x.size(0) > 1 else block(x)
    return model.head(x)


class Cut(Model):
    """The stem and the first block are frozen; a part of what enters the last block is detached."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips, cut)
        self.stem.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(WIDTH))


def cut(model: Any, x: Tensor) -> Tensor:
    one = model.blocks[0](model.stem(x))
    two = model.trip(model.blocks[1](one + model.shift))
    return model.head(model.blocks[2](two.detach() + two * 0.5))


class Lora(Model):
    """Nothing but adapters trains."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips, plain, Adapted)
        self.stem.requires_grad_(False)
        self.head.requires_grad_(False)


def aside(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Another branch beside the blocks, which writes in place between them; an output needs no block."""
    side = model.branch(x)
    x = model.stem(x)
    for block in model.blocks:
        x = block(x)
        side = side + model.trip(x).detach() * 0.1
        side.mul_(0.9)
    return model.head(x + side), side * 2


class TwoLists(Model):
    """A second list of blocks."""

    def __init__(self, trips: bool, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(trips, run, count=2, middle=linear)
        self.more = nn.ModuleList(Block(trips) for _ in range(2))


def two_lists(model: Any, x: Tensor) -> Tensor:
    """The second list runs behind a layer."""
    first = model.stem(x)
    x = first
    for block in model.blocks:
        x = block(x)
    memory = model.trip(torch.tanh(model.middle(x)))
    x = first
    for block in model.more:
        x = block(x, memory)
    return model.head(x)


def ordered(model: Any, x: Tensor, calls: str) -> Tensor:
    """Blocks of the first list (a, b) and of the second one (c, d) run in this order, with a mask that all get."""
    x, mask = model.stem(x), torch.sigmoid(model.middle(x))
    blocks = dict(zip("abcd", (*model.blocks, *model.more), strict=True))
    for call in calls:
        x = model.trip(blocks[call](x, mask)) * 1.25
    return model.head(x)


def partly_fixed(model: Any, x: Tensor) -> Tensor:
    """Calls its first and its third block without gradients; what they return scales what the others do."""
    x = torch.tanh(model.stem(x))
    for k, block in enumerate(model.blocks):
        with torch.set_grad_enabled(torch.is_grad_enabled() and k % 2 == 1):
            y = model.trip(block(x))
        x = x * y.sigmoid() if k % 2 == 0 else y
    return model.head(x)


ORDERS = "acbd", "badc", "cdab", "dabc"
#: Makes a model, with layers in which an interrupt can strike or without them.
BLOCKS: dict[str, Callable[[bool], nn.Module]] = {
    "blocks": partial(Model, run=plain),
    "blocks_glued": partial(Model, run=glued, middle=linear, scales=lambda: nn.Linear(1, 3)),
    "blocks_sided": partial(Model, run=sided, gate=linear),
    "blocks_passed": partial(Model, run=passed, kind=Passing),
    "blocks_around": partial(Model, run=around),
    "blocks_reversible": partial(Model, run=reversible, kind=Pair),
    "blocks_through": partial(Model, run=through, kind=Through),
    "blocks_hidden": partial(Model, run=hidden),
    "blocks_words": Words,
    "blocks_dropped": partial(Model, run=dropped, kind=Dropping),
    "blocks_normed": partial(Model, run=normed, kind=Numbered, norm=lambda: nn.BatchNorm1d(WIDTH)),
    "blocks_cut": Cut,
    "blocks_limited": partial(Model, run=plain, kind=Limited),
    "blocks_lora": Lora,
    "blocks_aside": partial(Model, run=aside, branch=linear),
    "blocks_lists": partial(TwoLists, run=two_lists),
    **{f"blocks_{calls}": partial(TwoLists, run=partial(ordered, calls=calls)) for calls in ORDERS},
    "blocks_fixed": partial(Model, run=partly_fixed, count=4),
    "blocks_all": partial(Model, run=plain),
}

#: The names of their lists of blocks.
LISTS: dict[str, tuple[str, ...]] = dict.fromkeys(BLOCKS, ("blocks",)) | {
    **dict.fromkeys(["blocks_lists", *(f"blocks_{calls}" for calls in ORDERS)], ("blocks", "more")),
    "blocks_all": ("stem", "blocks", "head"),  # nothing is around the blocks
}

#: Models in which a tensor takes gradients of several pieces of graph, which are summed in another order.
SUMS = "glued", "sided", "around", "reversible", "hidden", "words", "lists", "fixed"
REORDERED = frozenset(f"blocks_{name}" for name in (*SUMS, *ORDERS))
