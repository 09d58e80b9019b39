"""The methods that train an encoder of transformers on contrastive batches under a memory cap, and a case's process.

All read the same weights, compute the same loss (cross entropy of each query's scores against all passages) and update
with AdamW in float32. ``plain`` and ``deepspeed`` keep the inputs of blocks and recompute the rest, as the model's own
gradient checkpointing does.
"""

import importlib
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch imports it in a first step, which would count
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness.case import FLOOR, LOST, told_by
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.memory import cap_memory
from benchmarks.harness.worker import Reporter
from benchmarks.models.contrastive import TEMPERATURE, contrastive_loss, sentence_transformers_gradient
from benchmarks.models.deepspeed import deepspeed_nvme, start_deepspeed
from benchmarks.qwen_embedding.workload import Model, batch_of

ADAMW = {"lr": 1e-5, "weight_decay": 0.01}
WEIGHTS = Path("weights")  # a case works in the folder of the run

Step = Callable[[Tensor, Tensor], float]
"""Tokens of both sides to the loss; the parameters are updated."""


class Made(NamedTuple):
    """A method that is ready to train; ``model`` is the OffloadModel, where there is one."""

    step: Step
    model: Any = None


def embeddings(output: Any) -> Tensor:
    """The last token's state at length 1. Rows have no padding."""
    return functional.normalize(output.last_hidden_state[:, -1], dim=-1)


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _resident() -> nn.Module:
    model: nn.Module = _transformers().AutoModel.from_pretrained(WEIGHTS, dtype=torch.float32)
    return model.train()


def _updated(optimizer: torch.optim.Optimizer, backward: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step(queries: Tensor, passages: Tensor) -> float:
        loss = backward(queries, passages)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def plain(chunk: int, memory: int) -> Made:
    """The model in memory with its own gradient checkpointing, the batch in one piece."""
    model: Any = _resident()
    model.gradient_checkpointing_enable()

    def backward(queries: Tensor, passages: Tensor) -> Tensor:
        loss = contrastive_loss(*(embeddings(model(input_ids=ids, use_cache=False)) for ids in (queries, passages)))
        loss.backward()
        return loss.detach()

    return Made(_updated(torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), backward))


def sentence_transformers(chunk: int, memory: int) -> Made:
    """The cached ranking loss of sentence-transformers over the model in memory."""
    encoder = _resident()
    represent = lambda ids: embeddings(encoder(input_ids=ids, use_cache=False))  # noqa: E731
    backward = sentence_transformers_gradient(encoder, represent, chunk)
    return Made(_updated(torch.optim.AdamW(encoder.parameters(), fused=True, **ADAMW), backward))


def deepspeed(chunk: int, memory: int) -> Made:
    """ZeRO-3 of one process with parameters and optimizer on NVMe, in fp32, the batch in one piece."""
    theirs, transformers = start_deepspeed(), _transformers()
    folder = Path("nvme").absolute()
    folder.mkdir(exist_ok=True)
    config = transformers.AutoConfig.from_pretrained(WEIGHTS)
    largest = config.vocab_size * config.hidden_size
    block = Model(1, config.hidden_size, 1).block_parameters
    # The fewest buffers that train, each as large as the embedding; so a parameter lives for one layer only.
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        **deepspeed_nvme(folder, buffers=4, largest=largest, block=block, live=1),
    }
    # While this object lives, from_pretrained builds and reads parameters in parts.
    kept = importlib.import_module("transformers.integrations").HfDeepSpeedConfig(settings)
    model: Any = _resident()
    model.gradient_checkpointing_enable()
    engine, *_ = theirs.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(queries: Tensor, passages: Tensor, kept: object = kept) -> float:
        # One forward of both sides: an engine takes one between its backwards.
        states = embeddings(engine(input_ids=torch.cat([queries, passages]), use_cache=False))
        loss = contrastive_loss(*states.chunk(2))
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return Made(step)


def ours(chunk: int, memory: int) -> Made:
    """GradCache over an OffloadModel: blocks, gradients and moments in files, all chunks past a block in one visit."""
    from gradcache import GradCache
    from gradcache.loss import SimpleContrastiveLoss
    from offload import OffloadModel, OffloadOptimizer

    kind = _transformers().AutoModel
    options = {"model": kind, "blocks": "layers", "memory": memory << 20, "dtype": torch.float32}
    model: Any = OffloadModel.from_pretrained(WEIGHTS, "cpu", Path("home").absolute(), **options)
    model.train()
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, **ADAMW)
    loss_fn = SimpleContrastiveLoss(temperature=TEMPERATURE)
    cache = GradCache([model, model], chunk, loss_fn, get_rep_fn=embeddings)

    def step(queries: Tensor, passages: Tensor) -> float:
        optimizer.zero_grad()
        loss = cache({"input_ids": queries}, {"input_ids": passages})
        optimizer.step()
        optimizer.synchronize()  # so that a step's time holds all of its work
        return float(loss)

    return Made(step, model)


METHODS: dict[str, Callable[[int, int], Made]] = {
    "plain": plain,
    "sentence-transformers": sentence_transformers,
    "deepspeed": deepspeed,
    "ours": ours,
}


def train(
    report: Reporter,
    method: str,
    model: dict[str, int],
    pairs: int,
    positions: int,
    chunk: int,
    memory: int,
    cap: int | None,
) -> dict[str, Any]:
    """Builds a method and takes a step in each turn; ``cap``: MiB that end it, ``memory``: MiB that ours plans with."""
    sizes, where = Model(**model), "while it was built"
    _transformers()  # it imports the class of the model later
    report.phase(FLOOR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        if cap is not None:
            cap_memory(cap << 20)
        report.phase("build")
        started = time.perf_counter()
        made = METHODS[method](chunk, memory)
        seconds = time.perf_counter() - started
        report.phase("steps")
        for k in report.turns():
            where = f"in step {k + 1}"
            batch = batch_of(sizes, pairs, positions, k)
            loss, values = measure(lambda batch=batch: made.step(*batch), made.model)
            report.step(loss=loss, **values)
    except LOST as error:
        return {"out_of_memory": f"{where}: {told_by(error)}"}
    return {"build_seconds": seconds, "statistics": counts_of(made.model) or None}
