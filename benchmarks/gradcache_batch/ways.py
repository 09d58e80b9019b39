"""The ways to come by the gradient of a big batch: one encoder, one batch, one loss, and what differs.

Wherever a way recomputes, it does so layer by layer; wherever it cuts the batch, it cuts it into the same chunks.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.gradcache_batch.shape import MEBIBYTE, TEMPERATURE, Shape
from gradcache import GradCache
from gradcache.loss import SimpleContrastiveLoss
from offload import OffloadModel

__all__ = ["PEERS", "TILE_ROWS", "WAYS", "Step", "make"]

TILE_ROWS = 256
Step = Callable[[Tensor, Tensor], Tensor]
"""Rows of both towers to the loss, with the gradients accumulated in ``.grad``."""


def contrastive_loss(queries: Tensor, passages: Tensor) -> Tensor:
    """Cross entropy of each query's scores against all passages."""
    return functional.cross_entropy(queries @ passages.T / TEMPERATURE, torch.arange(len(queries)))


class Checkpointed(nn.Module):
    """The encoder with ``torch.utils.checkpoint`` around each layer."""

    def __init__(self, encoder: nn.Sequential) -> None:
        super().__init__()
        self.layers = encoder

    def forward(self, value: Any) -> Any:
        """What the encoder gives."""
        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=False)
        return value


def _in_one_piece(model: nn.Module) -> Step:
    def step(queries: Tensor, passages: Tensor) -> Tensor:
        loss = contrastive_loss(model(queries), model(passages))
        loss.backward()
        return loss.detach()

    return step


def plain(encoder: nn.Sequential, shape: Shape, home: Path) -> tuple[nn.Module, Step]:
    """What anyone writes first."""
    return encoder, _in_one_piece(encoder)


def checkpointed(encoder: nn.Sequential, shape: Shape, home: Path) -> tuple[nn.Module, Step]:
    """The whole batch, with each layer recomputed."""
    return encoder, _in_one_piece(Checkpointed(encoder))


def upstream(encoder: nn.Sequential, shape: Shape, home: Path) -> tuple[nn.Module, Step]:
    """The package GradCache, over checkpointed layers."""
    model = Checkpointed(encoder)
    cache = upstream_class()(models=[model, model], chunk_sizes=shape.chunk, loss_fn=contrastive_loss)
    return encoder, lambda queries, passages: cache(queries, passages)


class ChunkByChunk(GradCache):
    """GradCache without its fused walk: who replaces the hook that calls the model is called for every chunk."""

    def model_call(self, model: nn.Module, model_input: Any) -> Any:
        """As it is."""
        return super().model_call(model, model_input)


def offload_chunk_by_chunk(encoder: nn.Sequential, shape: Shape, home: Path) -> tuple[nn.Module, Step]:
    """GradCache's two passes over an OffloadModel: each chunk brings every shard in three times."""
    model = _offloaded(encoder, shape, home)
    cache = ChunkByChunk([model, model], shape.chunk, contrastive_loss)
    return model, lambda queries, passages: cache(queries, passages)


