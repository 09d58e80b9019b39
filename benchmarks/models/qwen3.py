"""The architecture Qwen3: its sizes, its configuration, random weights in files, and pairs of random tokens.

Weights are written a block at a time, so that each method reads the same values and none has to draw them in memory.
"""

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.case import CannotRunError
from benchmarks.models.checkpoint import write_checkpoint


def transformers() -> Any:
    """The package."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise CannotRunError("no transformers in this environment; pip install transformers") from error


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

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of one block."""
        width, wide, head = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = head * self.num_attention_heads, head * self.num_key_value_heads
        return {
            "self_attn.q_proj.weight": (queries, width),
            "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width),
            "self_attn.o_proj.weight": (width, queries),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "mlp.gate_proj.weight": (wide, width),
            "mlp.up_proj.weight": (wide, width),
            "mlp.down_proj.weight": (width, wide),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }

    @property
    def block_parameters(self) -> int:
        """Elements of one block."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return self.num_hidden_layers * self.block_parameters + (self.vocab_size + 1) * self.hidden_size

    @property
    def matrices(self) -> int:
        """Elements of the matrices of all blocks, and of the embedding."""
        block = sum(torch.Size(shape).numel() for shape in self.shapes.values() if len(shape) > 1)
        return self.num_hidden_layers * block + self.vocab_size * self.hidden_size

    def build(self) -> nn.Module:
        """transformers' ``Qwen3Model`` with random weights."""
        config = transformers().Qwen3Config(**asdict(self), tie_word_embeddings=True, use_cache=False)
        model: nn.Module = transformers().AutoModel.from_config(config, attn_implementation="sdpa")
        return model.train()

    def write(self, folder: Path) -> int:
        """Writes configuration and weights (float32, a file for each block); returns the bytes of tensors."""
        more = {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "max_position_embeddings": 32_768}
        more |= {"attention_bias": False, "attention_dropout": 0.0, "torch_dtype": "float32"}
        kind = {"architectures": ["Qwen3Model"], "model_type": "qwen3", "tie_word_embeddings": True}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(kind | asdict(self) | more), encoding="utf-8")
        return write_checkpoint(folder, self._parts(), self.num_hidden_layers + 1)

    def _parts(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)

        def drawn(shape: tuple[int, ...]) -> Tensor:
            return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator).mul_(0.02)

        width = self.hidden_size
        yield {"embed_tokens.weight": drawn((self.vocab_size, width)), "norm.weight": drawn((width,))}
        for k in range(self.num_hidden_layers):
            yield {f"layers.{k}.{name}": drawn(shape) for name, shape in self.shapes.items()}


def token_pairs(vocabulary: int, pairs: int, positions: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens of both sides of the pairs of a step, int64 of shape (pairs, positions). A pair shares half of them."""
    generator = torch.Generator().manual_seed(step)
    queries, passages = (torch.randint(vocabulary, (pairs, positions), generator=generator) for _ in range(2))
    passages[:, positions // 2 :] = queries[:, positions // 2 :]
    return queries, passages
