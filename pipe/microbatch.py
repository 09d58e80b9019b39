"""Splits a batch into micro-batches along dimension 0, and concatenates their outputs.

Every tensor with a dimension 0 is split; scalars, 0-dimensional tensors, other objects and tensors in :class:`NoChunk`
are passed to every micro-batch unchanged. Tensors with different numbers of rows are an error: rows are never dropped
silently. A single micro-batch is the batch itself: nothing is split, and sizes are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipe.nested import flatten, holder_in, unflatten
from pipe.stream import to_device

__all__ = [
    "NoChunk",
    "RowsOfOutputs",
    "check",
    "check_rows",
    "gather_nested",
    "refuse_holder",
    "rows_of",
    "rows_of_micro_batches",
    "split_nested",
]


class NoChunk:
    """Marks a tensor that every micro-batch receives whole, such as an attention mask that all rows share::

        pipe((tokens, NoChunk(mask)))

    Source: ``torch.distributed.pipeline.sync.NoChunk``.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a tensor to keep whole, got {type(tensor).__name__}; wrap each tensor by itself")
        self.tensor = tensor


def _is_split(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def rows_of(value: Any) -> int:
    """Size of dimension 0 of all tensors of a nested value, which must be equal; 1 if no tensor has a dimension 0."""
    sizes = {leaf.size(0) for leaf in flatten(value)[0] if _is_split(leaf)}
    if len(sizes) > 1:
        raise ValueError(
            f"expected tensors with the same number of rows to split into micro-batches, got sizes of dimension 0 "
            f"{sorted(sizes)}; pass tensors of equal dimension 0, or NoChunk(tensor) for one that all rows share"
        )
    return sizes.pop() if sizes else 1


def rows_of_micro_batches(value: Any, chunks: int) -> list[int]:
    """Rows of each micro-batch that :func:`split_nested` makes of ``value``.

    The tensors of a single micro-batch may differ in dimension 0; its rows are the largest one.
    """
    if chunks == 1:
        return [max([leaf.size(0) for leaf in flatten(value)[0] if _is_split(leaf)], default=1)]
    rows = rows_of(value)
    count = min(chunks, max(rows, 1))
    return [rows // count + (i < rows % count) for i in range(count)]


def split_nested(value: Any, chunks: int, device: torch.device | None = None) -> list[Any]:
    """Cuts a nested value, first moved to ``device``, into at most ``chunks`` micro-batches of nearly equal size.

    They are views, never copies. With fewer rows than ``chunks`` there are as many micro-batches as rows. The first
    ones are the larger ones.
    """
    if chunks < 1:
        raise ValueError(f"expected at least 1 micro-batch, got chunks={chunks}")
    count = 1 if chunks == 1 else len(rows_of_micro_batches(value, chunks))
    leaves, spec = flatten(value)
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        cut = count > 1 and _is_split(leaf)
        if cut and leaf.layout is not torch.strided:
            raise TypeError(
                f"expected dense tensors to split into {count} micro-batches, got one of layout {leaf.layout}; pass "
                f"NoChunk(tensor) if all rows share it, or use a single micro-batch"
            )
        whole = leaf.tensor if isinstance(leaf, NoChunk) else leaf
        if device is not None and isinstance(whole, Tensor):
            whole = to_device(whole, device)
        columns.append(torch.tensor_split(whole, count) if cut else (whole,) * count)
    return [unflatten([column[i] for column in columns], spec) for i in range(count)]


def gather_nested(values: list[Any], rows: RowsOfOutputs | None = None) -> Any:
    """Concatenates the outputs of micro-batches along dimension 0: the inverse of :func:`split_nested`.

    Leaves that are not tensors must be equal in all micro-batches. With ``rows``, outputs are checked to have rows.
    """
    if len(values) == 1:
        return values[0]
    flat = [flatten(value) for value in values]
    spec = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != spec:
            raise ValueError(f"micro-batch {i} returned another structure than micro-batch 0: {other}, not {spec}")
    gathered: list[Any] = []
    for k, column in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
        first = column[0]
        if not isinstance(first, Tensor):
            others = [leaf for leaf in column if leaf is not first]
            if others:
                refuse_holder(f"output leaf {k} of {len(values)} micro-batches", first)
            if any(leaf != first for leaf in others):
                raise ValueError(f"output leaf {k} is a {type(first).__name__} that differs between micro-batches")
            gathered.append(first)
        elif rows is not None and rows.share(column):
            gathered.append(first)
        elif first.dim() == 0:
            raise ValueError(
                f"output leaf {k} is 0-dimensional and cannot be concatenated over {len(values)} micro-batches; "
                f"return one value per row, or use a single micro-batch"
            )
        elif first.layout is not torch.strided:
            raise ValueError(
                f"output leaf {k} has the layout {first.layout} and cannot be concatenated over {len(values)} "
                f"micro-batches; return a dense tensor, or use a single micro-batch"
            )
        else:
            gathered.append(torch.cat(column, 0 if rows is None else rows.dimension(k, column)))
    return unflatten(gathered, spec)


def refuse_holder(where: str, value: Any, *, needs_grad: bool = False) -> None:
    """Refuses an object with tensors (that need a gradient) as attributes, such as a dataclass, which are not seen."""
    holder = holder_in(value, needs_grad=needs_grad)
    if holder is not None:
        raise TypeError(
            f"expected tensors in tuples, lists, dicts or other pytree nodes as {where}, got a "
            f"{type(holder).__name__}, whose tensors cannot be seen; return a tuple or a dict, or make the class a "
            f"node (torch.export.register_dataclass, torch.utils._pytree.register_pytree_node)"
        )


@dataclass
class RowsOfOutputs:
    """Finds the dimension of each output that has the rows, given the rows of each micro-batch.

    An output may have a multiple of the rows (flattened tokens) or a number that depends on values (selected tokens).
    One that has neither, such as the hidden state of an LSTM (layers, rows, width) or a sum over rows, is refused. A
    tensor that is the same in all micro-batches is one output.

    Attributes:
        layers: those that computed the outputs.
        rows: of each micro-batch.
        selected: the leaves whose number depended on values so far; more are added.
    """

    layers: nn.Module
    rows: Sequence[int]
    selected: set[int] = field(default_factory=set)

    def share(self, column: Sequence[Tensor]) -> bool:
        """Whether all micro-batches returned one tensor, such as a parameter or a mask that all rows share."""
        first = column[0]
        if not first.numel() or any(leaf.layout is not torch.strided for leaf in column):
            return False
        if first.dim() and (first.stride(0) == 0 or first.size(0) == self.rows[0] == 1):
            return False  # expanded to the rows
        place = (first.device, first.data_ptr(), first.shape, first.stride())
        return all((leaf.device, leaf.data_ptr(), leaf.shape, leaf.stride()) == place for leaf in column)

    def dimension(self, k: int, column: Sequence[Tensor]) -> int:
        """The dimension along which leaf ``k`` is concatenated.

        Raises:
            ValueError: if it has no rows, or if dimensions 0 and 1 cannot be told apart.
        """
        last = list(self.layers.children())[-1:]
        if last and isinstance(last[0], nn.RNNBase) and column[0].dim() == 3:
            return 1 if k > 0 or not last[0].batch_first else 0
        sizes = [leaf.size(0) for leaf in column]
        second = all(leaf.dim() > 1 and leaf.size(1) == r for leaf, r in zip(column, self.rows, strict=True))
        multiple = sizes[0] // self.rows[0]
        got = f"output leaf {k} of shape {tuple(column[0].shape)} for a micro-batch of {self.rows[0]} rows"
        if sizes == [multiple * r for r in self.rows]:
            if multiple == 1 and second and self._is_hidden(column[0]):
                raise ValueError(
                    f"expected outputs whose rows can be told, got {got}, which may be the hidden state of a recurrent "
                    f"layer; choose chunks such that a micro-batch has another number of rows"
                )
            # (rows x tokens, classes) is as likely with as many classes as rows; (time, rows) holds integers.
            if multiple <= 1 or not second or (column[0].dim() == 2 and column[0].is_floating_point()):
                return 0
        elif len(set(sizes)) > 1:
            self.selected.add(k)
            return 0
        elif k in self.selected and not second:
            return 0
        raise ValueError(
            f"expected outputs whose dimension 0 is the rows, got {got}; "
            + ("return it with rows first, .transpose(0, 1)" if second else "return one entry for each row")
            + ", or use a single micro-batch"
        )

    def _is_hidden(self, leaf: Tensor) -> bool:
        return leaf.dim() == 3 and any(
            leaf.size(0) == module.num_layers * (1 + module.bidirectional)
            and leaf.size(2) in (module.hidden_size, module.proj_size)
            for module in self.layers.modules()
            if isinstance(module, nn.RNNBase)
        )


def check_rows(values: Sequence[Any], call: Any) -> None:
    """Refuses outputs of micro-batches of ``call`` whose dimension 1 is the rows and dimension 0 is not."""
    if len(values) > 1:
        columns = list(zip(*(flatten(value)[0] for value in values), strict=False))
        # Without a record of earlier calls, any other number may be one that depends on values.
        rows = RowsOfOutputs(nn.Module(), rows_of_micro_batches(call, len(values)), set(range(len(columns))))
        for k, column in enumerate(columns):
            if all(_is_split(leaf) for leaf in column):
                rows.dimension(k, column)


def check(input: Any) -> None:
    """Refuses a mini-batch without a tensor."""
    if not isinstance(input, Tensor) and not any(isinstance(leaf, (Tensor, NoChunk)) for leaf in flatten(input)[0]):
        raise TypeError(
            f"expected a tensor or a nested value with tensors, got {type(input).__name__} without any; "
            f"pass the mini-batch as a tensor, or as a tuple or another pytree node of tensors"
        )
