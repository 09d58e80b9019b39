"""A plain loop over a transformers model whose blocks stream: accumulation, clipping, a schedule, checkpoints.

    pip install -e '.[huggingface]' && python docs/examples/training_loop.py

The model is built from a configuration, so nothing is downloaded. The first run stops in the middle, and a second one
resumes from its checkpoint: weights and losses are, bit for bit, those of a run that was not interrupted, and up to
rounding those of the plain model in the same loop.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertForMaskedLM

from offload import OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint

STEPS, PARTS, MAX_NORM = 6, 2, 0.5


def bert(home: Path | None) -> Any:
    """A small BERT; its blocks stream from files in ``home``, if there is one."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64
    )
    model = BertForMaskedLM(config)
    if home is None:
        return model
    return OffloadModel(model, "cpu", home, checkpoint_activation=True, blocks="bert.encoder.layer")


def batch(step: int, part: int) -> dict[str, Tensor]:
    """Counting from a random number, with a third of the words hidden."""
    generator = torch.Generator().manual_seed(PARTS * step + part)
    words = (torch.randint(100, (8, 1), generator=generator) + torch.arange(12)) % 99 + 1
    hidden = torch.rand(words.shape, generator=generator) < 1 / 3
    return {
        "input_ids": words.masked_fill(hidden, 0),
        "attention_mask": torch.ones_like(words),
        "labels": words.masked_fill(~hidden, -100),
    }


def train(home: Path | None, checkpoint: Path, until: int = STEPS) -> tuple[Any, list[float]]:
    """Trains to step ``until``, from the checkpoint if there is one, and saves one; the model, and each step's loss."""
    model = bert(home).train()
    if isinstance(model, OffloadModel):
        # Clips by itself, from norms that were summed while gradients were written.
        optimizer: torch.optim.Optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-2, max_norm=MAX_NORM)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    begin = 0
    torch.manual_seed(1)
    if checkpoint.exists():
        saved = load_checkpoint(checkpoint, model, optimizer)  # and the generators of random numbers
        begin = saved.step
        schedule.load_state_dict(saved.extra)
    losses = []
    for step in range(begin, until):
        batches = [batch(step, part) for part in range(PARTS)]
        counted = sum((each["labels"] != -100).sum() for each in batches)
        total = 0.0
        for each in batches:
            labels = each.pop("labels")
            logits = model(**each).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
            loss.backward()
            total += loss.item()
        if not isinstance(optimizer, OffloadOptimizer):
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    save_checkpoint(checkpoint, model, optimizer, extra=schedule.state_dict())
    return model, losses


def main(folder: Path) -> list[float]:
    """Trains in two runs; returns the loss of each step."""
    (home := folder / "home").mkdir()
    _, first = train(home, folder / "checkpoint", until=3)
    model, second = train(home, folder / "checkpoint")
    model.save_pretrained(folder / "saved")
    return first + second


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print("loss of each step:", *(f"{loss:.3f}" for loss in main(Path(directory))))
