"""What is trained on a GPU: the blocks of all benchmarks, or a Qwen3 by its configuration, and the batch of a step."""

import importlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.case import CannotRunError
from benchmarks.models.transformer import Block, Stack

#: Tokens whose scores over the vocabulary are in memory at once.
SCORED = 1024


@dataclass(frozen=True)
class Qwen3:
    """Sizes of a Qwen3; those of Qwen3-0.6B by default. The embedding is the head, too."""

    hidden_size: int = 1024
    num_hidden_layers: int = 28
    intermediate_size: int = 3072
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936

    def build(self) -> nn.Module:
        """transformers' ``Qwen3Model`` with random weights."""
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise CannotRunError("no transformers in this environment; pip install transformers") from error
        config = transformers.Qwen3Config(**asdict(self), tie_word_embeddings=True, use_cache=False)
        model: nn.Module = transformers.AutoModel.from_config(config, attn_implementation="sdpa")
        return model.train()

    @property
    def matrices(self) -> int:
        """Elements of the matrices of all blocks, and of the embedding."""
        attention = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        block = self.hidden_size * (attention + 3 * self.intermediate_size)
        return self.num_hidden_layers * block + self.vocab_size * self.hidden_size


QWEN3_4B = Qwen3(2560, 36, 9728, 32, 8)


class Scored(nn.Module):
    """A language model that tells the loss of predicting each next token; the scores are made again in backward."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: Tensor) -> Tensor:
        """Tokens (rows, positions) to the mean cross entropy."""
        states: Tensor = self.body(input_ids=ids).last_hidden_state
        return next_token_loss(states, self.body.get_input_embeddings().weight, ids)


def next_token_loss(states: Tensor, embedding: Tensor, ids: Tensor) -> Tensor:
    """States (rows, positions, channels) and tokens (rows, positions) to the mean loss, in parts of rows."""
    rows, expected = states[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    parts = zip(rows.split(SCORED), expected.split(SCORED), strict=True)
    losses = [checkpoint(_summed_loss, part, embedding, labels, use_reentrant=False) for part, labels in parts]
    return torch.stack(losses).sum() / len(rows)


def _summed_loss(states: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(states, embedding).float(), labels, reduction="sum")


@dataclass(frozen=True)
class Work:
    """A model (``qwen3``, or a stack of so many blocks and channels), and the rows and positions of its batch."""

    rows: int
    positions: int
    blocks: int = 0
    dim: int = 0
    qwen3: dict[str, int] | None = None

    def build(self, device: str) -> nn.Module:
        """The model on a device, with the same weights each time."""
        torch.manual_seed(0)
        with torch.device(device):
            if self.qwen3 is not None:
                return Scored(Qwen3(**self.qwen3).build())
            return nn.Sequential(*(Block(self.dim) for _ in range(self.blocks)))

    @property
    def path(self) -> str | None:
        """Where in the model its blocks are; None for a sequence."""
        return None if self.qwen3 is None else "body.layers"

    def batch(self, device: str) -> Tensor:
        """Hidden states, or tokens."""
        generator = torch.Generator().manual_seed(0)
        if self.qwen3 is None:
            return torch.randn(self.rows, self.positions, self.dim, generator=generator).to(device)
        return torch.randint(self.qwen3["vocab_size"], (self.rows, self.positions), generator=generator).to(device)

    def loss(self, output: Tensor) -> Tensor:
        """Of what the model returned."""
        return output.float().square().mean() if self.qwen3 is None else output

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.positions

    @property
    def parameters(self) -> int:
        """Elements of the matrices, and of the biases and norms of a stack."""
        return Stack(self.blocks, self.dim, 1, 1).parameters if self.qwen3 is None else Qwen3(**self.qwen3).matrices

    @property
    def operations(self) -> float:
        """Of a step, as papers count them: forward and backward without recomputation, products alone."""
        if self.qwen3 is None:
            attention = 12.0 * self.blocks * self.dim * self.positions
        else:  # causal: half of the scores
            sizes = Qwen3(**self.qwen3)
            attention = 6.0 * sizes.num_hidden_layers * sizes.num_attention_heads * sizes.head_dim * self.positions
        return self.tokens * (6.0 * self.parameters + attention)
