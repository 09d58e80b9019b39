"""Settings: the model in two CPU stages, which are one device, and its mini-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.settings import option

STAGES = 2


@dataclass(frozen=True)
class Settings:
    """Sizes, and how often to measure."""

    dim: int = option(384, "channels")
    blocks: int = option(4, "blocks of four layers", least=2)
    rows: int = option(1024, "rows of the mini-batch")
    chunks: tuple[int, ...] = option((1, 2, 4, 8, 16), "numbers of micro-batches")
    rounds: int = option(7, "steps of each pipe")
    threads: int = option(1, "threads of torch's kernels")

    def wrong(self) -> list[str]:
        """More micro-batches than rows."""
        if max(self.chunks) <= self.rows:
            return []
        return [f"expected from 1 to {self.rows} micro-batches, got chunks={self.chunks}"]

    def model(self) -> nn.Sequential:
        """``blocks`` of four layers each: wide linear layers, between which activations are four times a boundary."""
        torch.manual_seed(0)
        torch.set_num_threads(self.threads)
        layers: list[nn.Module] = []
        for _ in range(self.blocks):
            layers += [nn.Linear(self.dim, 4 * self.dim), nn.GELU(), nn.Linear(4 * self.dim, self.dim)]
            layers.append(nn.LayerNorm(self.dim))
        return nn.Sequential(*layers)

    def batch(self) -> Tensor:
        """The mini-batch; it needs no gradient."""
        return torch.randn(self.rows, self.dim, generator=torch.Generator().manual_seed(1))

    @property
    def parameters(self) -> int:
        """Numbers in all blocks: two matrices, their biases, a norm."""
        return self.blocks * (8 * self.dim**2 + 7 * self.dim)

    @property
    def training_flops(self) -> float:
        """Of the matrix products of a forward and a backward, nothing recomputed; the batch needs no gradient."""
        return 2.0 * self.rows * (3 * 8 * self.dim**2 * self.blocks - 4 * self.dim**2)

    @property
    def balance(self) -> list[int]:
        """Layers of each stage."""
        first = 4 * (self.blocks // STAGES)
        return [first, 4 * self.blocks - first]