def sentence_transformers(encoder: nn.Sequential, shape: Shape, home: Path) -> tuple[nn.Module, Step]:
    """The cached ranking loss of sentence-transformers, over checkpointed layers."""
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    transformer = importlib.import_module("sentence_transformers").SentenceTransformer
    layers = Checkpointed(encoder)

    class Speaking(nn.Module):
        """The encoder with the interface of a SentenceTransformer."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            """Features in, features with an embedding out."""
            return {**features, "sentence_embedding": self.layers(features["input_ids"])}

    model = transformer(modules=[Speaking()], device="cpu")
    loss_fn = losses.CachedMultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, mini_batch_size=shape.chunk)

    def step(queries: Tensor, passages: Tensor) -> Tensor:
        loss: Tensor = loss_fn([{"input_ids": queries}, {"input_ids": passages}], torch.zeros(len(queries)))
        loss.backward()
        return loss.detach()

    return encoder, step


def ours(encoder: nn.Sequential, shape: Shape, home: Path, regroup: bool = True) -> tuple[nn.Module, Step]:
    """Fused over the layers, which are in memory."""
    loss = SimpleContrastiveLoss(temperature=TEMPERATURE, tile_rows=TILE_ROWS)
    kept = shape.kept_mebibytes * MEBIBYTE
    cache = GradCache([encoder, encoder], shape.chunk, loss, boundary_bytes=kept, regroup=regroup)
    return encoder, lambda queries, passages: cache(queries, passages)


def ours_apart(encoder: nn.Sequential, shape: Shape, home: Path) -> tuple[nn.Module, Step]:
    """The same, with the chunks as they were asked for."""
    return ours(encoder, shape, home, regroup=False)


def ours_over_offload(encoder: nn.Sequential, shape: Shape, home: Path) -> tuple[nn.Module, Step]:
    """Fused over an OffloadModel with its home on disk."""
    together = shape.activation_mebibytes * MEBIBYTE
    return _over_offload(encoder, shape, home, shape.graph_mebibytes, activation_bytes=together)


def ours_over_offload_apart(encoder: nn.Sequential, shape: Shape, home: Path) -> tuple[nn.Module, Step]:
    """The same, with the chunks as they were asked for: each has gradients of its own beside the sum of all."""
    return _over_offload(encoder, shape, home, shape.graph_mebibytes * 7 // 8)


def _over_offload(
    encoder: nn.Sequential, shape: Shape, home: Path, graph_mebibytes: int, **options: Any
) -> tuple[nn.Module, Step]:
    options |= {"graph_bytes": graph_mebibytes * MEBIBYTE or None, "boundary_bytes": shape.kept_mebibytes * MEBIBYTE}
    model = _offloaded(encoder, shape, home, **options)
    loss = SimpleContrastiveLoss(temperature=TEMPERATURE, tile_rows=TILE_ROWS)
    cache = GradCache([model, model], shape.chunk, loss)
    return model, lambda queries, passages: cache(queries, passages)


def _offloaded(encoder: nn.Sequential, shape: Shape, home: Path, **options: Any) -> OffloadModel:
    options = {"num_slices": len(encoder), "checkpoint_activation": True, **options}
    return OffloadModel(encoder, "cpu", home, **options)


WAYS: dict[str, Callable[[nn.Sequential, Shape, Path], tuple[nn.Module, Step]]] = {
    "plain torch": plain,
    "torch.utils.checkpoint": checkpointed,
    "upstream GradCache": upstream,
    "sentence-transformers": sentence_transformers,
    "ours": ours,
    "ours over OffloadModel": ours_over_offload,
    "ours, chunks apart": ours_apart,
    "ours over OffloadModel, chunks apart": ours_over_offload_apart,
    "OffloadModel, chunk by chunk": offload_chunk_by_chunk,
}
PEERS = {"upstream GradCache": "gradcache", "sentence-transformers": "sentence-transformers"}


def make(way: str, shape: Shape, home: Path) -> tuple[nn.Module, Step]:
    """The model whose parameters take the gradient, and the step."""
    return WAYS[way](shape.build(), shape, home)


def upstream_class() -> Any:
    """The class of the package GradCache.

    Its wheel lies in a folder that is called as ours, ``gradcache``, and imports itself as ``grad_cache``; so it is
    loaded from its files under the name that it uses.
    """
    if "grad_cache" not in sys.modules and importlib.util.find_spec("grad_cache") is None:
        package = Path(str(importlib.metadata.distribution("gradcache").locate_file("gradcache")))
        spec = importlib.util.spec_from_file_location(
            "grad_cache", package / "__init__.py", submodule_search_locations=[str(package)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["grad_cache"] = module
        spec.loader.exec_module(module)
    return importlib.import_module("grad_cache.grad_cache").GradCache
