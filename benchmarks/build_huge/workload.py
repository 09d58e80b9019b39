"""The model, its weights in files, and two methods that build, load and train it, with or without a memory cap."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.io_counters import IOCounters, counted_between
from benchmarks.harness.memory_cap import cap_memory, lacks_memory
from benchmarks.harness.worker import Reporter
from offload import OffloadModel, OffloadOptimizer, load_pretrained

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
        return 4 * self.blocks * (8 * self.dim**2 + 7 * self.dim)

    @property
    def training_flops(self) -> float:
        """Of the matrix products of a forward and a backward, nothing recomputed."""
        return 3 * 2.0 * self.rows * 8 * self.dim**2 * self.blocks

    def build(self) -> nn.Sequential:
        """The model on the meta device: shapes and no values."""
        with torch.device("meta"):
            return nn.Sequential(*(Residual(self.dim) for _ in range(self.blocks)))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Input and target."""
        generator = torch.Generator().manual_seed(0)
        size = (self.rows, self.dim)
        return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


class Residual(nn.Module):
    """Two matrices around a nonlinearity, and a residual connection."""

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
    """Writes bfloat16 weights as safetensors files with an index, a block at a time; returns the tensors' bytes."""
    weight_map: dict[str, str] = {}
    total = 0
    for k, block in enumerate(shape.build()):
        generator = torch.Generator().manual_seed(k)
        header: dict[str, Any] = {}
        parts: list[bytes] = []
        offset = 0
        for name, like in block.state_dict().items():
            scale = 0.3 / like.shape[-1] ** 0.5 if like.dim() > 1 else 0.0
            value = torch.randn(like.shape, generator=generator) * scale + (name == "norm.weight")
            parts.append(value.bfloat16().view(torch.uint8).numpy().tobytes())
            end = offset + len(parts[-1])
            header[f"{k}.{name}"] = {"dtype": "BF16", "shape": list(like.shape), "data_offsets": [offset, end]}
            offset = end
        file = f"model-{k + 1:05d}-of-{shape.blocks:05d}.safetensors"
        text = json.dumps(header).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
        weight_map.update(dict.fromkeys(header, file))
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def resident(report: Reporter, shape: dict[str, Any], weights: str, cap_bytes: int | None) -> dict[str, Any]:
    """The model in memory, with the same loader and the plain optimizer."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Shape(**shape).build().to_empty(device="cpu")
        load_pretrained(model, weights)
        # The fused kernel, which an OffloadOptimizer uses too.
        return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    return _train(report, Shape(**shape), make, cap_bytes)


def offloaded(
    report: Reporter, shape: dict[str, Any], weights: str, cap_bytes: int | None, home: str
) -> dict[str, Any]:
    """The same model stored in files: each block is a shard, read directly from the files of the weights."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = list(Shape(**shape).build())
        model = OffloadModel(layers, "cpu", home, checkpoint_activation=True, pretrained=weights)
        return model, OffloadOptimizer(model, torch.optim.AdamW, lr=LEARNING_RATE)

    return _train(report, Shape(**shape), make, cap_bytes)


def _train(
    report: Reporter, shape: Shape, make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], cap_bytes: int | None
) -> dict[str, Any]:
    report.memory(FLOOR)
    report.total(shape.steps)
    try:
        if cap_bytes is not None:
            cap_memory(cap_bytes)
        report.phase("build")
        started = time.perf_counter()
        model, optimizer = make()
        seconds = time.perf_counter() - started
        report.phase("steps")
        for _, step in zip(report.turns(), _steps(shape, model, optimizer), strict=False):
            report.step(**step)
    except (RuntimeError, MemoryError) as error:
        line = str(error).split("\n")[0]
        if not isinstance(error, MemoryError) and not lacks_memory(line):
            raise
        return {"out_of_memory": line.split("DefaultCPUAllocator: ")[-1] or type(error).__name__}
    return {"load_seconds": seconds, "statistics": _statistics(model) or None}


def _steps(shape: Shape, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[dict[str, float]]:
    x, target = shape.batch()
    counted = _statistics(model)
    for _ in range(shape.steps):
        counters = IOCounters()
        started = time.perf_counter()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(optimizer, OffloadOptimizer):
            optimizer.synchronize()  # so that a step's time holds all of its work
        seconds = time.perf_counter() - started
        before, counted = counted, _statistics(model)
        yield {"loss": float(loss.detach()), "seconds": seconds, **counters.taken(), **counted_between(before, counted)}


def _statistics(model: nn.Module) -> dict[str, Any]:
    """What an OffloadModel counts; nothing for a model in memory."""
    return asdict(model.statistics()) if isinstance(model, OffloadModel) else {}
