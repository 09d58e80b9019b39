"""A SentenceTransformer whose transformer streams, under the trainer of sentence-transformers, with a cached loss.

    pip install -e '.[trainers]' && python docs/examples/sentence_transformers_trainer.py

The transformer is built from a configuration and the tokenizer is trained on the example's own texts, so nothing is
downloaded; use ``SentenceTransformer("...")`` in practice. The first run stops in the middle, and a second one resumes
from its checkpoint. The blocks of the transformer are loaded twice a step, whatever the number of mini-batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, TrainerCallback

from gradcache.sentence_transformers import CachedMultipleNegativesRankingLoss
from offload import OffloadModel, OffloadOptimizer

THINGS = ("river", "bridge", "garden", "engine", "letter", "winter", "market", "island")
DEEDS = ("crosses", "follows", "reaches", "leaves")


def pairs() -> Dataset:
    """Questions, and texts that answer them."""
    about = [(a, deed, b) for a in THINGS for deed in DEEDS for b in THINGS if a < b]
    return Dataset.from_dict(
        {
            "anchor": [f"what {deed} the {b} near the {a}" for a, deed, b in about],
            "positive": [f"the {a} {deed} the {b}" for a, deed, b in about],
        }
    )


def model_in(folder: Path, dropout: float = 0.1) -> str:
    """Saves a small BERT with random weights and its tokenizer; the folder's name, as ``SentenceTransformer`` takes."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    rust = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = pairs()
    rust.train_from_iterator(
        [*texts["anchor"], *texts["positive"]],
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False),
    )
    ends = [(token, rust.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    rust.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def sentence_transformer(folder: str, home: Path | None, **how: Any) -> Any:
    """The model; its transformer streams from files in ``home``, if there is one. ``how``: of an ``OffloadModel``."""
    transformer = Transformer(folder)
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    if home is not None:
        transformer.model = OffloadModel(
            transformer.model, "cpu", home, checkpoint_activation=True, blocks="encoder.layer", **how
        )
    return SentenceTransformer(modules=[transformer, pooling], device="cpu")


def optimizer_of(model: Any, kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """For a transformer that streams, one whose updates run during the next forward."""
    if isinstance(model[0].model, OffloadModel):
        return OffloadOptimizer(model[0].model, kind, lr=1e-3)
    return kind(model.parameters(), lr=1e-3)  # type: ignore[call-arg]


class StopAfter(TrainerCallback):
    """Ends the training after so many steps, as an interruption would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer."""
        control.should_training_stop = control.should_training_stop or state.global_step >= self.steps


def train(
    folder: str,
    output: Path,
    home: Path | None,
    make_loss: Callable[[Any], Any] = CachedMultipleNegativesRankingLoss,
    steps: int = 6,
    resume: bool = False,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    make_model: Callable[[str, Path | None], Any] = sentence_transformer,
    **options: Any,
) -> Any:
    """Trains for 6 steps, or stops before; returns the trainer."""
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 16,
        "max_steps": 6,
        "warmup_steps": 2,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_steps": 3,
        "seed": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        **options,
    }
    arguments = SentenceTransformerTrainingArguments(output_dir=str(output), **chosen)
    model = make_model(folder, home)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=pairs(),
        loss=make_loss(model),
        optimizers=(optimizer_of(model, kind), None),
        callbacks=[StopAfter(steps)],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main(folder: Path) -> list[float]:
    """Trains in two runs, saves and loads; returns the loss of each step."""
    name, output, home = model_in(folder / "bert"), folder / "run", folder / "home"
    home.mkdir()

    def loss(model: Any) -> Any:
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)

    train(name, output, home, loss, steps=3)
    trainer = train(name, output, home, loss, resume=True)
    model = trainer.model.eval()
    model.save_pretrained(str(folder / "saved"))
    again = SentenceTransformer(str(folder / "saved"), device="cpu")
    texts = ["what crosses the river", "the bridge crosses the river"]
    assert torch.equal(torch.as_tensor(model.encode(texts)), torch.as_tensor(again.encode(texts)))
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print("loss of each step:", *(f"{loss:.3f}" for loss in main(Path(directory))))
