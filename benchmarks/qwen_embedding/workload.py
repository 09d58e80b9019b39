"""The model and its batches: the architecture of Qwen3-Embedding-0.6B with random weights, and pairs of random tokens.

The weights are written to safetensors files before a case starts, a block at a time, so that each method reads the same
values and none has to draw them in memory.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.checkpoint import write_checkpoint

HEAD_CHANNELS = 128


@dataclass(frozen=True)
class Model:
    """Sizes of a Qwen3 encoder; those of Qwen3-Embedding-0.6B by default."""

    blocks: int = 28
    width: int = 1024
    vocabulary: int = 151_669

    @property
    def heads(self) -> int:
        """Heads of the queries; keys and values have half as many, or one."""
        return max(1, self.width // 64)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of one block."""
        queries, keys = HEAD_CHANNELS * self.heads, HEAD_CHANNELS * max(1, self.heads // 2)
        wide, attention, perceptron = 3 * self.width, "self_attn", "mlp"
        return {
            f"{attention}.q_proj.weight": (queries, self.width),
            f"{attention}.k_proj.weight": (keys, self.width),
            f"{attention}.v_proj.weight": (keys, self.width),
            f"{attention}.o_proj.weight": (self.width, queries),
            f"{attention}.q_norm.weight": (HEAD_CHANNELS,),
            f"{attention}.k_norm.weight": (HEAD_CHANNELS,),
            f"{perceptron}.gate_proj.weight": (wide, self.width),
            f"{perceptron}.up_proj.weight": (wide, self.width),
            f"{perceptron}.down_proj.weight": (self.width, wide),
            "input_layernorm.weight": (self.width,),
            "post_attention_layernorm.weight": (self.width,),
        }

    @property
    def block_parameters(self) -> int:
        """Elements of one block."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return self.blocks * self.block_parameters + (self.vocabulary + 1) * self.width

    @property
    def configuration(self) -> dict[str, Any]:
        """The fields of transformers' ``config.json``."""
        return {
            "architectures": ["Qwen3Model"],
            "model_type": "qwen3",
            "hidden_size": self.width,
            "num_hidden_layers": self.blocks,
            "vocab_size": self.vocabulary,
            "intermediate_size": 3 * self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": max(1, self.heads // 2),
            "head_dim": HEAD_CHANNELS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "torch_dtype": "float32",
        }


def write_model(folder: Path, model: Model) -> int:
    """Writes configuration and weights (float32, a file for each block); returns the bytes of tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.configuration), encoding="utf-8")
    return write_checkpoint(folder, _parts(model), model.blocks + 1)


def _parts(model: Model) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator).mul_(0.02)

    yield {"embed_tokens.weight": drawn((model.vocabulary, model.width)), "norm.weight": drawn((model.width,))}
    for k in range(model.blocks):
        yield {f"layers.{k}.{name}": drawn(shape) for name, shape in model.shapes.items()}


def batch_of(model: Model, pairs: int, positions: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens of both sides of the pairs of a step, int64 of shape (pairs, positions). A pair shares half of them."""
    generator = torch.Generator().manual_seed(step)
    queries, passages = (torch.randint(model.vocabulary, (pairs, positions), generator=generator) for _ in range(2))
    passages[:, positions // 2 :] = queries[:, positions // 2 :]
    return queries, passages
