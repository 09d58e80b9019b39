"""Small models whose own forward calls blocks, which stream; each does one thing around its blocks, or between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.offload.fuzz.sizes import ROWS, WIDTH, linear
from tests.offload.fuzz.trips import Trip


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
    """A stem, blocks, and a head."""

    kind: type[Block] = Block

    def __init__(self, trips: bool, count: int = 3) -> None:
        super().__init__()
        self.stem = linear()
        self.blocks = nn.ModuleList(self.kind(trips) for _ in range(count))
        self.head = linear()
        self.trip = Trip() if trips else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.trip(x))


class Glued(Model):
    """Parameters are used between the blocks: one of them a part each time, one whole, several times."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.middle = linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for k, block in enumerate(self.blocks):
            x = self.trip(block(x * self.scales[k].sigmoid()))
            x = x + torch.tanh(self.middle(x)) * 0.3
        return self.head(x)


class Sided(Model):
    """All blocks get a mask and a bias of the prefix, which take gradients; the suffix uses the mask, too."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips)
        self.gate = linear()

    def forward(self, x: Tensor) -> Tensor:
        mask, bias = torch.sigmoid(self.gate(x)), x.mean(1, keepdim=True)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, mask, bias=bias)
        return self.head(self.trip(x) * mask)


class Passed(Model):
    """What the first block makes enters the others, and a part of it is an output of the model."""

    kind = Passing

    def forward(self, x: Tensor) -> Any:
        found: dict[str, Any] = {"x": self.stem(x), "bias": None, "total": 0}
        for block in self.blocks:
            found = block(self.trip(found["x"]), bias=found["bias"], total=found["total"])
        return {"y": self.head(found["x"]), "total": found["total"], "bias": found["bias"]}


class Around(Model):
    """A residual around all blocks, and one from the output of the first to the input of the last."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        one = self.blocks[0](first)
        two = self.trip(self.blocks[1](one))
        return self.head(self.blocks[2](two + one.sin()) + first)


class Reversible(Model):
    kind = Pair

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        b = self.trip(a)
        for block in self.blocks:
            a, b = block(a, b)
        return self.head(a + b)


class Through3(Model):
    """Uses what a block returns of its input, and writes into its output in place."""

    kind = Through

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        part: Any = 0
        for block in self.blocks:
            x, before, view = block(x)
            part = part + view.sum(1) * 0.1
            x = x * 0.5 + self.trip(before)
            x += 0.25
        return self.head(x), part


class Hidden(Model):
    """Returns the outputs of all blocks, as they are."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.stem(x)
        every = [x]
        for block in self.blocks:
            x = self.trip(block(x))
            every.append(x)
        return {"y": self.head(x), "hidden": tuple(every), "best": x.argmax(1)}


class Words(Model):
    """Its head is its table."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.stem(self.table(ids)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.trip(x))


class Dropped(Model):
    """Draws between blocks and in them."""

    kind = Dropping

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(F.dropout(self.trip(x), 0.2, self.training))
        return self.head(x)


class Normed(Model):
    """Running statistics between blocks, and counts in them."""

    kind = Numbered

    def __init__(self, trips: bool) -> None:
        super().__init__(trips)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.norm(self.trip(block(x))) if x.size(0) > 1 else block(x)
        return self.head(x)


class Cut(Model):
    """The stem and the first block are frozen; a part of what enters the last block is detached."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips)
        self.stem.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        one = self.blocks[0](self.stem(x))
        two = self.trip(self.blocks[1](one + self.shift))
        return self.head(self.blocks[2](two.detach() + two * 0.5))


class Limiting(Model):
    kind = Limited


class Lora(Model):
    """Nothing but adapters trains."""

    kind = Adapted

    def __init__(self, trips: bool) -> None:
        super().__init__(trips)
        self.stem.requires_grad_(False)
        self.head.requires_grad_(False)


class Aside(Model):
    """Another branch beside the blocks, which writes in place between them; an output needs no block."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips)
        self.branch = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side = self.branch(x)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            side = side + self.trip(x).detach() * 0.1
            side.mul_(0.9)
        return self.head(x + side), side * 2


class TwoLists(Model):
    """A second list of blocks behind a layer."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips, 2)
        self.middle = linear()
        self.more = nn.ModuleList(Block(trips) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        x = first
        for block in self.blocks:
            x = block(x)
        memory = self.trip(torch.tanh(self.middle(x)))
        x = first
        for block in self.more:
            x = block(x, memory)
        return self.head(x)


class PartlyFixed(Model):
    """Calls its first and its third block without gradients; what they return scales what the others do."""

    def __init__(self, trips: bool) -> None:
        super().__init__(trips, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for k, block in enumerate(self.blocks):
            with torch.set_grad_enabled(torch.is_grad_enabled() and k % 2 == 1):
                y = self.trip(block(x))
            x = x * y.sigmoid() if k % 2 == 0 else y
        return self.head(x)


#: Makes a model, with layers in which an interrupt can strike or without them.
BLOCKS: dict[str, Callable[[bool], nn.Module]] = {
    "blocks": Model,
    "blocks_glued": Glued,
    "blocks_sided": Sided,
    "blocks_passed": Passed,
    "blocks_around": Around,
    "blocks_reversible": Reversible,
    "blocks_through": Through3,
    "blocks_hidden": Hidden,
    "blocks_words": Words,
    "blocks_dropped": Dropped,
    "blocks_normed": Normed,
    "blocks_cut": Cut,
    "blocks_limited": Limiting,
    "blocks_lora": Lora,
    "blocks_aside": Aside,
    "blocks_lists": TwoLists,
    "blocks_fixed": PartlyFixed,
    "blocks_all": Model,
}

#: The names of their lists of blocks.
LISTS: dict[str, tuple[str, ...]] = dict.fromkeys(BLOCKS, ("blocks",)) | {
    "blocks_lists": ("blocks", "more"),
    "blocks_all": ("stem", "blocks", "head"),  # nothing is around the blocks
}

#: Models in which a tensor takes gradients of several pieces of graph, which are summed in another order.
REORDERED = frozenset(
    f"blocks_{name}" for name in ("glued", "sided", "around", "reversible", "hidden", "words", "lists", "fixed")
)
