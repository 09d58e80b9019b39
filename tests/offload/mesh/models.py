"""The models that ranks train, and their batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORDS, WIDTH, LENGTH = 11, 7, 4


def build(seed: int = 0, *, tied: bool = False, meta: bool = False) -> nn.Sequential:
    """Rows that no number of ranks divides, a layer of one row, and one that may be used twice."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        again = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(
            *(nn.Linear(5, WIDTH), nn.Tanh(), again, nn.Tanh()),
            *(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), again if tied else nn.Linear(WIDTH, WIDTH)),
            *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)),
        )


def rows(seed: int = 0) -> Tensor:
    """A batch for :func:`build`."""
    return torch.randn(24, 5, generator=torch.Generator().manual_seed(seed))


def batches(count: int = 3) -> Tensor:
    return torch.stack([rows(seed) for seed in range(count)])


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) * scale)


class Encoder(nn.Module):
    """Parameters before, between and after blocks, a scalar, a tied one, and one that is never used.

    ``order`` of its blocks; ``how`` the last one of the order is called: "detached" from those before, or "unused".
    """

    order: tuple[int, ...] = (0, 1, 2)

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor, how: str = "") -> Tensor:
        x = self.words(ids)
        for k, j in enumerate(self.order):
            last = k + 1 == len(self.order)
            after = self.layers[j](x.detach() if how == "detached" and last else x, self.scale)
            x = x if how == "unused" and last else after
            if k == 0:
                x = self.between(x)
        found: Tensor = self.head(x).mean(1)
        return found


def batch(seed: int = 0) -> Tensor:
    """For an :class:`Encoder`."""
    return torch.randint(0, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(seed))


class Adapted(nn.Module):
    """A frozen layer with an adapter, and a parameter that all of these share."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.lora_scale = shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.lora_b(self.lora_a(x)) * self.lora_scale)


class Large(nn.Module):
    """Its embedding, which is tied to its head, has nearly all of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20001, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 20001, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        found: Tensor = self.head(x.mean(1))
        return found
