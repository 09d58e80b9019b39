"""The methods: how a training step is taken, clipping included. DeepSpeed runs in an environment of its own."""

import importlib
import os
import shutil
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.io_counters import IOCounters
from benchmarks.harness.worker import Reporter
from benchmarks.models.transformer import Checkpointed, State
from benchmarks.optimizer.workload import FLOOR, REFERENCE, STEPS, Training, loss_of


class Method(ABC):
    """One way to train. A step may leave an update behind that runs during the next one."""

    def __init__(self, training: Training, home: Path) -> None:
        self.training = training
        self.home = home

    @abstractmethod
    def step(self, state: State, target: Tensor) -> float:
        """Forward, backward, clipping and update; returns the loss."""

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names as in an ``nn.Sequential`` of the blocks, and values with every update applied."""

    def counts(self) -> dict[str, Any]:
        """What the method counts itself."""
        return {}


class Resident(Method):
    """Everything in memory, each block checkpointed, one fused AdamW."""

    def __init__(self, training: Training, home: Path) -> None:
        super().__init__(training, home)
        self.blocks = training.build()
        self.model = Checkpointed(self.blocks)
        options: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay, "fused": True}
        self.optimizer = torch.optim.AdamW(self.blocks.parameters(), **options)

    def step(self, state: State, target: Tensor) -> float:
        """As in every tutorial."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model(state), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.blocks.parameters(), self.training.max_norm)
        self.optimizer.step()
        return loss.item()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As they are."""
        for name, parameter in self.blocks.named_parameters():
            yield name, parameter.detach()


class Offloaded(Method):
    """``OffloadModel`` and ``OffloadOptimizer``; each block is a shard."""

    def __init__(self, training: Training, home: Path) -> None:
        from offload import OffloadModel, OffloadOptimizer

        super().__init__(training, home)
        self.model = OffloadModel(
            self.layers(),
            "cpu",
            offload_device=home,
            checkpoint_activation=True,
            num_slots=training.slots,
            graph_bytes=training.graphs << 20 or None,
        )
        self.optimizer = OffloadOptimizer(
            self.model,
            torch.optim.AdamW,
            max_norm=training.max_norm,
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
        )

    def layers(self) -> list[nn.Module]:
        """The blocks to wrap."""
        return list(self.training.build())

    def step(self, state: State, target: Tensor) -> float:
        """Clipping and the order of updates are the optimizer's."""
        self.optimizer.zero_grad()
        loss: Tensor = loss_of(self.model(state), target)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """From storage."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def counts(self) -> dict[str, Any]:
        """The engine's statistics."""
        return asdict(self.model.statistics())


class OffloadedFromMeta(Offloaded):
    """Layers without memory whose values are loaded block by block: the model may be larger than memory."""

    def __init__(self, training: Training, home: Path) -> None:
        super().__init__(training, home)
        for k in range(training.blocks):
            values = {f"{k}.{name}": value for name, value in training.block(k).state_dict().items()}
            self.model.load_state_dict(values, strict=False)

    def layers(self) -> list[nn.Module]:
        """Without memory."""
        with torch.device("meta"):
            return list(self.training.build())


