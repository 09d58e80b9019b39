"""The methods: one model, one batch, clipping and AdamW, with everything in memory or with ``memory=`` alone.

A case warms its process with steps of two blocks by the same method, makes a batch, notes what it holds then, builds
the model, and takes a step in each turn. What a method takes is the rise above that.
"""

import ctypes
import gc
import importlib
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gradcache_batch.methods import Shape, contrastive_loss
from benchmarks.harness.case import CannotRunError
from benchmarks.harness.io_counters import measure
from benchmarks.harness.worker import Reporter
from benchmarks.memory_latency.methods import _join_group
from benchmarks.models.transformer import Checkpointed
from benchmarks.optimizer.methods import DEEPSPEED, Training, deepspeed_nvme, loss_of

#: What a plan predicts, before the steps that count.
PREDICTED = ("planned_seconds", "bytes")
WARMED = "after steps of two blocks"
PLANNING, STEPS = "planning", "steps"
#: Turns after which ours has planned for the last time, and has taken a first step of that plan; and how many of them,
#: the latest ones, the times rest on by which that plan was chosen.
PLANNED_AFTER, TIMED_BEFORE = 12, 5
TRAINING, CONTRASTIVE = "training", "contrastive"
PLAIN, CHECKPOINTED, COMPILED, FSDP, TWO_PASSES, OURS = (
    "plain",
    "checkpointed",
    "compiled",
    "fsdp2",
    "two-passes",
    "ours",
)
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}
MAX_NORM = 1.0
#: Numbers of bytes that the search for the least tries: what the allocator keeps drifts from one to the next.
MOST_TRIES = 30
#: What errors tell of the least memory: of the model, of its steps; and of its optimizer.
LEAST = re.compile(r"pass memory=([\d,]+), the least|memory=([\d,]+)(?: and num_slices=\d+)? works with it")
LACKS = re.compile(r"make the model with memory=([\d,]+) or more")

Batch = tuple[Any, Tensor]


