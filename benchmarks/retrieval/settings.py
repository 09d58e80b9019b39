"""What a run of the question is made of: sizes, seed, and everything the rungs must have in common."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.frame.work import block_flops

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """One run. Rows are pairs; every row is a description and a source."""

    dim: int = 512
    depth: int = 6
    batch: int = 48
    chunk: int = 8
    steps: int = 18
    seed: int = 0
    slices: int = 7
    vocabulary: int = 4096
    pairs: int = 12_000
    held_out: int = 256
    description_tokens: int = 12
    source_tokens: int = 28
    dropout: float = 0.1
    learning_rate: float = 3e-4
    warmup_steps: int = 4
    weight_decay: float = 0.01
    temperature: float = 0.05
    boundary_bytes: int = 8 << 20
    activation_bytes: int = 24 << 20
    loss_rows: int = 512

    def __post_init__(self) -> None:
        """Refuses what no rung could run, all of it at once."""
        positive = ("dim", "depth", "batch", "chunk", "steps", "slices", "pairs", "held_out", "loss_rows")
        small = {name: getattr(self, name) for name in positive if getattr(self, name) < 1}
        wrong = [f"expected at least 1, got {name}={value}" for name, value in small.items()]
        if self.dim % 64:
            wrong.append(f"expected a multiple of 64 channels, the size of a head, got dim={self.dim}")
        if self.vocabulary <= 256:
            wrong.append(f"expected more than 256 tokens, one for each byte, got vocabulary={self.vocabulary}")
        if self.batch < 2:
            wrong.append(f"expected at least 2 pairs to tell apart, got batch={self.batch}")
        if self.slices > self.depth + 2:
            wrong.append(f"expected at most {self.depth + 2} slices, one for each layer, got slices={self.slices}")
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def tokens_per_step(self) -> int:
        """Positions that one step encodes, padding included."""
        return self.batch * (self.description_tokens + self.source_tokens)

    @property
    def training_flops(self) -> float:
        """Of the matrix products of a forward and a backward, padding included, nothing recomputed.

        Blocks and projection of both sides, and the scores of all rows against all rows; a backward is two forwards.
        """
        sides = (self.description_tokens, self.source_tokens)
        blocks = sum(self.depth * block_flops(self.dim, self.batch * tokens, tokens) for tokens in sides)
        head = len(sides) * 2.0 * self.batch * self.dim**2
        return 3 * (blocks + head + 2.0 * self.batch**2 * self.dim)

    def learning_rate_at(self, step: int) -> float:
        """Rises for ``warmup_steps``, then falls in a straight line to 5 % at the end."""
        rising = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        return self.learning_rate * rising * max(0.05, 1 - step / self.steps)
