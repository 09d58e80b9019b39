"""The methods that compute the gradient of a large batch: one encoder, one batch, one loss.

A method that recomputes does so layer by layer, and a method that cuts the batch cuts it into the same chunks; the one
exception is GradCache as most people run it, without ``torch.utils.checkpoint``.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it in the middle of a first checkpoint, and keeps that moment's frames for a while
from torch import Tensor, nn

from benchmarks.harness.case import FLOOR, LOST, told_by
from benchmarks.harness.io_counters import measure
from benchmarks.harness.memory import cap_memory, memory_of
from benchmarks.harness.worker import Reporter
from benchmarks.models.contrastive import TEMPERATURE, contrastive_loss, sentence_transformers_gradient
from benchmarks.models.dropout import row_keys
from benchmarks.models.encoder import build_encoder
from benchmarks.models.transformer import Checkpointed
from gradcache import GradCache
from gradcache.loss import SimpleContrastiveLoss
from offload import MemoryPolicy, OffloadModel

TILE_ROWS = 256
SKETCH_PIECE = 4096
MEBIBYTE = 1 << 20
HOME = Path()  # a case works in a folder on disk

Step = Callable[[Tensor, Tensor], Tensor]
"""Rows of both towers to the loss, with the gradients accumulated in ``.grad``."""
Made = tuple[nn.Module, Step]
"""The model whose parameters take the gradient, and the step."""


@dataclass(frozen=True)
class Shape:
    """An encoder, pairs of texts, and chunks. A pair is two rows, one for each tower; the towers are one encoder."""

    vocabulary: int
    positions: int  #: tokens of a row
    dim: int
    depth: int
    pairs: int
    chunk: int  #: rows of a chunk
    kept: int  #: MiB that ours may keep between its passes, layers in memory
    graphs: int  #: MiB of graphs that ours may keep over an OffloadModel
    together: int  #: MiB of activations of chunks that run together there
    dropout: float = 0.1
    seed: int = 0

    def build(self) -> nn.Sequential:
        """The encoder, the same for the same shape."""
        return build_encoder(
            self.vocabulary, self.positions, dim=self.dim, depth=self.depth, dropout=self.dropout, seed=self.seed
        )

    def batch(self, pairs: int | None = None) -> tuple[Tensor, Tensor]:
        """Rows of both towers, int64 of shape (pairs, 1 + positions): the row's key for dropout, then its tokens."""
        count = self.pairs if pairs is None else pairs
        generator = torch.Generator().manual_seed(self.seed)

        def side(tower: int) -> Tensor:
            tokens = torch.randint(2, self.vocabulary, (count, self.positions), generator=generator)
            return torch.cat([row_keys(self.seed, 0, tower, count)[:, None], tokens], dim=1)

        return side(0), side(1)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return 2 * self.pairs * self.positions


def _tiled_loss() -> SimpleContrastiveLoss:
    return SimpleContrastiveLoss(temperature=TEMPERATURE, tile_rows=TILE_ROWS)


def _in_one_piece(model: nn.Module) -> Step:
    def step(queries: Tensor, passages: Tensor) -> Tensor:
        loss = contrastive_loss(model(queries), model(passages))
        loss.backward()
        return loss.detach()

    return step


class _ChunkByChunk(GradCache):
    """A GradCache that runs both passes chunk by chunk, because a subclass replaces one of its hooks."""

    def model_call(self, model: nn.Module, model_input: Any) -> Any:
        return super().model_call(model, model_input)


def _sentence_transformers(encoder: nn.Sequential, shape: Shape, home: Path) -> Made:
    """The cached ranking loss of sentence-transformers, over checkpointed layers."""
    layers = Checkpointed(encoder)
    return encoder, sentence_transformers_gradient(layers, layers, shape.chunk)


def _cached(encoder: nn.Sequential, shape: Shape, home: Path, checkpointed: bool) -> Made:
    """The package GradCache; ``checkpointed``: over ``torch.utils.checkpoint``."""
    model = Checkpointed(encoder) if checkpointed else encoder
    cache = upstream_class()(models=[model, model], chunk_sizes=shape.chunk, loss_fn=contrastive_loss)
    return encoder, lambda queries, passages: cache(queries, passages)


def _ours(encoder: nn.Sequential, shape: Shape, home: Path) -> Made:
    """GradCache over an encoder in memory, as the package GradCache runs it."""
    model = Checkpointed(encoder)
    return encoder, GradCache([model, model], shape.chunk, _tiled_loss())


def _over_offload(encoder: nn.Sequential, shape: Shape, home: Path) -> Made:
    """Fused over an OffloadModel that is stored on disk."""
    memory = MemoryPolicy.fixed(
        graph_bytes=shape.graphs * MEBIBYTE,
        boundary_bytes=shape.kept * MEBIBYTE,
        activation_bytes=shape.together * MEBIBYTE,
        join_chunks=True,
    )
    model = _offloaded(encoder, home, memory=memory)
    return model, GradCache([model, model], shape.chunk, _tiled_loss())


