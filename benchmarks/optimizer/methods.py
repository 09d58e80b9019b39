"""The methods: how a training step is taken, clipping included. DeepSpeed runs in an environment of its own."""

import importlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness.case import FLOOR, CannotRunError
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.worker import Reporter
from benchmarks.models.clipped_step import clipped_step
from benchmarks.models.transformer import Checkpointed, Stack, State

STEPS = "steps"
REFERENCE, DISK, FROM_META, DEEPSPEED = "resident", "disk", "from meta", "deepspeed"
NAMES = {
    REFERENCE: "resident, checkpointed, fused AdamW",
    DISK: "on disk",
    FROM_META: "on disk, from birth",
    DEEPSPEED: "DeepSpeed ZeRO-3, NVMe",
}


@dataclass(frozen=True)
class Training(Stack):
    """A stack of blocks and how it is trained; ``graphs`` (MiB) and ``slots`` are ours."""

    dropout: float = 0.1
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    max_norm: float = 1.0
    graphs: int = 512
    slots: int = 3

    @property
    def options(self) -> dict[str, float]:
        """The arguments of AdamW."""
        return {"lr": self.learning_rate, "weight_decay": self.weight_decay}


def loss_of(output: State, target: Tensor) -> Tensor:
    """Squared distance of each token, on average. Its gradient is far longer than 1: clipping always clips."""
    return (output[0] - target).square().sum(dim=-1).mean()


class Method(NamedTuple):
    """A model that is ready to train, and the function that runs a step."""

    step: Callable[[State, Tensor], float]  #: state and target to the loss; may leave an update to the next step
    parameters: Callable[[], Iterable[tuple[str, Tensor]]]  #: names and values, with every update applied
    model: object = None  #: an OffloadModel, which counts what it does


def resident(training: Training, home: Path) -> Method:
    """Everything in memory, each block checkpointed, one fused AdamW."""
    blocks = training.build()
    parameters = list(blocks.parameters())
    optimizer = torch.optim.AdamW(parameters, **training.options, fused=True)
    clip = lambda: nn.utils.clip_grad_norm_(parameters, training.max_norm)  # noqa: E731
    return Method(clipped_step(Checkpointed(blocks), optimizer, loss_of, clip), blocks.named_parameters)


def offloaded(training: Training, home: Path) -> Method:
    """``OffloadModel`` and ``OffloadOptimizer``, which clips; each block is a shard."""
    return _offloaded(list(training.build()), training, home)


def offloaded_from_meta(training: Training, home: Path) -> Method:
    """Layers without memory whose values are loaded block by block: the model may be larger than memory."""
    with torch.device("meta"):
        layers = list(training.build())
    method = _offloaded(layers, training, home)
    for k in range(training.blocks):
        values = {f"{k}.{name}": value for name, value in training.block(k).state_dict().items()}
        method.model.load_state_dict(values, strict=False)
    return method


def _offloaded(layers: list[nn.Module], training: Training, home: Path) -> Any:
    from offload import MemoryPolicy, OffloadModel, OffloadOptimizer

    memory = MemoryPolicy.fixed(slots=training.slots, graph_bytes=training.graphs << 20)
    model = OffloadModel(layers, "cpu", offload_device=home, checkpoint_activation=True, memory=memory)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=training.max_norm, **training.options)
    return Method(clipped_step(model, optimizer, loss_of, lambda: None), model.named_parameters, model)


def deepspeed_nvme(training: Training, home: Path, checkpointed: bool) -> Method:
    """ZeRO-3 of one process with parameters and optimizer on NVMe, in fp32.

    Its optimizer is its own AdamW for the CPU, its files are read and written through its own asynchronous I/O library;
    both are compiled at the first use. Each block is checkpointed by torch, unless activations are kept.
    """
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # ninja
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        raise CannotRunError("its I/O library is compiled at the first use, and there is no ninja or no C++ compiler")
    import deepspeed

    if not deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False):
        raise CannotRunError("its I/O library cannot be compiled here; install the headers of libaio (libaio-dev)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    settings = _deepspeed_settings(training, home)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        blocks = training.build()
    # Parameters are partitioned by the time that a block scales them: they are set again.
    for k, block in enumerate(blocks):
        parameters = list(block.parameters())
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            for parameter, value in zip(parameters, training.block(k).parameters(), strict=True):
                parameter.copy_(value)
    model = Checkpointed(blocks) if checkpointed else blocks
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(state: State, target: Tensor) -> float:
        loss = loss_of(engine(state), target)
        engine.backward(loss)
        engine.step()  # clips
        return float(loss.item())

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in blocks.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter):
                yield name, parameter.detach().clone()

    return Method(step, gathered)


