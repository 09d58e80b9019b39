"""The cases of training under ``memory=``: ours with that only setting, and others, each with clipping and AdamW.

A case warms its process with steps of two blocks by the same method, makes a batch, notes what it holds then, builds
the model, and takes a step in each turn. What a method takes is the rise above that.
"""

import importlib
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.io_counters import measure
from benchmarks.harness.ranks import Ranks, torchrun_environments
from benchmarks.harness.worker import Reporter
from benchmarks.memory_latency.methods import FLOOR, folder, tidy
from benchmarks.models.contrastive import TEMPERATURE, contrastive_loss
from benchmarks.models.dropout import row_keys
from benchmarks.models.encoder import build_encoder
from benchmarks.models.training import DEEPSPEED, DISK, FROM_META, FSDP, METHODS, NVME, STEPS, Method, Training

PLANNING = "planning"
PLANNED_AFTER = 6  #: turns in which plans are chosen, and margins of memory are learnt
VOCABULARY = 4096
CHUNK = 8  #: rows of a chunk of a contrastive batch in ours
MOST_TRIES = 30  #: numbers of bytes that the search for the least tries: what the allocator keeps drifts
LEAST = re.compile(r"(?:pass|with|;) memory=([\d,]+)")  #: what an error of too little memory asks for


@dataclass(frozen=True)
class Contrastive(Training):
    """An encoder, the same for both sides of ``rows`` pairs: "state" is the queries, "target" the passages."""

    def build(self) -> nn.Sequential:
        """Builds the encoder, the same for the same sizes."""
        return build_encoder(
            VOCABULARY, self.positions, dim=self.dim, depth=self.blocks, dropout=self.dropout, seed=self.seed
        )

    def batch(self, step: int = 0) -> Tensor:
        """The queries of ``step``: int64 of shape (rows, 1 + positions), keys for dropout and tokens."""
        return self._side(step, 0)

    def target(self, step: int) -> Tensor:
        """The passages of ``step``, in the same form."""
        return self._side(step, 1)

    def _side(self, step: int, tower: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * step + tower)
        tokens = torch.randint(2, VOCABULARY, (self.rows, self.positions), generator=generator)
        return torch.cat([row_keys(self.seed, step, tower, self.rows)[:, None], tokens], dim=1)

    @property
    def tokens(self) -> int:
        """Tokens of both sides."""
        return 2 * super().tokens

    def gradient(self, model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
        """From both sides to the loss; an OffloadModel computes it in chunks, by ``GradCache``."""
        if hasattr(model, "memory_report"):
            from gradcache import GradCache
            from gradcache.loss import SimpleContrastiveLoss

            return GradCache([model, model], CHUNK, SimpleContrastiveLoss(temperature=TEMPERATURE))

        def run(queries: Tensor, passages: Tensor) -> Tensor:
            loss = contrastive_loss(model(queries), model(passages))
            loss.backward()
            return loss.detach()

        return run


def training_of(training: dict[str, Any], contrastive: bool) -> Training:
    """The model and its steps."""
    return Contrastive(**training) if contrastive else Training(**training)


def train(
    report: Reporter,
    method: str,
    training: dict[str, Any],
    contrastive: bool,
    how: dict[str, Any],
    before: str = "",
) -> dict[str, Any]:
    """A step in each turn; from turn :data:`PLANNED_AFTER` on in the phase "steps".

    ``how``: arguments of the method. ``before``: the folder of another commit, whose packages run instead.
    """
    if before:
        _import_from(before)
    chosen = training_of(training, contrastive)
    make, options = METHODS[method]
    ranks = None
    if method == FSDP:
        os.environ.update(torchrun_environments(1)[0])
        ranks = Ranks()
    if method not in (DEEPSPEED, NVME):  # it does not start twice in a process
        small, how_small = replace(chosen, blocks=2), how | ({"memory": "auto"} if "memory" in how else {})
        first = make(small, folder(), ranks, **options, **how_small)
        for k in range(2):
            first.step(small.batch(k), small.target(k))
        del first
        tidy()
    batch = chosen.batch(0), chosen.target(0)  # belongs to no method
    report.phase(FLOOR)
    made = make(chosen, folder(), ranks, **options, **how)
    report.phase(PLANNING)
    predicted: dict[str, float] = {}
    for k in report.turns():
        if k == PLANNED_AFTER:
            predicted = _predicted(made)
            report.phase(STEPS)
        del batch  # never two at once
        batch = chosen.batch(k), chosen.target(k)
        loss, values = measure(lambda batch=batch: made.step(*batch), made.model)
        started = time.perf_counter()
        os.sync()  # what the page cache holds is written to disk outside of other methods' turns
        report.step(**values, loss=loss, kernel=time.perf_counter() - started)
    report.phase("end")
    return predicted


def _import_from(folder: str) -> None:
    """Imports ours from another commit: this process has not imported it yet."""
    sys.path.insert(0, folder)
    found = importlib.import_module("offload").__file__ or ""
    if not Path(found).resolve().is_relative_to(Path(folder).resolve()):
        raise RuntimeError(f"expected the packages of {folder}, got {found}")


def _predicted(made: Method) -> dict[str, float]:
    """What the present plan of an OffloadModel predicts of a step; nothing of other models."""
    model: Any = made.model
    found = model.memory_report() if model is not None else None
    if found is None or found.predicted is None:
        return {}
    return {"seconds": found.predicted.seconds, "bytes": found.predicted.memory_bytes}


def least(report: Reporter, training: dict[str, Any], contrastive: bool) -> dict[str, Any]:
    """The least ``memory`` with which a plan fits, as the errors and warnings of smaller ones tell it."""
    chosen, nbytes = training_of(training, contrastive), 1
    make, options = METHODS[DISK if contrastive else FROM_META]
    for _ in range(MOST_TRIES):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", f".*{LEAST.pattern}", RuntimeWarning)
                made = make(chosen, folder(), None, **options, memory=nbytes)
                for k in range(PLANNED_AFTER + 1):
                    made.step(chosen.batch(k), chosen.target(k))
            return {"bytes": nbytes}
        except (ValueError, RuntimeWarning) as error:
            if not (told := LEAST.search(str(error))):
                raise
            nbytes = max(nbytes + 1, int(told[1].replace(",", "")))
        made = None
        tidy()
    raise RuntimeError(f"each least that an error told was refused; the last was {nbytes}")
