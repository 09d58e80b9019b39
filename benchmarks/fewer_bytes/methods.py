"""Trains one of two models with one option: the encoder of ``retrieval``, or a decoder of the same sources."""

import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness.settings import option
from benchmarks.harness.worker import Reporter
from benchmarks.models.encoder import PADDING, build_encoder
from benchmarks.retrieval import workload
from benchmarks.retrieval.methods import contrastive_loss, recall
from benchmarks.retrieval.workload import LENGTHS, TEMPERATURE, WEIGHT_DECAY, Batches


class Stored(NamedTuple):
    """How a model and its optimizer store what they train: their arguments."""

    model: dict[str, Any]
    optimizer: dict[str, Any]


EXACT = "exact"
OPTIONS = {
    EXACT: Stored({}, {}),
    "states-bfloat16": Stored({}, {"states": torch.bfloat16}),
    "states-8bit": Stored({}, {"states": "8bit"}),
    "gradients-bfloat16": Stored({"gradient_dtype": torch.bfloat16}, {}),
    "weights-split": Stored({"store_dtype": "split"}, {}),
    "weights-bfloat16": Stored({"store_dtype": torch.bfloat16}, {}),
    "everything": Stored({"store_dtype": torch.bfloat16, "gradient_dtype": torch.bfloat16}, {"states": "8bit"}),
}
MODELS = ("encoder", "decoder")
HELD_OUT_ROWS = 64  # of the held-out loss, in one batch
HEAD_CHANNELS = 32
CURVE = 10  # points of a curve, at which recall is measured


@dataclass(frozen=True)
class Settings:
    """Models, options, seeds and sizes of a run."""

    dim: int = option(64, "channels of both models", multiple=64)
    depth: int = option(2, "blocks")
    batch: int = option(24, "pairs in a batch, and rows of the decoder", least=2)
    steps: int = option(500, "training steps")
    seeds: int = option(3, "runs of each model and option", least=2)
    pairs: int = option(4_000, "of the corpus")
    vocabulary: int = option(2048, "tokens", least=257)
    learning_rate: float = option(2e-3, "of AdamW, after the warm-up", least=0)
    models: tuple[str, ...] = option(MODELS, "which to train", choices=MODELS)
    options: tuple[str, ...] = option(tuple(OPTIONS), "which options to compare", choices=tuple(OPTIONS))

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: all options are compared with exact training."""
        return "" if EXACT in self.options else f"expected {EXACT!r} among the options, got {list(self.options)}"

    def of_retrieval(self, seed: int) -> workload.Settings:
        """These settings as those of ``retrieval``, whose data the encoder is trained on."""
        ours = {k: v for k, v in asdict(self).items() if k not in ("seeds", "models", "options")}
        return replace(workload.Settings(), **ours, seed=seed, dropout=0.0)


class Decoder(nn.Module):
    """One block of a decoder: attention to earlier tokens, then a perceptron."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, positions, channels) to the same."""
        rows, positions, dim = hidden.shape
        heads = dim // HEAD_CHANNELS
        parts = self.qkv(self.norms[0](hidden)).view(rows, positions, 3, heads, HEAD_CHANNELS).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(rows, positions, dim))
        down: Tensor = self.down(functional.gelu(self.up(self.norms[1](hidden))))
        return hidden + down


def build_decoder(settings: Settings, seed: int) -> nn.Sequential:
    """Tokens (rows, positions) to scores of the next ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [Decoder(settings.dim) for _ in range(settings.depth)]
        table, head = nn.Embedding(settings.vocabulary, settings.dim), nn.Linear(settings.dim, settings.vocabulary)
        return nn.Sequential(table, *blocks, nn.LayerNorm(settings.dim), head)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross entropy of each token after those before it; padding does not count."""
    scores = model(tokens[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PADDING)


def train(report: Reporter, which: str, option: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains once over homes in host memory, which round as files do; returns losses and scores."""
    from gradcache import GradCache
    from gradcache.loss import SimpleContrastiveLoss
    from offload import MemoryPolicy, OffloadModel, OffloadOptimizer

    chosen = Settings(**settings)
    data, stored = chosen.of_retrieval(seed), OPTIONS[option]
    batches = Batches(Path("tokens.npz"), data)
    if which == "encoder":
        sizes: dict[str, Any] = {"dim": chosen.dim, "depth": chosen.depth, "dropout": 0.0, "seed": seed}
        layers = build_encoder(chosen.vocabulary, max(LENGTHS), **sizes)
    else:
        layers = build_decoder(chosen, seed)
    shards: dict[str, Any] = {"num_slices": 2, "checkpoint_activation": False, "memory": MemoryPolicy.fixed()}
    model = OffloadModel(layers, "cpu", "cpu", **shards, **stored.model)
    options = {"lr": chosen.learning_rate, "weight_decay": WEIGHT_DECAY, "max_norm": 1.0}
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, **options, **stored.optimizer)
    # Both sides pass the encoder before one backward, so that gradients are rounded once a step.
    loss_fn = SimpleContrastiveLoss(temperature=TEMPERATURE, symmetric=True)
    cache = GradCache([model, model], chunk_sizes=chosen.batch, loss_fn=loss_fn)

    def backward(descriptions: Tensor, sources: Tensor) -> Tensor:
        if which == "encoder":
            return cache(descriptions, sources)
        loss = next_token_loss(model, sources[:, 1:])
        loss.backward()
        return loss.detach()

    descriptions, sources = batches.held_out()
    losses, seconds, gradient_bytes = [], [], 0
    recalls: list[tuple[int, float]] = []
    for step in range(chosen.steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = data.learning_rate_at(step)
        optimizer.zero_grad()
        losses.append(backward(*batches.training(step)).item())
        gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        if which == "encoder" and (step + 1) % max(1, chosen.steps // CURVE) == 0:
            recalls.append((step + 1, recall(model, descriptions, sources)))
    optimizer.synchronize()
    model.eval()
    few = descriptions[:HELD_OUT_ROWS], sources[:HELD_OUT_ROWS]
    with torch.no_grad():
        if which == "encoder":
            held_out_loss = contrastive_loss(*(model(side) for side in few), TEMPERATURE)
        else:
            held_out_loss = next_token_loss(model, few[1][:, 1:])
    states = [v for state in optimizer.state_dict()["state"].values() for v in state.values() if isinstance(v, Tensor)]
    return {
        "losses": losses,
        "held_out_loss": held_out_loss.item(),
        "recall": recall(model, descriptions, sources) if which == "encoder" else None,
        "recalls": recalls,
        "step_seconds": statistics.median(seconds),
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": sum(value.nbytes for value in model.state_dict().values()),
        "state_bytes": sum(value.nbytes for value in states),
        "gradient_bytes": gradient_bytes,
    }
