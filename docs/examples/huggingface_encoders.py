"""Two Hugging Face encoders, one contrastive batch, three chunk sizes: the same loss and the same gradient.

    pip install -e '.[huggingface]' && python docs/examples/huggingface_encoders.py

The encoders are built from a configuration, so nothing is downloaded; use ``BertModel.from_pretrained(...)`` in
practice.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn
from transformers import BatchEncoding, BertConfig, BertModel

from gradcache import GradCache
from gradcache.loss import SimpleContrastiveLoss


def encoder(seed: int, dropout: float) -> nn.Module:
    """A small BERT."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertModel(config)


def tokens(rows: int, length: int, seed: int) -> BatchEncoding:
    """Padded token numbers and their mask, as a tokenizer returns them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, (rows, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length)[None, :] < lengths).long()
    return BatchEncoding({"input_ids": ids * mask, "attention_mask": mask})


def first_position(output: object) -> Tensor:
    """The representation: the first position of the last layer."""
    hidden: Tensor = output.last_hidden_state  # type: ignore[attr-defined]
    return hidden[:, 0]


def step(models: list[nn.Module], inputs: list[BatchEncoding], rows: int) -> tuple[float, list[Tensor]]:
    """One step with chunks of ``rows``: loss and gradients."""
    towers = copy.deepcopy(models)
    cache = GradCache(towers, rows, SimpleContrastiveLoss(), get_rep_fn=first_position)
    loss = cache(*inputs)
    return float(loss), [p.grad for tower in towers for p in tower.parameters() if p.grad is not None]


def main(rows: int = 24, length: int = 16, dropout: float = 0.0) -> dict[int, tuple[float, float]]:
    """For each chunk size: loss, and the gradient's difference from a single chunk's.

    The difference is the greatest of all parameters, relative to the greatest gradient.
    """
    models = [encoder(0, dropout), encoder(1, dropout)]
    inputs = [tokens(rows, length, 2), tokens(rows, length, 3)]
    whole = step(models, inputs, rows)
    greatest = max(float(gradient.abs().max()) for gradient in whole[1])
    results = {}
    for size in (rows, rows // 3, 1):
        loss, gradients = step(models, inputs, size)
        difference = max(float((a - b).abs().max()) for a, b in zip(gradients, whole[1], strict=True))
        results[size] = (loss, difference / greatest)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0, help="above 0, chunk sizes draw different masks")
    arguments = parser.parse_args()
    print("rows a chunk        loss   gradient off by")
    for size, numbers in main(arguments.rows, arguments.length, arguments.dropout).items():
        print(f"{size:12d}  {numbers[0]:10.6f}  {numbers[1]:16.1e}")
