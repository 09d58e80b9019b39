"""The methods: one training loop, and three ways to compute a step's gradient.

Encoder, data, dropout masks, loss, optimizer and schedule are the same, so that losses may differ by rounding only.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness.case import FLOOR
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.memory import cap_memory
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.worker import Reporter
from benchmarks.models.encoder import build_encoder
from benchmarks.retrieval.workload import LENGTHS, OURS, TEMPERATURE, WEIGHT_DECAY, Batches, Settings

RECALL_AT = 10
BEFORE = "before the first step"
EVALUATION_ROWS = 32  # few: an evaluation must not set the peak that is reported for training

Step = Callable[[Tensor, Tensor], Tensor]
"""Descriptions and sources to the loss, with the gradients accumulated in ``.grad``."""


def contrastive_loss(descriptions: Tensor, sources: Tensor, temperature: float) -> Tensor:
    """Cross entropy of finding each source by its description and each description by its source.

    Both of shape (rows, channels) and length 1; every other row of the batch is a wrong answer.
    """
    scores = descriptions @ sources.T / temperature
    answers = torch.arange(len(scores), device=scores.device)
    return (functional.cross_entropy(scores, answers) + functional.cross_entropy(scores.T, answers)) / 2


def make(
    method: str, encoder: nn.Sequential, settings: Settings, home: Path, ranks: Ranks | None = None
) -> tuple[nn.Module, Step]:
    """The model and the step of a method: the whole batch in one piece; in chunks; in chunks over a model on disk.

    With ``ranks`` this process is one of several that train the last one together, each on rows of its own.
    """
    if method == "whole":

        def step(descriptions: Tensor, sources: Tensor) -> Tensor:
            loss = contrastive_loss(encoder(descriptions), encoder(sources), TEMPERATURE)
            loss.backward()
            return loss.detach()

        return encoder, step
    from gradcache import GradCache
    from gradcache.loss import DistributedContrastiveLoss, SimpleContrastiveLoss
    from offload import OffloadModel

    model: nn.Module = encoder
    if ranks is not None:
        model = OffloadModel(encoder, "cpu", home, mesh=ranks.mesh, checkpoint_activation=True)
        one_way = DistributedContrastiveLoss(temperature=TEMPERATURE, tile_rows=settings.loss_rows)

        def both_ways(descriptions: Tensor, sources: Tensor) -> Tensor:
            return (one_way(descriptions, sources) + one_way(sources, descriptions)) / 2

        together = GradCache([model, model], chunk_sizes=settings.chunk, loss_fn=both_ways)
        return model, lambda descriptions, sources: together(descriptions, sources)
    if method == OURS:
        model = OffloadModel(encoder, "cpu", home, memory=settings.memory)
    # By tiles: the scores of all rows against all rows would outgrow the encoder when the batch is large.
    loss_fn = SimpleContrastiveLoss(temperature=TEMPERATURE, symmetric=True, tile_rows=settings.loss_rows)
    cache = GradCache([model, model], chunk_sizes=settings.chunk, loss_fn=loss_fn)
    return model, lambda descriptions, sources: cache(descriptions, sources)


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW. Over an OffloadModel its moments are stored with the shards, and updates overlap with compute."""
    from offload import OffloadModel, OffloadOptimizer

    # fused: one pass over parameter, gradient and both moments, and no temporary copy of any of them.
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": WEIGHT_DECAY, "fused": True}
    if isinstance(model, OffloadModel):
        return OffloadOptimizer(model, torch.optim.AdamW, **options)
    return torch.optim.AdamW(model.parameters(), **options)


def train(
    report: Reporter,
    method: str,
    settings: dict[str, Any],
    cap_bytes: int | None,
    evaluate: bool,
    together: bool = False,
) -> dict[str, Any]:
    """One case: a step of training in each turn, under a cap of private memory from the beginning.

    None: under a cap of what the machine has left. ``together``: this process is a rank of several.
    """
    importlib.import_module("torch._dynamo")  # every torch optimizer imports it: a part of what torch alone takes
    report.phase(FLOOR)
    cap_memory(cap_bytes or int(0.9 * psutil.virtual_memory().available))  # the rest is for others
    ranks = Ranks() if together else None
    chosen = Settings(**{**settings, "ranks": ranks.count if ranks else 1})
    batches = Batches(Path("tokens.npz"), chosen)
    sizes: dict[str, Any] = {name: getattr(chosen, name) for name in ("dim", "depth", "dropout", "seed")}
    model, step = make(method, build_encoder(chosen.vocabulary, max(LENGTHS), **sizes), chosen, Path("home"), ranks)
    optimizer = make_optimizer(model, chosen)
    before = search(model, *batches.held_out()) if evaluate else None
    report.phase(BEFORE)
    report.phase("training")
    for k in report.turns():
        rows = batches.training(k, ranks.rank if ranks else 0)
        for group in optimizer.param_groups:
            group["lr"] = chosen.learning_rate_at(k)

        def whole(rows: tuple[Tensor, Tensor] = rows) -> float:
            optimizer.zero_grad()
            loss = step(*rows).item()
            optimizer.step()
            return loss

        loss, values = measure(whole, model)
        report.step(loss=loss, **values)
    report.phase("evaluation")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "before": before,
        "after": search(model, *batches.held_out()) if evaluate else None,
        "held_out": len(batches.held_out()[0]),
        "statistics": counts_of(model) or None,
    }


@torch.no_grad()
def search(model: nn.Module, descriptions: Tensor, sources: Tensor, at: int = RECALL_AT) -> dict[str, float]:
    """The loss over all rows, and the share of descriptions whose own source is among the ``at`` nearest of all.

    Chance finds ``at / rows``. A source that is as near as the right one counts against it, and so does a score that is
    not a number.
    """
    was_training = model.training
    model.eval()
    try:
        sides = [torch.cat([model(part) for part in side.split(EVALUATION_ROWS)]) for side in (descriptions, sources)]
    finally:
        model.train(was_training)
    scores = sides[0] @ sides[1].T
    further = (scores < scores.diagonal()[:, None]).sum(dim=1)
    found = (further >= len(scores) - at).double().mean()
    return {"loss": contrastive_loss(*sides, TEMPERATURE).item(), "recall": found.item()}
