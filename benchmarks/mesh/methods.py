"""The methods: how several ranks train one model together, clipping included, each on rows of its own.

Each block is one unit of all of them: it is gathered, computed and recomputed by itself, and its gradients are reduced.
"""

import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.case import FLOOR, CannotRunError
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.ranks import Ranks, bytes_received
from benchmarks.harness.worker import Reporter
from benchmarks.models.clipped_step import clipped_step
from benchmarks.models.transformer import Checkpointed, Stack

STEPS = "steps"
DISK, HOST, FSDP, DEEPSPEED, NVME, ALONE = "disk", "host", "fsdp2", "deepspeed", "deepspeed-nvme", "alone"


@dataclass(frozen=True)
class Training(Stack):
    """A stack of blocks, the batch of all ranks, and how it is trained."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    max_norm: float = 1.0

    @property
    def options(self) -> dict[str, float]:
        """The arguments of AdamW."""
        return {"lr": self.learning_rate, "weight_decay": self.weight_decay}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Squared distance of each token, on average. Its gradient is far longer than 1: clipping always clips."""
    return (output - target).square().sum(dim=-1).mean()


class Method(NamedTuple):
    """A model that is ready to train, and the function that runs a step."""

    step: Callable[[Tensor, Tensor], float]  #: rows of this rank and their targets to their loss
    model: object = None  #: an OffloadModel, which counts what it does


def alone(training: Training, home: Path, ranks: Ranks | None) -> Method:
    """One process with everything in memory and all rows, each block checkpointed: the losses of all others."""
    blocks = training.build()
    optimizer = torch.optim.AdamW(blocks.parameters(), **training.options, fused=True)
    clip = lambda: nn.utils.clip_grad_norm_(blocks.parameters(), training.max_norm)  # noqa: E731
    return Method(clipped_step(Checkpointed(blocks), optimizer, loss_of, clip))


def ours(training: Training, home: Path, ranks: Ranks | None, *, on_disk: bool) -> Method:
    """``OffloadModel`` with ``mesh=`` and its optimizer; each block is a shard."""
    from offload import OffloadModel, OffloadOptimizer

    mesh = None if ranks is None else ranks.mesh
    place = home if on_disk else "cpu"
    model = OffloadModel(
        training.build(), "cpu", place, num_slices=training.blocks, checkpoint_activation=True, mesh=mesh
    )
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=training.max_norm, **training.options)
    return Method(clipped_step(model, optimizer, loss_of, lambda: None), model)


def fsdp2(training: Training, home: Path, ranks: Ranks | None) -> Method:
    """``fully_shard`` on each block with ``CPUOffloadPolicy``, and torch's own AdamW over its DTensors."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=False)
    blocks = nn.Sequential(*map(_Checkpoint, training.build()))
    for layer in (*blocks, blocks):
        fully_shard(layer, mesh=None if ranks is None else ranks.mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(blocks.parameters(), **training.options, fused=True)
    clip = lambda: nn.utils.clip_grad_norm_(blocks.parameters(), training.max_norm)  # noqa: E731
    return Method(clipped_step(blocks, optimizer, loss_of, clip))


class _Checkpoint(nn.Module):
    """A layer with ``torch.utils.checkpoint`` around it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor) -> Any:
        """What the layer returns."""
        return checkpoint(self.layer, value, use_reentrant=False)


