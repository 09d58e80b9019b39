"""A Llama whose blocks stream, under the Trainer of transformers: accumulation, clipping, checkpoints.

    pip install -e '.[trainers]' && python docs/examples/huggingface_trainer.py

The model is built from a configuration, so nothing is downloaded. The first run stops in the middle, and a second one
resumes from its checkpoint: weights and losses are, bit for bit, those of a run that was not interrupted, and up to
rounding those of the plain model under the same Trainer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from offload import OffloadModel, OffloadOptimizer


def rows(number: int = 64) -> list[dict[str, torch.Tensor]]:
    """Counting in steps of 1 to 4; some labels at the end of each row do not count."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(number):
        begin, step, unused = (int(torch.randint(high, (), generator=generator)) for high in (50, 4, 8))
        ids = (begin + (step + 1) * torch.arange(16)) % 100
        labels = torch.where(torch.arange(16) < 16 - unused, ids, -100)
        found.append({"input_ids": ids, "attention_mask": torch.ones(16, dtype=torch.long), "labels": labels})
    return found


def llama(home: Path | None, dropout: float = 0.1) -> Any:
    """A small Llama; its blocks stream from files in ``home``, if there is one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        attention_dropout=dropout,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    if home is None:
        return model
    return OffloadModel(model, "cpu", home, checkpoint_activation=True, blocks="model.layers")


class OffloadTrainer(Trainer):
    """Makes an OffloadOptimizer of the class, the groups and the hyperparameters that the Trainer chose."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Called by the Trainer."""
        if self.optimizer is None and isinstance(self.model, OffloadModel):
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            decays = set(self.get_decay_parameter_names(self.model))
            trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for name, p in trained if (name in decays) == yes], "weight_decay": decay}
                for yes, decay in ((True, self.args.weight_decay), (False, 0.0))
            ]
            self.optimizer = OffloadOptimizer(self.model, kind, params=groups, **options)
        return super().create_optimizer(model)


class StopAfter(TrainerCallback):
    """Ends the training after so many steps, as an interruption would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        control.should_training_stop = control.should_training_stop or state.global_step >= self.steps


def train(
    output: Path,
    home: Path | None,
    steps: int = 6,
    resume: bool = False,
    model: Callable[[Path | None], Any] = llama,
    **options: Any,
) -> Trainer:
    """Trains for 6 steps of two batches each, or stops before; returns the trainer."""
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_steps": 3,
        "seed": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        **options,
    }
    arguments = TrainingArguments(output_dir=str(output), **chosen)
    trainer = OffloadTrainer(model=model(home), args=arguments, train_dataset=rows(), callbacks=[StopAfter(steps)])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    """The loss of each step."""
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


def main(folder: Path) -> list[float]:
    """Trains in two runs; returns the loss of each step."""
    (home := folder / "home").mkdir()
    train(folder / "run", home, steps=3)
    trainer = train(folder / "run", home, resume=True)
    trainer.save_model(str(folder / "saved"))
    again = LlamaForCausalLM.from_pretrained(str(folder / "saved"))
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), again.parameters(), strict=True))
    return losses(trainer)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print("loss of each step:", *(f"{loss:.3f}" for loss in main(Path(directory))))
