"""Finds the work of each shard: by running layers on the meta device where they are there, else by formula."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from offload.advise.blocks import width_of
from offload.advise.formula import FORMULA, work_by_formula
from offload.advise.outline import Outline
from offload.advise.prediction import Shards
from offload.advise.profile import profile
from offload.advise.work import Work, joined

__all__ = ["widest_product", "works_of"]


def works_of(
    outline: Outline, shards: Shards, *, rows: int, positions: int, row_shape: Sequence[int] | None = None
) -> list[Work]:
    """The work of each shard on ``rows`` x ``positions`` tokens; adds to the assumptions of ``outline``.

    ``row_shape``: of one row of a floating-point input, where it is known. Raises ValueError if layers do not take it,
    or if neither shapes nor the formula tell their work.
    """
    if row_shape is not None and outline.modules is None:
        raise ValueError("--input: expected module:function as WHAT, got one whose layers cannot be run")
    if outline.modules is not None:
        try:
            return _by_running(outline, shards, rows, positions, row_shape)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if row_shape is not None:
                shape = tuple(row_shape)
                raise ValueError(f"--input: the layers do not take rows of shape {shape}: {reason}") from error
            outline.assumptions.append(
                f"the layers do not run on {rows} x {positions} tokens on the meta device ({reason}); --positions is "
                f"the length of a row, --input the shape of a batch"
            )
    return _by_formula(outline, shards, rows, positions)


def _by_running(
    outline: Outline, shards: Shards, rows: int, positions: int, row_shape: Sequence[int] | None
) -> list[Work]:
    assert outline.modules is not None
    ends = [0, *itertools.accumulate(shards.cuts)]
    groups = [outline.modules[a:b] for a, b in itertools.pairwise(ends)]
    dtype = shards.param_dtype
    if dtype is not None:
        for parameter in dict.fromkeys(p for module in outline.modules for p in module.parameters()):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    errors: list[Exception] = []
    candidates = _inputs(outline.modules[0], rows, positions, dtype)
    if row_shape is not None:
        kind = dtype or next(p.dtype for module in outline.modules for p in module.parameters())
        candidates = iter([torch.empty(rows, *row_shape, dtype=kind, device="meta")])
    for value in candidates:
        try:
            works = profile(groups, value)
        except Exception as error:
            errors.append(error)
            continue
        what = "numbers of rows" if not value.is_floating_point() else str(value.dtype).removeprefix("torch.")
        outline.assumptions.append(f"the input is {what} of shape {tuple(value.shape)}")
        return works
    raise errors[0] if errors else ValueError("the first layer does not say which input it takes")


def _inputs(first: nn.Module, rows: int, positions: int, dtype: torch.dtype | None) -> Iterator[Tensor]:
    """Inputs that the first module with parameters may take, on the meta device."""
    for module in first.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield torch.zeros(rows, positions, dtype=torch.long, device="meta")
            return
        width = _width_of_module(module)
        if width is not None:
            kind = dtype or next(p.dtype for p in module.parameters())
            yield torch.empty(rows, positions, width, dtype=kind, device="meta")
            yield torch.empty(rows * positions, width, dtype=kind, device="meta")
            return


def _width_of_module(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.in_features
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return int(module.normalized_shape[-1])
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    return None


def _by_formula(outline: Outline, shards: Shards, rows: int, positions: int) -> list[Work]:
    width = outline.width or width_of(outline.layers)
    if width is None:
        raise ValueError("WHAT: expected matrices among the parameters, got none; pass module:function")
    outline.assumptions.append(f"{FORMULA}; width {width}")
    if any("expert" in p.name for layer in outline.layers for p in layer.own):
        outline.assumptions.append("every expert computes for every token")
    last = outline.layers[-1]
    works = []
    for layers in shards.layers:
        each = [
            work_by_formula(
                layer, rows=rows, positions=positions, width=width, dtype=shards.param_dtype, last=layer is last
            )
            for layer in layers
        ]
        works.append(joined(each))
    return works


def widest_product(outline: Outline) -> int:
    """The width of the products that take most of the time."""
    matrices = [p for layer in outline.layers if not layer.looks_up for p in layer.parameters if len(p.shape) > 1]
    totals: dict[int, int] = {}
    for p in matrices:
        width = min(p.shape[0], p.elements // max(1, p.shape[0]))
        totals[width] = totals.get(width, 0) + p.elements
    return max(totals, key=lambda width: totals[width], default=1024)
