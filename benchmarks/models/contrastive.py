"""Contrastive batches: an encoder for both sides of pairs, its loss, and the ways to take a step over a large batch."""

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.dropout import row_keys
from benchmarks.models.encoder import build_encoder
from benchmarks.models.methods import Training

TEMPERATURE = 0.05
WHOLE, GRADCACHE, CHUNK_BY_CHUNK = "whole", "GradCache", "chunk by chunk"
UPSTREAM, SENTENCE_TRANSFORMERS = "upstream GradCache", "sentence-transformers"


def contrastive_loss(queries: Tensor, passages: Tensor) -> Tensor:
    """Cross entropy of each query's scores against all passages; both of shape (rows, channels)."""
    answers = torch.arange(len(queries), device=queries.device)
    return functional.cross_entropy(queries @ passages.T / TEMPERATURE, answers)


@dataclass(frozen=True)
class Pairs(Training):
    """A model that encodes both sides of ``rows`` pairs: an example is the queries and the passages.

    ``way``: how a batch goes through the model; an OffloadModel takes it in chunks of ``chunk`` rows, by ``GradCache``.
    """

    chunk: int = 8
    way: str = WHOLE
    tile_rows: int | None = None  #: rows whose scores ours has at a time
    symmetric: bool = False  #: passages find their queries, too

    @property
    def tokens(self) -> int:
        """Tokens of both sides."""
        return 2 * super().tokens

    def inputs(self, rows: Tensor) -> Any:
        """What the model takes for rows of tokens."""
        return rows

    def represent(self, output: Any) -> Tensor:
        """The representations (rows, channels) in what the model returns."""
        return output

    def encode(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Representations of rows of tokens."""
        inputs = self.inputs(rows)
        return self.represent(model(**inputs) if isinstance(inputs, dict) else model(inputs))

    def loss(self, model: nn.Module, value: Tensor, target: Tensor) -> Tensor:
        """That of the whole batch."""
        queries, passages = self.encode(model, value), self.encode(model, target)
        loss = contrastive_loss(queries, passages)
        return (loss + contrastive_loss(passages, queries)) / 2 if self.symmetric else loss

    def gradient(self, model: nn.Module) -> Callable[..., Tensor]:
        """From queries and passages to the loss, with the gradients accumulated."""
        if hasattr(model, "memory_report") or self.way in (GRADCACHE, CHUNK_BY_CHUNK):
            step = self._gradcache(model)
        elif self.way == UPSTREAM:
            step = upstream_class()(models=[model, model], chunk_sizes=self.chunk, loss_fn=contrastive_loss)
        elif self.way == SENTENCE_TRANSFORMERS:
            step = sentence_transformers_gradient(self, model)
        else:
            return super().gradient(model)

        def run(queries: Tensor, passages: Tensor) -> Tensor:
            with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.mixed):
                return step(self.inputs(queries), self.inputs(passages))

        return run

    def _gradcache(self, model: nn.Module) -> Any:
        from gradcache import GradCache
        from gradcache.loss import SimpleContrastiveLoss

        class ChunkByChunk(GradCache):
            """Runs both passes chunk by chunk, because a subclass replaces one of its hooks."""

            def model_call(self, model: nn.Module, model_input: Any) -> Any:
                return super().model_call(model, model_input)

        kind = ChunkByChunk if self.way == CHUNK_BY_CHUNK else GradCache
        how = {"temperature": TEMPERATURE, "tile_rows": self.tile_rows, "symmetric": self.symmetric}
        loss_fn = SimpleContrastiveLoss(**how)
        return kind([model, model], self.chunk, loss_fn, get_rep_fn=self.represent)


@dataclass(frozen=True)
class Texts(Pairs):
    """The encoder of rows with keys for dropout, and pairs of random tokens."""

    vocabulary: int = 0

    def build(self) -> nn.Sequential:
        """The encoder, the same for the same sizes."""
        sizes = {"dim": self.dim, "depth": self.blocks, "dropout": self.dropout, "seed": self.seed}
        return build_encoder(self.vocabulary, self.positions, **sizes)

    def example(self, step: int) -> tuple[Tensor, ...]:
        """Queries and passages: int64 of shape (rows, 1 + positions), keys for dropout and tokens."""
        return tuple(self._side(step, tower) for tower in range(2))

    def _side(self, step: int, tower: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * step + tower)
        tokens = torch.randint(2, self.vocabulary, (self.rows, self.positions), generator=generator)
        return torch.cat([row_keys(self.seed, step, tower, self.rows)[:, None], tokens], dim=1)


class Qwen(Pairs):
    """Pairs for a model of transformers: the last token's state at length 1. Rows have no padding."""

    path = "layers"

    def inputs(self, rows: Tensor) -> Any:
        """Arguments of the model."""
        return {"input_ids": rows, "use_cache": False}

    def represent(self, output: Any) -> Tensor:
        """The last state."""
        return functional.normalize(output.last_hidden_state[:, -1], dim=-1)

    def recomputed(self, model: Any) -> nn.Module:
        """The model's own checkpoints."""
        with warnings.catch_warnings():  # its later name is not in all versions
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


def sentence_transformers_gradient(pairs: Pairs, encoder: nn.Module) -> Callable[[Any, Any], Tensor]:
    """The cached ranking loss of sentence-transformers, in chunks."""
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    transformer = importlib.import_module("sentence_transformers").SentenceTransformer

    class Adapter(nn.Module):
        """The encoder with the interface of a module of sentence-transformers."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {**features, "sentence_embedding": pairs.encode(self.encoder, features["input_ids"])}

    model = transformer(modules=[Adapter()], device=pairs.device)
    loss_fn = losses.CachedMultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, mini_batch_size=pairs.chunk)

    def gradient(*sides: Any) -> Tensor:
        rows = [side["input_ids"] if isinstance(side, dict) else side for side in sides]
        loss: Tensor = loss_fn([{"input_ids": each} for each in rows], torch.zeros(len(rows[0]), device=pairs.device))
        loss.backward()
        return loss.detach()

    return gradient


def upstream_class() -> Any:
    """The class of the package GradCache.

    Its wheel installs a folder with the name of ours, ``gradcache``, and imports itself as ``grad_cache``; so it is
    loaded from its files under the name that it uses.
    """
    if "grad_cache" not in sys.modules and importlib.util.find_spec("grad_cache") is None:
        package = Path(str(importlib.metadata.distribution("gradcache").locate_file("gradcache")))
        spec: Any = importlib.util.spec_from_file_location(
            "grad_cache", package / "__init__.py", submodule_search_locations=[str(package)]
        )
        sys.modules["grad_cache"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module("grad_cache.grad_cache").GradCache