def _deepspeed_settings(training: Training, home: Path) -> dict[str, Any]:
    largest = 4 * training.dim**2  # elements of the widest matrix
    block = training.parameters // training.blocks
    on_disk = {"device": "nvme", "nvme_path": str(home), "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": training.rows,
        "gradient_clipping": training.max_norm,
        "optimizer": {"type": "AdamW", "params": training.options},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**on_disk, "buffer_count": 16, "buffer_size": largest},
            "offload_optimizer": {**on_disk, "buffer_count": 4},
            # As much as our engine holds: about two blocks.
            "stage3_max_live_parameters": 2 * block,
            "stage3_max_reuse_distance": 2 * block,
            "stage3_prefetch_bucket_size": block,
            "reduce_bucket_size": block,
            "sub_group_size": block,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "thread_count": 1, "overlap_events": True},
    }


METHODS: dict[str, Callable[..., Method]] = {
    REFERENCE: resident,
    DISK: offloaded,
    FROM_META: offloaded_from_meta,
    DEEPSPEED: deepspeed_nvme,
}


def train(report: Reporter, method: str, training: dict[str, Any], save_after: int, **how: Any) -> dict[str, Any]:
    """A case: builds the method, takes a first step that is not timed, and then one in each turn.

    Each method has a directory of its own. Parameters are saved after ``save_after`` steps in all
    and compared with the reference's; 0: never.
    """
    importlib.import_module("torch._dynamo")  # every torch optimizer imports it: a part of what torch alone takes
    report.phase(FLOOR)
    home = Path(method.replace(" ", "-")).absolute()
    home.mkdir(parents=True, exist_ok=True)
    chosen, saved = Training(**training), home.with_suffix(".pt")
    made = METHODS[method](chosen, home, **how)

    def take(index: int) -> dict[str, float]:
        state, target = chosen.batch(index), chosen.target(index)
        loss, values = measure(lambda: made.step(state, target), made.model)
        return {"waited": values.pop("wait_seconds", 0.0), "loss": loss, **values}

    report.phase("first step")
    first = take(0)
    report.phase(STEPS)
    for k in report.turns():
        values = take(k + 1)
        if k + 2 == save_after:
            torch.save({name: value.detach().clone() for name, value in made.parameters()}, saved)
        started = time.perf_counter()
        os.sync()  # what the page cache holds is written to disk outside of other methods' turns
        report.step(**values, kernel=time.perf_counter() - started)
    counts = counts_of(made.model)
    report.phase("end")
    reference = home.with_name(REFERENCE).with_suffix(".pt")
    compared = saved.exists() and reference.exists()
    difference = greatest_difference(reference, saved) if compared else None
    return {"first": first, "counts": counts, "difference": difference}


def greatest_difference(path: Path, other: Path) -> float:
    """The greatest relative difference of any tensor of two saved models: its length to that of the first tensor.

    Raises:
        ValueError: if they are not the same tensors by name.
    """
    first, second = (torch.load(name, mmap=True, weights_only=True) for name in (path, other))
    if set(first) != set(second):
        raise ValueError(f"expected the same parameters in both, got {sorted(set(first) ^ set(second))[:4]} in one")

    def apart(one: Tensor, two: Tensor) -> float:
        distance, length = (torch.linalg.vector_norm(value.double()) for value in (one - two, one))
        return float(distance / length) if length else float(distance)

    return max(apart(first[name], second[name]) for name in first)
