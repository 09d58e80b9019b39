"""Derives the parameters of a model from a transformers ``config.json``.

Four families are described here, whose parameters follow from well-known fields; another one needs transformers, which
builds it on the meta device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload.advise.blocks import layers_by_name
from offload.advise.outline import Layer, Outline, ParameterShape

__all__ = ["outline_of_config", "read_config", "with_tied_head"]

Shapes = dict[str, tuple[int, ...]]


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a configuration. Raises ValueError if it is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a config.json, got {path}, which cannot be read: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f"expected the config.json of a transformers model, got {path} without model_type")
    return fields


def outline_of_config(path: Path, dtype: torch.dtype) -> Outline:
    """The layers that a configuration describes, with parameters of type ``dtype``."""
    fields = read_config(path)
    family = _FAMILIES.get(fields["model_type"])
    if family is not None:
        shapes = family(_Fields(fields, path))
        how = f"the parameters of a {fields['model_type']} model with a language-model head"
    else:
        shapes, how = _by_transformers(fields, path)
    layers = layers_by_name(ParameterShape(name, shape, dtype) for name, shape in shapes.items())
    outline = Outline(layers, [f"{how}, stored as {_name(dtype)} (--stored-dtype)"], width=_width(fields))
    if family is not None:
        with_tied_head(outline, fields)
    return outline


def with_tied_head(outline: Outline, fields: Mapping[str, Any]) -> None:
    """Adds the head that shares the embedding's table, where a configuration says so and no layer is a head."""
    tied = fields.get("tie_word_embeddings", fields["model_type"] in ("gpt2",))
    vocabulary = fields.get("vocab_size")
    tables = [p for layer in outline.layers if layer.looks_up for p in layer.own if p.shape[0] == vocabulary]
    if tied and len(tables) == 1:
        outline.layers = [*outline.layers, Layer("lm_head", (), (tables[0],))]
        outline.assumptions.append(f"lm_head uses the table {tables[0].name} (tie_word_embeddings)")


def _width(fields: Mapping[str, Any]) -> int | None:
    return next((fields[name] for name in ("hidden_size", "n_embd", "d_model") if name in fields), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Fields:
    """The fields of a configuration; one that is missing or no number is an error."""

    def __init__(self, fields: Mapping[str, Any], path: Path) -> None:
        self._fields, self._path = fields, path

    def number(self, name: str, default: int | None = None) -> int:
        value = self._fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"expected a positive integer {name} in {self._path}, got {value!r}; add the field")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._fields.get(name, default))


def _llama(f: _Fields, *, projection_bias: bool | None = None) -> Shapes:
    """Llama, Mistral, and with biases of three projections Qwen 2."""
    hidden, inner = f.number("hidden_size"), f.number("intermediate_size")
    heads = f.number("num_attention_heads")
    head = f.number("head_dim", hidden // heads)
    groups = f.number("num_key_value_heads", heads)
    vocabulary = f.number("vocab_size")
    biased = f.flag("attention_bias", False) if projection_bias is None else projection_bias
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for k in range(f.number("num_hidden_layers")):
        block = f"model.layers.{k}."
        shapes[block + "input_layernorm.weight"] = (hidden,)
        for name, out in (("q", heads * head), ("k", groups * head), ("v", groups * head)):
            shapes[f"{block}self_attn.{name}_proj.weight"] = (out, hidden)
            if biased:
                shapes[f"{block}self_attn.{name}_proj.bias"] = (out,)
        shapes[block + "self_attn.o_proj.weight"] = (hidden, heads * head)
        if biased and projection_bias is None:
            shapes[block + "self_attn.o_proj.bias"] = (hidden,)
        shapes[block + "post_attention_layernorm.weight"] = (hidden,)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            shapes[f"{block}mlp.{name}_proj.weight"] = shape
            if projection_bias is None and f.flag("mlp_bias", False):
                shapes[f"{block}mlp.{name}_proj.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not f.flag("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _mistral(f: _Fields) -> Shapes:
    return _llama(f, projection_bias=False)


def _qwen2(f: _Fields) -> Shapes:
    return _llama(f, projection_bias=True)


def _gpt2(f: _Fields) -> Shapes:
    hidden = f.number("n_embd")
    inner = f.number("n_inner", 4 * hidden)
    shapes: Shapes = {
        "transformer.wte.weight": (f.number("vocab_size"), hidden),
        "transformer.wpe.weight": (f.number("n_positions"), hidden),
    }
    for k in range(f.number("n_layer")):
        block = f"transformer.h.{k}."
        for name, shape in (
            ("attn.c_attn", (hidden, 3 * hidden)),
            ("attn.c_proj", (hidden, hidden)),
            ("mlp.c_fc", (hidden, inner)),
            ("mlp.c_proj", (inner, hidden)),
        ):
            shapes[f"{block}{name}.weight"] = shape
            shapes[f"{block}{name}.bias"] = shape[1:]
        for name in ("ln_1", "ln_2"):
            shapes[f"{block}{name}.weight"] = shapes[f"{block}{name}.bias"] = (hidden,)
    shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (hidden,)
    if not f.flag("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (f.number("vocab_size"), hidden)
    return shapes


_FAMILIES = {"llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "gpt2": _gpt2}


def _by_transformers(fields: Mapping[str, Any], path: Path) -> tuple[Shapes, str]:
    kind = fields["model_type"]
    try:
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ValueError(
            f"expected model_type {', '.join(_FAMILIES)} in {path}, got {kind!r}; install transformers for others, or "
            f"pass a safetensors file or module:function"
        ) from None
    name = next((n for n in fields.get("architectures") or [] if re.fullmatch(r"\w+", n)), "AutoModel")
    made = getattr(transformers, name, None)
    try:
        configuration = transformers.AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
        with torch.device("meta"):
            if name == "AutoModel" or made is None:
                model = transformers.AutoModel.from_config(configuration)
            else:
                model = made(configuration)
    except Exception as error:
        raise ValueError(
            f"transformers cannot build model_type {kind!r} of {path} on the meta device: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}; pass module:function"
        ) from error
    return {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }, f"the parameters of transformers.{type(model).__name__}"
