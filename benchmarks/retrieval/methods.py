"""The methods: one training loop, and three ways to compute a step's gradient.

Encoder, data, dropout masks, loss, optimizer and schedule are the same, so that losses may differ by rounding only.
"""

import importlib
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness.io_counters import IOCounters, counted_between
from benchmarks.harness.memory_cap import cap_memory
from benchmarks.harness.worker import Reporter
from benchmarks.models.encoder import build_encoder
from benchmarks.retrieval.settings import DESCRIPTION_TOKENS, OURS, SOURCE_TOKENS, TEMPERATURE, WEIGHT_DECAY, Settings
from benchmarks.retrieval.workload import Batches

RECALL_AT = 10
FLOOR = "interpreter and torch"
BEFORE = "before the first step"
EVALUATION_ROWS = 32  # few: an evaluation must not set the peak that is reported for training

Step = Callable[[Tensor, Tensor], Tensor]
"""Descriptions and sources to the loss, with the gradients accumulated in ``.grad``."""
Made = tuple[nn.Module, Step]


def contrastive_loss(descriptions: Tensor, sources: Tensor, temperature: float) -> Tensor:
    """Cross entropy of finding each source by its description and each description by its source.

    Both of shape (rows, channels) and length 1; every other row of the batch is a wrong answer.
    """
    scores = descriptions @ sources.T / temperature
    answers = torch.arange(len(scores), device=scores.device)
    return (functional.cross_entropy(scores, answers) + functional.cross_entropy(scores.T, answers)) / 2


def whole_batch(encoder: nn.Sequential, settings: Settings, home: Path) -> Made:
    """Both sides in one piece, everything in memory."""

    def step(descriptions: Tensor, sources: Tensor) -> Tensor:
        loss = contrastive_loss(encoder(descriptions), encoder(sources), TEMPERATURE)
        loss.backward()
        return loss.detach()

    return encoder, step


def cached(encoder: nn.Sequential, settings: Settings, home: Path) -> Made:
    """GradCache: activations of one chunk at a time; the model in memory."""
    return encoder, _cache_over(encoder, settings)


def cached_and_offloaded(encoder: nn.Sequential, settings: Settings, home: Path) -> Made:
    """GradCache over an OffloadModel: parameters, gradients and the optimizer's moments in files as well.

    Only one shard's activations exist at a time, so several chunks run together where GradCache alone takes one.
    """
    from offload import OffloadModel

    model = OffloadModel(
        encoder,
        "cpu",
        offload_device=home,
        num_slices=settings.slices,
        checkpoint_activation=True,
        boundary_bytes=settings.boundary_bytes,
        activation_bytes=settings.activation_bytes,
    )
    return model, _cache_over(model, settings)


METHODS: dict[str, Callable[[nn.Sequential, Settings, Path], Made]] = {
    "whole": whole_batch,
    "gradcache": cached,
    OURS: cached_and_offloaded,
}


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
    tokens: str,
    home: str,
    cap_bytes: int | None = None,
    only_steps: int | None = None,
) -> dict[str, Any]:
    """One case, from the first import to the last evaluation; a step of training in each turn.

    Args:
        report: to the parent.
        method: a key of :data:`METHODS`.
        settings: the fields of :class:`Settings`.
        tokens: the file that ``write_tokens`` wrote.
        home: a directory on disk for shards.
        cap_bytes: of private memory that the process may map, from before it does anything.
        only_steps: the first so many steps of the schedule, and no evaluation.
    """
    importlib.import_module("torch._dynamo")  # every torch optimizer imports it: a part of what torch alone takes
    report.memory(FLOOR)
    if cap_bytes is not None:
        cap_memory(cap_bytes)
    chosen = Settings(**settings)
    batches = Batches(Path(tokens), chosen)
    positions = max(DESCRIPTION_TOKENS, SOURCE_TOKENS)
    sizes: dict[str, Any] = {name: getattr(chosen, name) for name in ("dim", "depth", "dropout", "seed")}
    Path(home).mkdir(parents=True, exist_ok=True)
    model, step = METHODS[method](build_encoder(chosen.vocabulary, positions, **sizes), chosen, Path(home))
    optimizer = make_optimizer(model, chosen)
    steps = min(chosen.training_steps, chosen.training_steps if only_steps is None else only_steps)
    report.total(steps)
    before = recall(model, *batches.held_out()) if only_steps is None else None
    report.memory(BEFORE)
    report.phase("training")
    counted = _statistics(model)
    for k in itertools.islice(report.turns(), steps):
        descriptions, sources = batches.training(k)
        for group in optimizer.param_groups:
            group["lr"] = chosen.learning_rate_at(k)
        counters, started = IOCounters(), time.perf_counter()
        optimizer.zero_grad()
        loss = step(descriptions, sources).item()
        optimizer.step()
        seconds = time.perf_counter() - started
        before_step, counted = counted, _statistics(model)
        report.step(loss=loss, seconds=seconds, **counters.taken(), **counted_between(before_step, counted))
    report.phase("evaluation")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "recall_before": before,
        "recall_after": recall(model, *batches.held_out()) if only_steps is None else None,
        "held_out": len(batches.held_out()[0]),
        "statistics": _statistics(model) or None,
    }


@torch.no_grad()
def recall(model: nn.Module, descriptions: Tensor, sources: Tensor, at: int = RECALL_AT) -> float:
    """Share of descriptions whose own source is among the ``at`` nearest of all; chance is ``at / rows``.

    A source that is as near as the right one counts against it, and so does a score that is not a number.
    """
    was_training = model.training
    model.eval()
    try:
        sides = [torch.cat([model(part) for part in side.split(EVALUATION_ROWS)]) for side in (descriptions, sources)]
    finally:
        model.train(was_training)
    scores = sides[0] @ sides[1].T
    further = (scores < scores.diagonal()[:, None]).sum(dim=1)
    return (further >= len(scores) - at).double().mean().item()


def _cache_over(model: nn.Module, settings: Settings) -> Step:
    from gradcache import GradCache
    from gradcache.loss import SimpleContrastiveLoss

    # By tiles: the scores of all rows against all rows would outgrow the encoder when the batch is large.
    loss = SimpleContrastiveLoss(temperature=TEMPERATURE, symmetric=True, tile_rows=settings.loss_rows)
    cache = GradCache([model, model], chunk_sizes=settings.chunk, loss_fn=loss)
    return lambda descriptions, sources: cache(descriptions, sources)


def _statistics(model: nn.Module) -> dict[str, Any]:
    """What an OffloadModel counts; nothing for a model in memory."""
    from offload import OffloadModel

    return asdict(model.statistics()) if isinstance(model, OffloadModel) else {}
