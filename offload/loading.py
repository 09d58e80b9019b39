"""``OffloadModel.from_pretrained``: a model larger than memory, from its configuration and safetensors files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from offload.files.empty_weights import build_model
from offload.files.pretrained import KeyMap, Pretrained
from offload.files.transformers_names import names_of_transformers

__all__ = ["from_files"]

M = TypeVar("M", bound=nn.Module)


def from_files(
    offloaded: Callable[..., M],
    path: str | os.PathLike[str],
    *,
    model: Callable[[], nn.Module] | None,
    dtype: torch.dtype | None,
    key_map: KeyMap | None,
    strict: bool,
) -> M:
    """What ``offloaded(bare, pretrained=...)`` makes; see :meth:`offload.OffloadModel.from_pretrained`."""
    bare = build_model(Path(path), model, dtype)
    if key_map is None:
        key_map = names_of_transformers(bare, [name for name, _, _ in Pretrained(path).headers()])
    made: Any = offloaded(bare, pretrained=Pretrained(path, key_map=key_map, strict=strict))
    result: M = made
    return result