@dataclass(frozen=True)
class Work:
    """A model and its steps: ``training`` of the stack of ``optimizer``, or contrastive steps as in
    ``gradcache-batch``, whose ``rows`` are pairs."""

    kind: str
    blocks: int
    dim: int
    rows: int
    positions: int
    vocabulary: int = 4096
    chunk: int = 8  #: rows of a chunk, of the methods that cut a contrastive batch
    seed: int = 0

    @property
    def stack(self) -> Training:
        """The blocks and batches of work ``training``."""
        return Training(self.blocks, self.dim, self.rows, self.positions, seed=self.seed)

    @property
    def shape(self) -> Shape:
        """The encoder, pairs and chunks of work ``contrastive``."""
        sizes = (self.vocabulary, self.positions, self.dim, self.blocks, self.rows, self.chunk)
        return Shape(*sizes, kept=0, graphs=0, together=0, seed=self.seed)

    @property
    def trains(self) -> bool:
        """Whether the work is ``training``."""
        return self.kind == TRAINING

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.stack.tokens if self.trains else self.shape.tokens

    @property
    def training_flops(self) -> float:
        """Operations of a forward and a backward, nothing recomputed."""
        return self.stack.training_flops if self.trains else self.shape.training_flops

    def build(self) -> nn.Sequential:
        """Builds the layers, the same for the same work."""
        return self.stack.build() if self.trains else self.shape.build()

    def build_in_parts(self) -> tuple[nn.Sequential, Iterator[dict[str, Tensor]]]:
        """Layers without memory, and their values block by block; a contrastive model has both at once."""
        if not self.trains:
            return self.build(), iter(())
        with torch.device("meta"):
            layers = self.build()
        states = (self.stack.block(k).state_dict() for k in range(self.blocks))
        return layers, ({f"{k}.{name}": value for name, value in state.items()} for k, state in enumerate(states))

    def batch(self, step: int) -> Batch:
        """State and target of ``step``; or queries and passages."""
        return (self.stack.batch(step), self.stack.target(step)) if self.trains else self.shape.batch()

    def gradient(self, model: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
        """From a batch to its loss, in one forward and one backward."""

        def step(first: Any, second: Tensor) -> Tensor:
            loss = loss_of(model(first), second) if self.trains else contrastive_loss(model(first), model(second))
            loss.backward()
            return loss.detach()

        return step


class Method(NamedTuple):
    """A model that is ready to train."""

    step: Callable[[Any, Tensor], float]  #: the loss of a batch, after an update
    model: Any = None  #: an OffloadModel


def _resident(blocks: nn.Module, gradient: Callable[[Any, Tensor], Tensor], fused: bool = True) -> Method:
    """AdamW with clipping over parameters in memory."""
    parameters = list(blocks.parameters())
    optimizer = torch.optim.AdamW(parameters, **ADAMW, fused=fused)

    def step(first: Any, second: Tensor) -> float:
        optimizer.zero_grad()
        loss = gradient(first, second)
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        return float(loss)

    return Method(step)


def plain(work: Work, home: Path) -> Method:
    """Nothing recomputed, fused AdamW: the fastest way with everything in memory."""
    blocks = work.build()
    return _resident(blocks, work.gradient(blocks))


def checkpointed(work: Work, home: Path) -> Method:
    """``torch.utils.checkpoint`` around each block."""
    blocks = work.build()
    return _resident(blocks, work.gradient(Checkpointed(blocks)))


def compiled(work: Work, home: Path, budget: float) -> Method:
    """``torch.compile`` with an activation memory budget, from 0 (recompute all) to 1 (as without a budget)."""
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = budget
    blocks = work.build()
    return _resident(blocks, work.gradient(torch.compile(blocks)))


def fsdp2(work: Work, home: Path) -> Method:
    """``fully_shard`` on each block with ``CPUOffloadPolicy``, in one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _join_group("cpu", home)
    mesh, blocks = init_device_mesh("cpu", (1,)), work.build()
    for layer in (*blocks, blocks):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return _resident(blocks, work.gradient(blocks))


def two_passes(work: Work, home: Path) -> Method:
    """GradCache as upstream does it: representations without graphs, their gradients, then each chunk again."""
    blocks = work.build()

    def gradient(queries: Tensor, passages: Tensor) -> Tensor:
        chunks = [rows.split(work.chunk) for rows in (queries, passages)]
        with torch.no_grad():
            found = [torch.cat([blocks(chunk) for chunk in tower]) for tower in chunks]
        leaves = [representations.requires_grad_() for representations in found]
        loss = contrastive_loss(*leaves)
        loss.backward()
        for tower, leaf in zip(chunks, leaves, strict=True):
            assert leaf.grad is not None
            for chunk, given in zip(tower, leaf.grad.split(work.chunk), strict=True):
                blocks(chunk).backward(given)
        return loss.detach()

    return _resident(blocks, gradient)


def deepspeed(work: Work, home: Path) -> Method:
    """ZeRO-3 of one process with parameters and optimizer on NVMe, each block checkpointed."""
    return Method(deepspeed_nvme(work.stack, home, checkpointed=True).step)


def ours(work: Work, home: Path, memory: Any = "auto", fields: dict[str, int] | None = None) -> Method:
    """``OffloadModel(memory=...)`` and its optimizer, parameters and moments in files; ``fields``: of the policy."""
    from gradcache import GradCache
    from gradcache.loss import SimpleContrastiveLoss
    from offload import MemoryPolicy, OffloadModel, OffloadOptimizer

    layers, parts = work.build_in_parts()
    model = OffloadModel(layers, "cpu", home, memory=MemoryPolicy(memory, **(fields or {})))
    for values in parts:
        model.load_state_dict(values, strict=False)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=MAX_NORM, **ADAMW)
    gradient: Callable[[Any, Tensor], Tensor] = work.gradient(model)
    if not work.trains:
        gradient = GradCache([model, model], work.chunk, SimpleContrastiveLoss(temperature=0.05))

    def step(first: Any, second: Tensor) -> float:
        optimizer.zero_grad()
        loss = gradient(first, second)
        optimizer.step()
        return float(loss)

    return Method(step, model)


METHODS: dict[str, Callable[..., Method]] = {
    PLAIN: plain,
    CHECKPOINTED: checkpointed,
    COMPILED: compiled,
    FSDP: fsdp2,
    TWO_PASSES: two_passes,
    DEEPSPEED: deepspeed,
    OURS: ours,
}


# --- cases -----------------------------------------------------------------------------------------------------------


def train(report: Reporter, method: str, work: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """A step in each turn; from turn :data:`PLANNED_AFTER` on in the phase "steps". ``how``: of the method."""
    chosen = Work(**work)
    warm(method, chosen, how)
    batch = chosen.batch(0)  # belongs to no method
    report.phase(WARMED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        made = METHODS[method](chosen, folder(), **how)
        report.phase(PLANNING)
        planned: dict[str, Any] = {}
        for k in report.turns():
            if k == PLANNED_AFTER:
                found = plan_of(made.model) or {}
                planned = {key: found[key] for key in PREDICTED if key in found}
                report.phase(STEPS)
            del batch  # never two at once
            batch = chosen.batch(k)
            loss, values = measure(lambda batch=batch: made.step(*batch), made.model)
            started = time.perf_counter()
            os.sync()  # what the page cache holds is written to disk outside of other methods' turns
            report.step(**values, loss=loss, kernel=time.perf_counter() - started)
        told = list(dict.fromkeys(str(one.message) for one in caught if one.category is RuntimeWarning))
    report.phase("end")
    plan = plan_of(made.model)
    return {"plan": {**plan, **planned} if plan else None, "warnings": told}


def least(report: Reporter, work: dict[str, Any]) -> dict[str, Any]:
    """The least ``memory`` with which steps run and nothing warns, as the errors of smaller ones tell it."""
    chosen, nbytes, asked = Work(**work), 1, []
    for _ in range(MOST_TRIES):
        asked.append(nbytes)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                made = ours(chosen, folder(), nbytes)
                for k in range(PLANNED_AFTER + 1):
                    made.step(*chosen.batch(k))
        except (ValueError, RuntimeWarning) as error:
            nbytes = max(nbytes + 1, _least_told(error))
            made = None
            tidy()
        else:
            return {"bytes": nbytes, "asked": asked}
    raise RuntimeError(f"each least that an error told was refused: {asked}")


def _least_told(error: Exception) -> int:
    """The bytes that an error asks for; one that asks for none is raised."""
    if found := LEAST.search(str(error)):
        return int((found[1] or found[2]).replace(",", ""))
    if found := LACKS.search(str(error)):
        return int(found[1].replace(",", ""))
    raise error


def folder() -> Path:
    """A new one, on the disk that the case works on."""
    return Path(tempfile.mkdtemp(dir=".")).absolute()


def warm(method: str, work: Work, how: dict[str, Any]) -> None:
    """Loads libraries, starts threads, makes their scratch memory; of the compiler all that it keeps of this model."""
    if method == DEEPSPEED:  # does not start twice in a process
        importlib.import_module("deepspeed")
        return
    small = replace(work, blocks=2) if method != COMPILED else work
    try:
        made = METHODS[method](small, folder(), **(how if method == COMPILED else {}))
        for k in range(2):
            made.step(*small.batch(k))
        if made.model is not None:
            made.model.close()
    except Exception as error:
        if method not in (COMPILED, FSDP):
            raise
        words = (str(error).strip() or "no reason given").splitlines()[0]
        raise CannotRunError(f"{method} does not run here: {type(error).__name__}: {words}") from error
    del made
    tidy()


def tidy() -> None:
    """Drops what is unreachable, and lets glibc return its free heap pages to the kernel."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def plan_of(model: Any) -> dict[str, Any] | None:
    """The present plan of an OffloadModel and its prediction."""
    if model is None or not hasattr(model, "memory_report"):
        return None
    told = model.memory_report()
    if told.predicted is None:
        return None
    choice = told.predicted.choice
    return {
        "planned_seconds": told.predicted.seconds,
        "bytes": told.predicted.memory_bytes,
        "measured_bytes": told.measured_bytes,
        "margin": told.margin_bytes,
        "slots": choice.slots,
        "in_memory": len(choice.in_memory),
        "shards": told.shards,
        "kept": len(choice.kept),
        "cells": told.cells,
        "waiting": len(choice.waiting),
    }
