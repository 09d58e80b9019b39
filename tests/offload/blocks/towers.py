"""Models that call their blocks in a forward of their own: a prefix, code between blocks, a suffix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.offload.side_by_side import offloaded

WIDTH, WORDS = 8, 20


class Block(nn.Module):
    """Takes a mask and a bias; the bias of the first block is made in it, and enters the others (as in T5)."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, bias: Tensor | None = None, note: Any = None
    ) -> tuple[Tensor, Tensor]:
        if hasattr(self, "calls"):
            self.calls += 1
        y = self.linear(self.norm(x))
        if mask is not None:
            y = y * mask
        if bias is None:
            bias = y.mean(-1, keepdim=True)
        return x + self.dropout(torch.tanh(y + bias)), bias


class Encoder(nn.Module):
    def __init__(self, blocks: int, dropout: float) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(dropout) for _ in range(blocks))


class Model(nn.Module):
    """Embeds words, runs blocks with a mask that takes a gradient, scales between them; its head is tied."""

    def __init__(self, blocks: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.masks = nn.Linear(1, WIDTH)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, blocks))
        self.encoder = Encoder(blocks, dropout)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.dropout = nn.Dropout(dropout)
        self.config = {"width": WIDTH}

    def embed(self, words: Tensor) -> Tensor:
        return self.words(words)

    def forward(self, words: Tensor, *, hidden: bool = False, extra: Tensor | None = None) -> dict[str, Any]:
        """``words``: (rows, length)."""
        x = self.dropout(self.embed(words))
        if extra is not None:
            x = x + extra
        mask = self.masks(self.masks.weight.new_ones(*words.shape, 1))
        bias, every = None, []
        for k, block in enumerate(self.encoder.layer):
            x, bias = block(x, mask, bias=bias, note=None)
            x = x * self.scales[k]
            every.append(x)
        x = self.norm(x)
        return {"logits": self.head(x), "states": x, "hidden": tuple(every) if hidden else None}


class Large(nn.Module):
    """Its embedding and its head, which may be tied, are much larger than its blocks."""

    def __init__(self, *, tied: bool = True, words: int = 8000, rows: int | None = None, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, rows or words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.layers:
            x = torch.tanh(block(x))
        y: Tensor = self.head(x.mean(1))
        return y


def make(blocks: int = 4, dropout: float = 0.1, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(blocks, dropout)


def wrap(bare: nn.Module, home: Any = "cpu", **choices: Any) -> Any:
    """A copy of a model, offloaded; its blocks are recomputed."""
    return offloaded(bare, home, **{"blocks": "encoder.layer", **choices})


def words(rows: int = 3, length: int = 5, seed: int = 1) -> Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(output: dict[str, Any]) -> Tensor:
    total: Tensor = output["logits"].square().mean() + output["states"].sum()
    return total


def step(model: nn.Module, seed: int = 3, **inputs: Any) -> tuple[Tensor, Tensor]:
    """The loss of a step, and the generator's state after it."""
    torch.manual_seed(seed)
    loss = loss_of(model(**{"words": words(), **inputs}))
    loss.backward()
    return loss.detach(), torch.get_rng_state()
