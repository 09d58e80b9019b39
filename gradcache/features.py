"""Splits tokenized features into mini-batches, and trims the padding of each to its own longest row.

A batch is padded to its longest row, so a mini-batch of short rows would be encoded with needless padding. Columns at
the end that are padding in every row of a mini-batch are dropped; padding on the left is kept, since positions are
counted from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["FeatureSplitter"]


class FeatureSplitter:
    """``split_input_fn`` for models that take a dict of features as their one argument, ``([features], {})``.

    Args:
        tokens: the maximum number of tokens of a mini-batch, by its attention mask; a longer row is a mini-batch of its
            own. None: split by rows.
    """

    def __init__(self, tokens: int | None = None) -> None:
        self._tokens = tokens

    def __call__(self, model_input: Any, rows: int) -> list[Any]:
        """The mini-batches; raises ValueError without a number of rows, or without a mask to count tokens by."""
        features: Mapping[str, Any] = model_input[0][0]
        total = _texts_in(features)
        starts = range(0, max(total, 1), rows) if self._tokens is None else self._starts(features)
        stops = [*starts[1:], max(total, 1)]
        return [([_cut(features, start, stop)], {}) for start, stop in zip(starts, stops, strict=True)]

    def _starts(self, features: Mapping[str, Any]) -> list[int]:
        mask = features.get("attention_mask")
        if not isinstance(mask, Tensor):
            raise ValueError("expected an attention_mask to count tokens by, got none; pass mini_batch_size instead")
        assert self._tokens is not None
        starts, held = [0], 0
        for i, tokens in enumerate(mask.sum(dim=1).tolist()):
            if i > starts[-1] and held + tokens > self._tokens:
                starts.append(i)
                held = 0
            held += int(tokens)
        return starts


def _texts_in(features: Mapping[str, Any]) -> int:
    """Number of rows of all members; raises ValueError if they differ in it, or rows are flattened without padding."""
    rows = {name: value.size(0) for name, value in features.items() if isinstance(value, Tensor) and value.dim()}
    flat = {"cu_seq_lens_q", "offsets"} & rows.keys()
    if len(set(rows.values())) > 1 or flat:
        raise ValueError(
            f"expected features with one row for each text, got rows {rows}; pad instead of flattening, and encode "
            f"images as (texts, ...), or use the loss without a cache"
        )
    return next(iter(rows.values()), 0)


def _cut(features: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    mask = features.get("attention_mask")
    width = used = None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        width = mask.size(1)
        columns = mask[start:stop].any(dim=0).nonzero()
        used = int(columns[-1]) + 1 if len(columns) else width
    cut: dict[str, Any] = {}
    for name, value in features.items():
        if isinstance(value, Tensor) and value.dim():
            value = value[start:stop]
            if used is not None and value.dim() > 1 and value.size(1) == width:
                value = value[:, :used]
        cut[name] = value
    return cut
