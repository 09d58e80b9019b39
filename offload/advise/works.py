"""Finds the shards of a model, and what they compute and save, by running it on the meta device."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.advise.profile import Work, profile
from offload.advise.sources import Source, failing
from offload.arguments import layer_bytes
from offload.planning.partition import cut_within

__all__ = ["works_of"]


def works_of(
    source: Source,
    limit_bytes: int | None,
    rows: int,
    shape: Sequence[int],
    *,
    is_given: bool = False,
    param_dtype: torch.dtype | None = None,
) -> Mapping[nn.Module, Work]:
    """The shards that a model makes of its blocks within a limit, in the order of their calls, with their work.

    Args:
        rows, shape: of a micro-batch, and of one row: of the input if it ``is_given``, else of tokens.
        param_dtype: in which layers compute, if not in that of the parameters.

    Adds to the assumptions of ``source``. Raises ValueError for a model that does not run on such an input.
    """
    blocks = list(source.blocks.values())
    shards, model = blocks, source.model
    if source.merges:  # small neighbours share a shard
        ends = [0, *itertools.accumulate(cut_within(layer_bytes(blocks, param_dtype), limit_bytes))]
        shards = [nn.Sequential(*blocks[a:b]) for a, b in itertools.pairwise(ends)]
        model = nn.Sequential(*shards)
    stored = {p: p.dtype for p in model.parameters()}
    if param_dtype is not None:
        model.to(param_dtype)
    value = _input(shards[0], [rows, *shape], is_given=is_given)
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": False} if takes_cache else {}
    source.assumptions.append(f"the input is {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}")
    with failing(f"--input: the model does not run where {source.assumptions[-1]}, which --input or --positions say"):
        works = profile(shards, partial(model, value, **kwargs))
    for p, dtype in stored.items():
        p.data = p.data.to(dtype)
    # A block that is not called is stored all the same.
    return works | {shard: Work() for shard in shards if shard not in works}


def _input(begin: nn.Module, shape: Sequence[int], *, is_given: bool) -> Tensor:
    """Numbers of rows if the first shard begins with a table, else as many values as its first matrix or norm takes."""
    first = next(module for module in begin.modules() if any(p is not None for p in module._parameters.values()))
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        return torch.zeros(*shape, dtype=torch.long, device="meta")
    weight = next(first.parameters())
    return torch.empty(*shape, *([] if is_given else weight.shape[-1:]), dtype=weight.dtype, device="meta")
