"""Joins small chunks of a batch into larger micro-batches, as far as the memory for activations allows.

A caller chooses chunks so small that a whole model's activations fit. Here only one shard's activations exist at a
time, so several chunks fit at once, and larger matrix products are faster. Outputs and gradients are split again, so
the caller sees its own chunks only.

Chunks are joined only if their tensors have equal dtypes and trailing shapes and all other values are equal, and never
where a layer is known to look across rows: batch normalisation in training.

Products of more rows round differently. So which chunks run together follows from shapes and from bytes that are given
or counted, never from times or from the memory of the process: it is the same in every step and process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from pipe.microbatch import gather_nested
from pipe.nested import flatten, tensors_in, unflatten
from pipe.torch_private.modules import BatchNorm

__all__ = [
    "by_chunk",
    "kind_of",
    "looks_across_rows",
    "rows_in",
    "runs_together",
    "split_output",
]


def looks_across_rows(layers: Sequence[nn.Module]) -> bool:
    """Whether a layer is known to compute a row from other rows, too."""
    return any(
        isinstance(module, BatchNorm) and (module.training or not module.track_running_stats)
        for layer in layers
        for module in layer.modules()
    )


def rows_in(chunk: Any) -> int | None:
    """Rows of a chunk's tensors if all have the same number; else None."""
    return _rows_of(tensors_in(chunk))


def _rows_of(leaves: Sequence[Any]) -> int | None:
    sizes = {x.size(0) if x.dim() else -1 for x in leaves if isinstance(x, Tensor)}
    return sizes.pop() if len(sizes) == 1 and -1 not in sizes else None


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.device == b.device and a.shape[1:] == b.shape[1:] and not a.is_sparse
    return type(a) is type(b) and not isinstance(a, Tensor) and (a is b or bool(a == b))


def runs_together(chunks: Sequence[Any], most_rows: Callable[[Any], int]) -> list[list[int]]:
    """Adjacent chunks that may be joined and run together, as lists of their indices.

    A single chunk may have more rows than others together; one whose tensors differ in rows is not joined.
    ``most_rows``: of the first of several chunks that are alike, the most rows that may run together; 0: none do.
    """
    runs: list[list[int]] = []
    before: tuple[Any, Any] | None = None
    first, most, rows = 0, -1, 0  # the first of chunks that are alike, of which ``most`` is asked
    for i, chunk in enumerate(chunks):
        leaves, spec = flatten(chunk)
        count = _rows_of(leaves)
        if before is None or count is None or spec != before[1] or not all(map(_alike, leaves, before[0])):
            first, most = i, -1
        elif most < 0:
            most = most_rows(chunks[first])
        if i > first and rows + (count or 0) <= most:
            runs[-1].append(i)
            rows += count or 0
        else:
            runs.append([i])
            rows = count or 0
        before = None if count is None else (leaves, spec)
    return runs


def kind_of(chunk: Any) -> tuple[Any, ...]:
    """What chunks have in common that may be measured by one of them; its ``repr`` is a key."""
    leaves, spec = flatten(chunk)
    kinds = [(x.dtype, x.device, x.dim(), x.shape[1:], x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    return spec, kinds, rows_in(chunk) is None


def split_output(output: Any, rows: Sequence[int]) -> list[Any]:
    """The outputs of the chunks in a group."""
    if len(rows) == 1:
        return [output]
    leaves, spec = flatten(output)
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.size(0) != sum(rows)):
            raise ValueError(
                f"expected outputs with one row for each of the {sum(rows)} rows of {len(rows)} chunks that ran "
                f"together, got shape {tuple(leaf.shape)}; pass MemoryPolicy(join_chunks=False) to keep chunks apart"
            )
        columns.append(leaf.split(list(rows)) if isinstance(leaf, Tensor) else [leaf] * len(rows))
    return [unflatten(list(row), spec) for row in zip(*columns, strict=True)]


def by_chunk(output_fn: Callable[[Any], Any], rows: Sequence[int]) -> Callable[[Any], Any]:
    """A function that applies ``output_fn`` to the output of each chunk in a group."""
    if len(rows) == 1:
        return output_fn
    return lambda output: gather_nested([output_fn(piece) for piece in split_output(output, rows)])