def _chunk_by_chunk(encoder: nn.Sequential, shape: Shape, home: Path) -> Made:
    """GradCache's two passes over an OffloadModel: each chunk loads every shard three times."""
    model = _offloaded(encoder, home)
    return model, _ChunkByChunk([model, model], shape.chunk, contrastive_loss)


def _offloaded(encoder: nn.Sequential, home: Path, **options: Any) -> OffloadModel:
    return OffloadModel(encoder, "cpu", home, num_slices=len(encoder), checkpoint_activation=True, **options)


METHODS: dict[str, Callable[[nn.Sequential, Shape, Path], Made]] = {
    "plain torch": lambda encoder, shape, home: (encoder, _in_one_piece(encoder)),
    "torch.utils.checkpoint": lambda encoder, shape, home: (encoder, _in_one_piece(Checkpointed(encoder))),
    "upstream GradCache": partial(_cached, checkpointed=True),
    "upstream GradCache, nothing checkpointed": partial(_cached, checkpointed=False),
    "sentence-transformers": _sentence_transformers,
    "ours": _ours,
    "ours over OffloadModel": _over_offload,
    "OffloadModel, chunk by chunk": _chunk_by_chunk,
}


def make(method: str, shape: Shape, home: Path) -> Made:
    """The model and the step of a method."""
    return METHODS[method](shape.build(), shape, home)


def upstream_class() -> Any:
    """The class of the package GradCache.

    Its wheel installs a folder with the name of ours, ``gradcache``, and imports itself as ``grad_cache``; so it is
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


# --- cases -----------------------------------------------------------------------------------------------------------


def in_turn(report: Reporter, method: str, shape: dict[str, Any]) -> dict[str, Any]:
    """One step in each turn, in the phase "steps". The result holds a sketch of the last gradient: :func:`sketch`."""
    report.phase(FLOOR)
    chosen = Shape(**shape)
    model, step = make(method, chosen, HOME)
    rows = chosen.batch()
    report.phase("steps")
    for _ in report.turns():
        report.step(**_take(model, step, rows))
    report.phase("end")
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "sketch": sketch(model)}


def growing(
    report: Reporter, method: str, shape: dict[str, Any], limit_mebibytes: int, most_pairs: int
) -> dict[str, Any]:
    """Steps with batches that double until memory does not hold them, or ``most_pairs`` is reached.

    Private memory of the process may grow by ``limit_mebibytes`` over what interpreter, torch and one small step of the
    same method took; the kernel refuses more, as a smaller machine would. Files are not limited.
    """
    chosen = Shape(**shape)
    small = replace(chosen, pairs=2, chunk=1)
    _take(*make(method, small, HOME), small.batch())
    report.phase(FLOOR)
    _, held = memory_of(os.getpid())
    if not held:
        raise OSError("expected a system that tells a process's private memory, as Linux does")
    cap_memory(held + limit_mebibytes * MEBIBYTE)
    pairs, fitted, ended = chosen.chunk, 0, ""
    sketches: dict[int, list[float]] = {}
    try:
        model, step = make(method, chosen, HOME)
        while pairs <= most_pairs:
            values = _take(model, step, chosen.batch(pairs))
            if pairs <= 4 * chosen.chunk:
                sketches[pairs] = sketch(model)
            fitted = pairs
            report.step(pairs=pairs, **values)
            pairs *= 2
    except LOST as error:
        ended = told_by(error)
    return {"pairs": fitted, "ended": ended, "sketches": {str(k): v for k, v in sketches.items()}}


def ladder(report: Reporter, method: str, shape: dict[str, Any], chunks: list[int], steps: int) -> dict[str, Any]:
    """Steps with the batch in more and more chunks, a fresh model for each number of them."""
    chosen = Shape(**shape)
    loads: dict[str, float | None] = {}
    for count in chunks:
        finer = replace(chosen, chunk=max(2 * chosen.pairs // count, 1))
        model, step = make(method, finer, HOME)
        rows = finer.batch()
        _take(model, step, rows)
        for _ in range(steps):
            values = _take(model, step, rows)
            report.step(chunks=count, **values)
            loads[str(count)] = values.get("bytes_loaded")
        del model, step
    return {"bytes_loaded": loads}


def sketch(model: nn.Module) -> list[float]:
    """Random projections of the gradient: the relative difference of two sketches estimates that of the gradients.

    Each parameter's gradient is cut into up to 64 pieces, and the beginning of each piece is projected on one vector of
    random signs, the same in every process.
    """
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (SKETCH_PIECE,), generator=generator).double() * 2 - 1
    found: list[float] = []
    for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        assert parameter.grad is not None
        flat = parameter.grad.detach().flatten()
        pieces = flat.chunk(min(64, max(1, flat.numel() // SKETCH_PIECE)))
        found += [float(piece[:SKETCH_PIECE].double() @ signs[: len(piece[:SKETCH_PIECE])]) for piece in pieces]
    return found


def _take(model: nn.Module, step: Step, rows: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Runs a step; reports its loss, its time and its bytes."""
    model.zero_grad()
    loss, values = measure(lambda: step(*rows).item(), model)
    return {"loss": loss, **values}