def deepspeed(training: Training, home: Path, ranks: Ranks | None, *, on_disk: bool) -> Method:
    """ZeRO-3 with parameters and optimizer offloaded to host memory, or to NVMe, in fp32; each block checkpointed.

    Its AdamW for the CPU and, for files, its I/O library are compiled at the first use.
    """
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # ninja
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        raise CannotRunError("its optimizer is compiled at the first use, and there is no ninja or no C++ compiler")
    theirs: Any = importlib.import_module("deepspeed")
    if on_disk and not theirs.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False):
        raise CannotRunError("its I/O library cannot be compiled here; install the headers of libaio (libaio-dev)")
    theirs.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    settings = _deepspeed_settings(training, home, 1 if ranks is None else ranks.count, on_disk=on_disk)
    with theirs.zero.Init(config_dict_or_path=settings):
        blocks = training.build()
    # Parameters are partitioned by the time that a block scales them: they are set again.
    for k, block in enumerate(blocks):
        parameters = list(block.parameters())
        with torch.no_grad(), theirs.zero.GatheredParameters(parameters, modifier_rank=0):
            for parameter, value in zip(parameters, training.block(k).parameters(), strict=True):
                parameter.copy_(value)
    engine, *_ = theirs.initialize(model=Checkpointed(blocks), model_parameters=blocks.parameters(), config=settings)

    def step(rows: Tensor, target: Tensor) -> float:
        loss = loss_of(engine(rows), target)
        engine.backward(loss)
        engine.step()  # clips
        return float(loss.item())

    return Method(step)


def _deepspeed_settings(training: Training, home: Path, ranks: int, *, on_disk: bool) -> dict[str, Any]:
    largest = 4 * training.dim**2  # elements of the widest matrix
    block = training.parameters // training.blocks
    place = {"device": "nvme", "nvme_path": str(home)} if on_disk else {"device": "cpu"}
    parameters = {**place, "pin_memory": False, "buffer_count": 16, "buffer_size": largest}
    return {
        "train_micro_batch_size_per_gpu": max(1, training.rows // ranks),
        "gradient_clipping": training.max_norm,
        "optimizer": {"type": "AdamW", "params": training.options},
        "zero_optimization": {
            "stage": 3,
            "offload_param": parameters if on_disk else {**place, "pin_memory": False},
            "offload_optimizer": {**place, "pin_memory": False, "buffer_count": 4},
            # As much as our engine holds: about two blocks.
            "stage3_max_live_parameters": 2 * block,
            "stage3_max_reuse_distance": 2 * block,
            "stage3_prefetch_bucket_size": block,
            "reduce_bucket_size": block,
            "sub_group_size": block,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "thread_count": 1, "overlap_events": True},
    }


METHODS: dict[str, tuple[Callable[..., Method], dict[str, Any]]] = {
    DISK: (ours, {"on_disk": True}),
    HOST: (ours, {"on_disk": False}),
    FSDP: (fsdp2, {}),
    DEEPSPEED: (deepspeed, {"on_disk": False}),
    NVME: (deepspeed, {"on_disk": True}),
    ALONE: (alone, {}),
}


def train(report: Reporter, method: str, training: dict[str, Any], together: bool) -> dict[str, Any]:
    """A case of one rank: a first step that is not timed, and then one in each turn.

    ``together``: this process is one of several; else it trains all rows.
    """
    importlib.import_module("torch._dynamo")  # every torch optimizer imports it: a part of what torch alone takes
    report.phase(FLOOR)
    ranks = Ranks() if together else None
    chosen, (make, how) = Training(**training), METHODS[method]
    home = Path(f"home-{method}").absolute()
    home.mkdir(parents=True, exist_ok=True)
    made = make(chosen, home, ranks, **how)

    def take(index: int) -> dict[str, float]:
        rows, target = chosen.batch(index), chosen.target(index)
        if ranks is not None:
            rows, target = (whole.tensor_split(ranks.count)[ranks.rank].clone() for whole in (rows, target))
        before = bytes_received()
        loss, values = measure(lambda: made.step(rows, target), made.model)
        values["received"] = bytes_received() - before
        return {"loss": loss if ranks is None else ranks.mean(loss), **values}

    report.phase("first step")
    first = take(0)
    report.phase(STEPS)
    for k in report.turns():
        values = take(k + 1)
        started = time.perf_counter()
        os.sync()  # what the page cache holds is written to disk outside of other methods' turns
        report.step(**values, kernel=time.perf_counter() - started)
    counts = counts_of(made.model)
    report.phase("end")
    return {"first": first, "counts": counts}
