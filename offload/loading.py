"""``OffloadModel.from_pretrained``: a model larger than memory, from its configuration and safetensors files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from offload.files.empty_weights import build_model, init_empty_weights
from offload.files.pretrained import KeyMap, Pretrained, tensors_of
from offload.files.transformers_names import names_of_transformers
from offload.streaming.recipes import give_values

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
    adapt: Callable[[nn.Module], nn.Module] | None,
) -> M:
    """What ``offloaded(bare, pretrained=...)`` makes; see :meth:`offload.OffloadModel.from_pretrained`."""
    bare = build_model(Path(path), model, dtype)
    if key_map is None:
        key_map = names_of_transformers(bare, [name for name, _, _ in Pretrained(path).headers()])
    weights = Pretrained(path, key_map=key_map, strict=strict)
    if adapt is not None:
        found = {tensor: stored.name for tensor, stored in weights.match({"": bare})[0].items()}
        with init_empty_weights():
            bare = adapt(bare)
        give_values(bare, other_than=found)
        names = {found[p]: name for name, p in tensors_of({"": bare}).items() if p in found}
        weights = Pretrained(path, key_map=names.get, strict=False)  # what adapt() adds is in no file
    made: Any = offloaded(bare, pretrained=weights)
    result: M = made
    return result
