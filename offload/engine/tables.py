"""Adds gradients of embedding tables in place, row by row, instead of as large as the table.

Autograd makes the gradient of a table as large as the table, however few rows a chunk looked up, and adds it to that of
earlier chunks: two of them exist for a moment, one nearly all zeros. For a large vocabulary that is the peak of a step
in chunks. Here the rows that a chunk looked up are added to the existing gradient.

Guarantees
    * The same bits: the gradients of one chunk for a row are summed first, in the order of the lookups. Only where a
      chunk uses a table more than once, they are added in parts.
    * Tables whose gradient has hooks, is sparse or scaled by frequency get it from autograd, as do tables on an
      accelerator, where rows would be added in no fixed order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipe.recompute.module_hooks import EngineHook

__all__ = ["rows_in_place", "tables_of"]


def tables_of(module: nn.Module) -> list[nn.Embedding]:
    """The embedding tables of a module."""
    return [each for each in module.modules() if isinstance(each, nn.Embedding)]


@contextlib.contextmanager
def rows_in_place(tables: Sequence[nn.Embedding]) -> Iterator[None]:
    """A context whose lookups add to gradients of ``tables`` in place, whenever their backward runs."""
    handles = [table.register_forward_hook(EngineHook(_looked_up)) for table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _looked_up(table: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    assert isinstance(table, nn.Embedding)
    node = output.grad_fn if isinstance(output, Tensor) else None
    if node is None or node.name() != "EmbeddingBackward0" or not args:
        return
    # The gradient of a computed table (a parametrization) continues into the graph that computed it.
    weight, (accumulate, _) = table.weight, node.next_functions[0]
    if getattr(accumulate, "variable", None) is not weight:
        return
    if table.sparse or table.scale_grad_by_freq or weight.device.type != "cpu":
        return
    indices, padding = args[0], table.padding_idx

    def add(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
        gradient, total = gradients[0], weight.grad
        if gradient is None or not _takes_rows(weight, total):
            return None
        assert total is not None
        with torch.no_grad():
            _add_rows(total, indices.reshape(-1), gradient.reshape(-1, gradient.size(-1)), padding)
        return (None,)  # autograd adds nothing more

    node.register_prehook(add)


def _takes_rows(weight: Tensor, total: Tensor | None) -> bool:
    """Whether there is a dense gradient of the same dtype, without hooks."""
    if type(total) is not Tensor or total.layout is not torch.strided or total.dtype != weight.dtype:
        return False
    return not weight._backward_hooks and not getattr(weight, "_post_accumulate_grad_hooks", None)


def _add_rows(total: Tensor, indices: Tensor, rows: Tensor, padding: int | None) -> None:
    unique, inverse = indices.unique(return_inverse=True)
    sums = rows.new_zeros(len(unique), rows.size(1)).index_add_(0, inverse, rows)
    if padding is not None:
        kept = unique != padding
        unique, sums = unique[kept], sums[kept]
    total.index_add_(0, unique, sums)
