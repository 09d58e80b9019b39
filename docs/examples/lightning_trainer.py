"""Layers that stream, in a LightningModule with automatic optimization: accumulation, a schedule, checkpoints.

    pip install -e . lightning && python docs/examples/lightning_trainer.py

The first run stops in the middle, and a second one resumes from its checkpoint. Losses and weights are, bit for bit,
those of the plain layers under the same Trainer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offload import OffloadModel, OffloadOptimizer

STEPS = 6


class Regression(LightningModule):
    """Learns the sum of its inputs; the layers stream from files in ``home``, if there is one."""

    def __init__(self, home: Path | None, max_norm: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)), nn.Linear(16, 1))
        self.layers = layers if home is None else OffloadModel(layers, "cpu", home, checkpoint_activation=True)
        self.max_norm = max_norm
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Called by the Trainer."""
        (x,) = batch
        loss = (self.layers(x) - x.sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """Called by the Trainer, which passes a closure to each ``step``."""
        options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9}
        if isinstance(self.layers, OffloadModel):
            optimizer: torch.optim.Optimizer = OffloadOptimizer(
                self.layers, torch.optim.SGD, max_norm=self.max_norm, **options
            )
        else:
            optimizer = torch.optim.SGD(self.layers.parameters(), **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(
    home: Path | None, checkpoint: Path | None = None, steps: int = STEPS, max_norm: float | None = None, **options: Any
) -> tuple[Regression, Trainer]:
    """Trains to this step, from the checkpoint if there is one; an epoch is a step."""
    model = Regression(home, max_norm)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=steps, accelerator="cpu", enable_checkpointing=False, **quiet, **options)
    batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    rows = DataLoader(TensorDataset(batch), batch_size=32 // options.get("accumulate_grad_batches", 1))
    trainer.fit(model, rows, ckpt_path=checkpoint, weights_only=checkpoint is not None)
    return model, trainer


def main(folder: Path) -> list[float]:
    """Trains in two runs; returns the loss of each step."""
    first, trainer = train(folder / "home", steps=3)
    trainer.save_checkpoint(folder / "checkpoint.ckpt")
    second, _ = train(folder / "home", folder / "checkpoint.ckpt")
    return first.losses + second.losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print("loss of each step:", *(f"{loss:.3f}" for loss in main(Path(directory))))
