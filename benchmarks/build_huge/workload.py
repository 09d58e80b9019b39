"""The model, its weights in files, and the process of a case: builds, loads and trains it, with or without a cap."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.case import FLOOR, LOST, told_by
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.memory import cap_memory
from benchmarks.harness.settings import option
from benchmarks.harness.table import mebibytes
from benchmarks.harness.worker import Reporter
from benchmarks.models.checkpoint import write_checkpoint
from offload import OffloadModel, OffloadOptimizer, load_pretrained

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Settings:
    """The cap, the model (residual blocks of about ``8 * dim ** 2`` parameters each), and its batch."""

    cap: int = option(768, "MiB of private memory (RLIMIT_DATA) of the capped cases")
    dim: int = option(1024, "channels; a block has 8 dim^2 parameters")
    blocks: int = option(36, "blocks, each of which is one shard")
    rows: int = option(64, "rows of the batch")
    steps: int = option(9, "steps of AdamW")
    memory: int = option(0, "MiB for which the offloaded model plans; 0: it plans nothing", least=0)

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: the model has to exceed the cap."""
        if not sys.platform.startswith("linux"):
            return f"expected Linux, whose RLIMIT_DATA counts mappings too, got {sys.platform}"
        if self.parameter_bytes > self.cap << 20:
            return ""
        return (
            f"expected parameters larger than the cap, got {mebibytes(self.parameter_bytes)} under a cap of "
            f"{self.cap:,} MiB; pass more --blocks or a smaller --cap"
        )

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, in float32."""
        return 4 * self.blocks * (8 * self.dim**2 + 7 * self.dim)

    def build(self) -> nn.Sequential:
        """The model on the meta device: shapes and no values."""
        with torch.device("meta"):
            return nn.Sequential(*(Residual(self.dim) for _ in range(self.blocks)))


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


def write_weights(folder: Path, settings: Settings) -> int:
    """Writes bfloat16 weights, a block at a time; returns the tensors' bytes."""

    def drawn(k: int, block: nn.Module) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(k)
        tensors = {}
        for name, like in block.state_dict().items():
            scale = 0.3 / like.shape[-1] ** 0.5 if like.dim() > 1 else 0.0
            value = torch.randn(like.shape, generator=generator) * scale + (name == "norm.weight")
            tensors[f"{k}.{name}"] = value.bfloat16()
        return tensors

    folder.mkdir()
    return write_checkpoint(folder, (drawn(*each) for each in enumerate(settings.build())), settings.blocks)


def _resident(settings: Settings, weights: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = settings.build().to_empty(device="cpu")
    load_pretrained(model, weights)
    # The fused kernel, which an OffloadOptimizer uses too.
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _offloaded(settings: Settings, weights: Path, *, fewer: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model stored in files: each block is a shard, read directly from the files of the weights."""
    home = weights.with_name("home-fewer" if fewer else "home")
    memory = settings.memory << 20 or None
    layers = list(settings.build())
    how: dict[str, Any] = {"checkpoint_activation": True, "pretrained": weights, "memory": memory}
    model = OffloadModel(layers, "cpu", home, store_dtype=torch.bfloat16 if fewer else None, **how)
    states = "8bit" if fewer else None
    # Nothing is clipped: gradients need not be stored, and the weights are in their slot.
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=LEARNING_RATE, update_in_backward=True, states=states)
    return model, optimizer


def train(
    report: Reporter, settings: dict[str, Any], offloaded: bool, capped: bool, fewer: bool = False
) -> dict[str, Any]:
    """Builds the model, loads it from ``weights``, and takes a step in each turn; memory may end it at any time."""
    chosen = Settings(**settings)
    report.phase(FLOOR)
    try:
        if capped:
            cap_memory(chosen.cap << 20)
        report.phase("build")
        started = time.perf_counter()
        weights = Path("weights")
        model, optimizer = _offloaded(chosen, weights, fewer=fewer) if offloaded else _resident(chosen, weights)
        seconds = time.perf_counter() - started
        report.phase("steps")
        generator = torch.Generator().manual_seed(0)
        x, target = (torch.randn(chosen.rows, chosen.dim, generator=generator) for _ in range(2))

        def step() -> Tensor:
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(optimizer, OffloadOptimizer):
                optimizer.synchronize()  # so that a step's time holds all of its work
            return loss.detach()

        for _ in report.turns():
            loss, values = measure(step, model)
            report.step(loss=float(loss), **values)
    except LOST as error:
        return {"out_of_memory": told_by(error)}
    return {"load_seconds": seconds, "statistics": counts_of(model) or None}
