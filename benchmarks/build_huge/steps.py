"""The rungs: build a model from nothing, load its weights from files, and train it; with or without a cap on memory.

The cap is ``RLIMIT_DATA``: Linux then refuses private writable memory beyond it, whether it is touched or not, to the
C heap, to thread stacks and to anonymous mappings alike. Files that are mapped shared do not count, and nothing else
escapes: a process that goes on under the cap never held more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frame.cap import cap_memory
from benchmarks.frame.child import Report
from benchmarks.frame.traffic import Traffic
from benchmarks.frame.work import counted_between
from offload import OffloadModel, OffloadOptimizer, load_pretrained
from offload.files.tensor_file import write_tensors

__all__ = ["FLOOR", "LEARNING_RATE", "Shape", "offloaded", "resident", "write_weights"]

FLOOR = "interpreter and torch"
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Shape:
    """``blocks`` residual blocks of ``8 * dim ** 2`` parameters each, and a batch of ``rows``."""

    blocks: int
    dim: int
    rows: int
    steps: int

    @property
    def parameter_bytes(self) -> int:
        """Of all parameters, in float32."""
        return 4 * sum(p.numel() for p in self.build().parameters())

    @property
    def training_flops(self) -> float:
        """Of the matrix products of a forward and a backward, nothing recomputed."""
        return 3 * 2.0 * self.rows * 8 * self.dim**2 * self.blocks

    def build(self) -> nn.Sequential:
        """The model on the meta device: shapes and nothing else."""
        with torch.device("meta"):
            return nn.Sequential(*(Residual(self.dim) for _ in range(self.blocks)))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Input and target."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.rows, self.dim, generator=generator), torch.randn(
            self.rows, self.dim, generator=generator
        )


class Residual(nn.Module):
    """Two matrices around a nonlinearity, and the way past them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, dim)`` to the same."""
        down: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + down


def write_weights(folder: Path, shape: Shape) -> int:
    """Writes bfloat16 weights as a checkpoint of several files with an index, a block at a time; returns its bytes."""
    weight_map: dict[str, str] = {}
    total = 0
    for k, block in enumerate(shape.build()):
        generator = torch.Generator().manual_seed(k)
        tensors = {}
        for name, like in block.state_dict().items():
            scale = 0.3 / like.shape[-1] ** 0.5 if like.dim() > 1 else 0.0
            value = torch.randn(like.shape, generator=generator) * scale + (name == "norm.weight")
            tensors[f"{k}.{name}"] = value.bfloat16()
        file = f"model-{k + 1:05d}-of-{shape.blocks:05d}.safetensors"
        write_tensors(folder / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def resident(report: Report, shape: dict[str, Any], weights: str, cap_bytes: int | None) -> dict[str, Any]:
    """What anybody would write: the model in memory, the same loader, the plain optimizer."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Shape(**shape).build().to_empty(device="cpu")
        load_pretrained(model, weights)
        # The fused kernel, which is what an OffloadOptimizer uses too.
        return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    return _train(report, Shape(**shape), make, cap_bytes)


def offloaded(report: Report, shape: dict[str, Any], weights: str, cap_bytes: int | None, home: str) -> dict[str, Any]:
    """The same model with its home in files: each block is a shard, read straight from the files of the weights."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = list(Shape(**shape).build())
        model = OffloadModel(layers, "cpu", home, checkpoint_activation=True, pretrained=weights)
        return model, OffloadOptimizer(model, torch.optim.AdamW, lr=LEARNING_RATE)

    return _train(report, Shape(**shape), make, cap_bytes)


def _train(
    report: Report,
    shape: Shape,
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    cap_bytes: int | None,
) -> dict[str, Any]:
    report.memory(FLOOR)
    report.total(shape.steps)
    seconds = 0.0
    try:
        if cap_bytes is not None and not cap_memory(cap_bytes):
            raise OSError(f"the system refuses a cap of {cap_bytes:,} bytes on a process's private memory")
        report.phase("build")
        started = time.perf_counter()
        model, optimizer = make()
        seconds = time.perf_counter() - started
        report.phase("steps")
        for _, step in zip(report.turns(), _steps(shape, model, optimizer), strict=False):
            report.step(**step)
    except (RuntimeError, MemoryError) as error:
        line = str(error).split("\n")[0]
        if not isinstance(error, MemoryError) and "allocate memory" not in line:
            raise
        return {"out_of_memory": line.split("DefaultCPUAllocator: ")[-1] or type(error).__name__}
    return {"load_seconds": seconds, "statistics": _statistics(model) or None}


def _steps(shape: Shape, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[dict[str, float]]:
    x, target = shape.batch()
    counted = _statistics(model)
    for _ in range(shape.steps):
        traffic = Traffic()
        started = time.perf_counter()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(optimizer, OffloadOptimizer):
            optimizer.synchronize()  # so that a step's time holds all of its work
        seconds = time.perf_counter() - started
        before, counted = counted, _statistics(model)
        yield {"loss": float(loss.detach()), "seconds": seconds, **traffic.taken(), **counted_between(before, counted)}


def _statistics(model: nn.Module) -> dict[str, Any]:
    """What an OffloadModel counts; nothing of a model in memory."""
    return asdict(model.statistics()) if isinstance(model, OffloadModel) else {}