class DeepSpeed(Method):
    """ZeRO-3 of one process with parameters and optimizer on NVMe, in fp32.

    Its optimizer is its own AdamW for the CPU, its files are read and written through its own asynchronous I/O library;
    both are compiled at the first use. Each block is checkpointed by torch, unless activations are kept.
    """

    def __init__(self, training: Training, home: Path, checkpointed: bool = True) -> None:
        import deepspeed

        super().__init__(training, home)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        settings = self._settings()
        with deepspeed.zero.Init(config_dict_or_path=settings):
            self.blocks = training.build()
        # Parameters are partitioned by the time that a block scales them: they are set again.
        for k, block in enumerate(self.blocks):
            parameters = list(block.parameters())
            with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
                for parameter, value in zip(parameters, training.block(k).parameters(), strict=True):
                    parameter.copy_(value)
        model = Checkpointed(self.blocks) if checkpointed else self.blocks
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def _settings(self) -> dict[str, Any]:
        training = self.training
        largest = 4 * training.dim**2  # elements of the widest matrix
        block = training.parameters // training.blocks
        on_disk = {"device": "nvme", "nvme_path": str(self.home), "pin_memory": False}
        options = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
        return {
            "train_micro_batch_size_per_gpu": training.rows,
            "gradient_clipping": training.max_norm,
            "optimizer": {"type": "AdamW", "params": options},
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

    def step(self, state: State, target: Tensor) -> float:
        """Clipping is the engine's."""
        loss = loss_of(self.engine(state), target)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered one after the other."""
        import deepspeed

        for name, parameter in self.blocks.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter):
                yield name, parameter.detach().clone()


METHODS: dict[str, type[Method]] = {
    REFERENCE: Resident,
    "disk": Offloaded,
    "from meta": OffloadedFromMeta,
}


def train(report: Reporter, method: str, training: dict[str, Any], folder: str, save_after: int) -> dict[str, Any]:
    """A case: builds the method, takes a first step that is not timed, and then one in each turn.

    Args:
        report: to the parent.
        method: a key of :data:`METHODS`.
        training: the fields of :class:`Training`.
        folder: on disk; each method has a directory in it.
        save_after: parameters are saved after so many steps in all and compared with the reference's; 0: never.
    """
    importlib.import_module("torch._dynamo")  # every torch optimizer imports it: a part of what torch alone takes
    report.memory(FLOOR)
    home = _home(folder, method)
    return run_method(report, METHODS[method](Training(**training), home), save_after, home)


def train_deepspeed(
    report: Reporter, method: str, training: dict[str, Any], folder: str, save_after: int, checkpointed: bool
) -> dict[str, Any] | None:
    """As :func:`train`, with DeepSpeed; ``checkpointed``: blocks are recomputed."""
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # ninja
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        report.skip("its I/O library is compiled at the first use, and there is no ninja or no C++ compiler")
        return None
    import deepspeed

    if not deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False):
        report.skip("its I/O library cannot be compiled here; install the headers of libaio (libaio-dev)")
        return None
    report.memory(FLOOR)
    home = _home(folder, method)
    return run_method(report, DeepSpeed(Training(**training), home, checkpointed), save_after, home)


def _home(folder: str, method: str) -> Path:
    home = Path(folder, method.replace(" ", "-"))
    home.mkdir(parents=True, exist_ok=True)
    return home


def run_method(report: Reporter, method: Method, save_after: int, home: Path) -> dict[str, Any]:
    """Steps of a method that was built."""
    report.memory("before the first step")
    report.phase("first step")
    first = _step(method, 0)
    report.phase(STEPS)
    taken, saved = 1, home.with_suffix(".pt")
    for _ in report.turns():
        values = _step(method, taken)
        taken += 1
        if taken == save_after:
            torch.save({name: value.clone() for name, value in method.parameters()}, saved)
        started = time.perf_counter()
        os.sync()  # what the page cache holds is written to disk outside of other methods' turns
        report.step(**values, kernel=time.perf_counter() - started)
    counts = method.counts()
    report.phase("end")
    reference = home.with_name(REFERENCE).with_suffix(".pt")
    compared = saved.exists() and reference.exists()
    return {
        "parameters": method.training.parameters,
        "tokens": method.training.tokens,
        "steps": taken,
        "first": first,
        "counts": counts,
        "difference": greatest_difference(reference, saved) if compared else None,
    }


def _step(method: Method, index: int) -> dict[str, float]:
    """Seconds, loss and bytes of one step."""
    state, target = method.training.batch(index), method.training.target(index)
    counters, waited = IOCounters(), method.counts().get("wait_seconds", 0.0)
    processor, started = time.process_time(), time.perf_counter()
    loss = method.step(state, target)
    seconds = time.perf_counter() - started
    processor = time.process_time() - processor
    waited = method.counts().get("wait_seconds", 0.0) - waited
    return {"seconds": seconds, "processor": processor, "waited": waited, "loss": loss, **counters.taken()}


def greatest_difference(path: Path, other: Path) -> float:
    """Of any tensor of two saved models: length of the difference relative to the length of the first.

    Raises:
        ValueError: if they are not the same tensors by name.
    """
    first, second = (torch.load(name, mmap=True, weights_only=True) for name in (path, other))
    if set(first) != set(second):
        raise ValueError(f"expected the same parameters in both, got {sorted(set(first) ^ set(second))[:4]} in one")
    return max(_relative(first[name], second[name]) for name in first)


def _relative(first: Tensor, second: Tensor) -> float:
    distance = torch.linalg.vector_norm((first - second).double())
    length = torch.linalg.vector_norm(first.double())
    return float(distance / length) if length else float(distance)
