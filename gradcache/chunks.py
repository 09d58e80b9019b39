"""Splits a model's input into chunks of ``chunk_size`` rows, and converts each chunk to call arguments.

The checks are strict, because rows lost in splitting would not be noticed: all tensors of an input must have the same
number of rows and all are split; members that every chunk receives whole are declared by name (``broadcast``). No input
is truncated to the shortest member.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradcache.nested import tensors_in
from pipe.microbatch import rows_of

__all__ = ["call_arguments", "check_rows_kept", "chunk_size_of", "split_input"]

Name = str | int


def call_arguments(chunk: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments with which a model is called for an input.

    ``x`` is called as ``model(x)``, a list as ``model(*x)``, a mapping as ``model(**x)``, a pair of a sequence and a
    mapping as ``model(*x[0], **x[1])``; any other tuple as ``model(*x)``.

    Raises:
        TypeError: for an input of another type.
    """
    if isinstance(chunk, Tensor):
        return (chunk,), {}
    if _is_arguments_and_keywords(chunk):
        return tuple(chunk[0]), dict(chunk[1])
    if isinstance(chunk, (list, tuple)):
        return tuple(chunk), {}
    if isinstance(chunk, Mapping):
        return (), dict(chunk)
    raise TypeError(
        f"expected a model input that is a tensor, list, mapping or (list, mapping), got {type(chunk).__name__}; "
        f"override model_call, or let process_fn turn each chunk into one of these"
    )


def chunk_size_of(size: Any) -> int | str:
    """A chunk size: ``"auto"``, or an integer of any library (NumPy's).

    Raises:
        ValueError: if it is neither, or less than 1.
    """
    if isinstance(size, str) and size == "auto":
        return size
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise ValueError(
            f"expected chunks of at least 1 row, as integers or 'auto', got chunk_sizes with {size!r} "
            f"({type(size).__name__}); pass rows of a chunk"
        )
    rows = operator.index(size)
    if rows < 1:
        raise ValueError(f"expected chunks of at least 1 row, got chunk_sizes with {rows}")
    return rows


def split_input(model_input: Any, chunk_size: int, broadcast: Collection[Name] = ()) -> list[Any]:
    """Splits every tensor of a model input into views of ``chunk_size`` rows; the last chunk may be shorter.

    Args:
        model_input: a tensor, list, mapping or (list, mapping); members may be nested.
        chunk_size: rows of a chunk.
        broadcast: keys of a mapping or positions of a list whose members are passed to every chunk whole.

    Scalars, ``None`` and 0-dimensional tensors have no rows and are passed to every chunk.

    Raises:
        ValueError: if members differ in their number of rows.
        TypeError: if a member cannot be split and is not declared in ``broadcast``.
    """
    rows: dict[str, int] = {}
    cut = _splitter(model_input, "input", broadcast, rows)
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"expected tensors with the same number of rows in a model input, got {rows}; no row is dropped: pass "
            f"equal rows, or declare members that every chunk receives whole with broadcast=(...)"
        )
    total = next(iter(rows.values()), 0)
    return [cut(start, start + chunk_size) for start in range(0, max(total, 1), chunk_size)]


def check_rows_kept(model_input: Any, chunks: Sequence[Any]) -> None:
    """Raises ValueError if a user's split function returned fewer rows than it was given (if rows can be counted)."""
    if not chunks:
        raise ValueError("expected split_input_fn to return at least one chunk, got none")
    try:
        given, returned = rows_of(tensors_in(model_input)), sum(rows_of(tensors_in(chunk)) for chunk in chunks)
    except ValueError:
        return  # members with different numbers of rows: only the user's function knows what a row is
    if returned < given:
        raise ValueError(
            f"expected split_input_fn to return all {given} rows, got {returned} in {len(chunks)} chunks; "
            f"return every row in exactly one chunk"
        )


def _is_arguments_and_keywords(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], (list, tuple))
        and isinstance(value[1], Mapping)
    )


def _splitter(value: Any, path: str, broadcast: Collection[Name], rows: dict[str, int]) -> Callable[[int, int], Any]:
    """A function from a range of rows to that part of ``value``. Writes the rows of each tensor to ``rows``."""
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return lambda start, stop: value
        rows[path] = value.size(0)
        return lambda start, stop: value[start:stop]
    if isinstance(value, Mapping):
        members = {key: _member(item, key, f"{path}[{key!r}]", broadcast, rows) for key, item in value.items()}
        return lambda start, stop: {key: part(start, stop) for key, part in members.items()}
    if isinstance(value, (list, tuple)):
        parts = [_member(item, k, f"{path}[{k}]", broadcast, rows) for k, item in enumerate(value)]
        make = list if isinstance(value, list) else tuple
        return lambda start, stop: make(part(start, stop) for part in parts)
    raise TypeError(
        f"expected tensors to split into chunks, got {type(value).__name__} ({path}); pass split_input_fn, or declare "
        f"the member with broadcast=(...) if every chunk is to receive it whole"
    )


def _member(
    item: Any, name: Name, path: str, broadcast: Collection[Name], rows: dict[str, int]
) -> Callable[[int, int], Any]:
    if name in broadcast or item is None or isinstance(item, (bool, int, float, complex, str)):
        return lambda start, stop: item
    if isinstance(item, (list, tuple)) and any(isinstance(x, (bool, int, float, str)) for x in item):
        # Ambiguous: one value per row, or one option for all rows. A wrong guess would repeat or lose rows.
        raise TypeError(
            f"expected tensors to split into chunks, got a {type(item).__name__} of plain values ({path}); pass a "
            f"tensor or split_input_fn, or declare it with broadcast=(...) if every chunk is to receive it whole"
        )
    return _splitter(item, path, broadcast, rows)
