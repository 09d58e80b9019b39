"""Settings of ``retrieval``: sizes, seed, and everything that the methods have in common."""

from dataclasses import dataclass

from benchmarks.harness.settings import option
from benchmarks.harness.work import block_flops

OURS = "gradcache-offload"
METHODS = ("whole", "gradcache", OURS)
DESCRIPTION_TOKENS = 12
SOURCE_TOKENS = 28
TEMPERATURE = 0.05
WEIGHT_DECAY = 0.01
WARMUP_STEPS = 4
PAIRS_SEEN = 768  # by default: larger batches take fewer steps
MINIMUM_STEPS = 2


@dataclass(frozen=True)
class Settings:
    """One run. Rows are pairs; every row is a description and a source."""

    dim: int = option(512, "channels of the encoder", multiple=64)
    depth: int = option(6, "transformer blocks")
    batch: int = option(48, "pairs in a batch", least=2)
    chunk: int = option(8, "rows in a GradCache chunk")
    steps: int | None = option(None, f"training steps; by default as many as see {PAIRS_SEEN} pairs", kind=int)
    seed: int = option(0, "of parameters, batches and dropout", least=0)
    slices: int = option(7, "shards of the OffloadModel")
    vocabulary: int = option(4096, "tokens of the BPE: one for each byte, and more", least=257)
    pairs: int = option(12_000, "of the corpus, training and held-out together")
    held_out: int = option(256, "held-out pairs to search, from modules that are not trained on")
    dropout: float = option(0.1, "probability", least=0)
    learning_rate: float = option(3e-4, "of AdamW, after the warm-up", least=0)
    boundary_bytes: int = option(8 << 20, "activations between shards that stay in memory; others are on disk")
    activation_bytes: int = option(24 << 20, "activations inside a shard: chunks of ours run together up to this")
    loss_rows: int = option(512, "rows of the batch whose scores exist at a time, with GradCache")
    methods: tuple[str, ...] = option(METHODS, "which methods to run", choices=METHODS)
    cap: float | None = option(None, "MiB of the capped cases; by default midway of what was needed", kind=float)
    capped_steps: int = option(4, "steps under the cap; 0: no such cases", least=0)

    def wrong(self) -> list[str]:
        """More slices than layers."""
        if self.slices <= self.depth + 2:
            return []
        return [f"expected at most {self.depth + 2} slices, one for each layer, got slices={self.slices}"]

    @property
    def training_steps(self) -> int:
        """Of each method."""
        return max(MINIMUM_STEPS, PAIRS_SEEN // self.batch) if self.steps is None else self.steps

    @property
    def tokens_per_step(self) -> int:
        """Positions that one step encodes, padding included."""
        return self.batch * (DESCRIPTION_TOKENS + SOURCE_TOKENS)

    @property
    def training_flops(self) -> float:
        """Of the matrix products of a forward and a backward, padding included, nothing recomputed.

        Blocks and projection of both sides, and the scores of all rows against all rows; a backward is two forwards.
        """
        sides = (DESCRIPTION_TOKENS, SOURCE_TOKENS)
        blocks = sum(self.depth * block_flops(self.dim, self.batch * tokens, tokens) for tokens in sides)
        head = len(sides) * 2.0 * self.batch * self.dim**2
        return 3 * (blocks + head + 2.0 * self.batch**2 * self.dim)

    def learning_rate_at(self, step: int) -> float:
        """Rises during the warm-up, then falls in a straight line to 5 % at the end."""
        rising = min(1.0, (step + 1) / WARMUP_STEPS)
        return self.learning_rate * rising * max(0.05, 1 - step / self.training_steps)
