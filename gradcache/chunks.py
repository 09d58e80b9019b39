"""Splits a model's input into chunks of ``chunk_size`` rows, and converts each chunk to call arguments.

The checks are strict, because rows lost in splitting would not be noticed: all tensors of an input must have the same
number of rows and all are split; members that every chunk receives whole are declared by name (``broadcast``). No input
is truncated to the shortest member. Of a list without ``process_fn`` the members are the model's positional arguments,
as in the package ``GradCache``; with ``process_fn``, which makes the arguments, they are rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipe.nested import tensors_in

__all__ = ["call_arguments", "check_rows_kept", "chunk_size_of", "rows_in_input", "split_input"]

Name = str | int
Part = Callable[[int, int], Any]


def call_arguments(chunk: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments with which a model is called for an input.

    ``x`` is called as ``model(x)``, a list as ``model(*x)``, a mapping as ``model(**x)``, a pair of a sequence and a
    mapping as ``model(*x[0], **x[1])``; any other tuple as ``model(*x)``. A list or tuple of strings, or of mappings
    without tensors, is rows, and called as ``model(x)``.

    Raises:
        TypeError: for an input of another type.
    """
    if isinstance(chunk, Tensor) or _can_only_be_rows(chunk):
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


def split_input(
    model_input: Any, chunk_size: int, broadcast: Collection[Name] = (), *, lists_are_rows: bool = False
) -> list[Any]:
    """Splits every tensor of a model input into views of ``chunk_size`` rows; the last chunk may be shorter.

    Args:
        model_input: a tensor, list, mapping or (list, mapping); members may be nested.
        chunk_size: rows of a chunk.
        broadcast: keys of a mapping or positions of a list whose members are passed to every chunk whole.
        lists_are_rows: split lists between their members, which may be of any type. Otherwise (and if ``broadcast`` has
            positions) so are only lists and tuples of strings, and of mappings without tensors.

    Scalars, ``None`` and 0-dimensional tensors have no rows and are passed to every chunk.

    Raises:
        ValueError: if members differ in their number of rows.
        TypeError: if a member cannot be split and is not declared in ``broadcast``.
    """
    splitter = _Splitter(broadcast, lists_are_rows)
    cut, rows = splitter.of_input(model_input), splitter.rows
    if len(set(rows.values())) > 1:
        hint = "; with process_fn, the members of a list are rows" if isinstance(model_input, list) else ""
        raise ValueError(
            f"expected tensors with the same number of rows in a model input, got {rows}; no row is dropped: pass "
            f"equal rows, or split_input_fn, which knows what belongs to a row (images of several sizes, packed "
            f"sequences), or declare members that every chunk receives whole with broadcast=(...){hint}"
        )
    total = next(iter(rows.values()), 0)
    return [cut(start, start + chunk_size) for start in range(0, max(total, 1), chunk_size)]


def rows_in_input(model_input: Any, broadcast: Collection[Name] = (), *, lists_are_rows: bool = False) -> int | None:
    """Rows of a model input or a chunk, as :func:`split_input` counts them; None where members differ, or have none."""
    splitter = _Splitter(broadcast, lists_are_rows)
    try:
        splitter.of_input(model_input)
        counts = set(splitter.rows.values())
    except TypeError:  # a member that only the user's own function can split
        counts = {tensor.size(0) for tensor in tensors_in(model_input) if tensor.dim()}
    return counts.pop() if len(counts) == 1 else None


def check_rows_kept(model_input: Any, chunks: Sequence[Any], *, lists_are_rows: bool = False) -> None:
    """Raises ValueError if a user's split function returned fewer rows than it was given (if rows can be counted)."""
    if not chunks:
        raise ValueError("expected split_input_fn to return at least one chunk, got none")
    if isinstance(model_input, list) and not all(isinstance(chunk, list) for chunk in chunks):
        return  # made into something else, whose rows need not be members of the list
    given = rows_in_input(model_input, lists_are_rows=lists_are_rows)
    parts = [rows_in_input(chunk, lists_are_rows=lists_are_rows) for chunk in chunks]
    # Where members have different numbers of rows, only the user's function knows what a row is.
    returned = sum(rows for rows in parts if rows is not None)
    if given is not None and None not in parts and returned < given:
        raise ValueError(
            f"expected split_input_fn to return all {given} rows, got {returned} in {len(chunks)} chunks; "
            f"return every row in exactly one chunk"
        )


def _can_only_be_rows(value: Any) -> bool:
    """Whether a list or tuple holds strings, or mappings without tensors, alone."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(x, str) or (isinstance(x, Mapping) and not tensors_in(x)) for x in value)


def _is_arguments_and_keywords(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and isinstance(value[0], (list, tuple)) and isinstance(value[1], Mapping)


class _Splitter:
    """Makes functions from a range of rows to that part of a value; see :func:`split_input` for the arguments."""

    def __init__(self, broadcast: Collection[Name], lists_are_rows: bool) -> None:
        self._broadcast = broadcast
        self._lists_are_rows = lists_are_rows and not any(isinstance(name, int) for name in broadcast)
        #: Of each tensor or list that is split, by its path.
        self.rows: dict[str, int] = {}

    def of_input(self, value: Any) -> Part:
        """The function for a model input."""
        return self._sliced(value, len(value), "input") if _can_only_be_rows(value) else self._of(value, "input")

    def _sliced(self, value: Any, rows: int, path: str) -> Part:
        self.rows[path] = rows
        return lambda start, stop: value[start:stop]

    def _of(self, value: Any, path: str) -> Part:
        if isinstance(value, Tensor):
            return self._sliced(value, value.size(0), path) if value.dim() else lambda start, stop: value
        if isinstance(value, Mapping):
            members = {key: self._of_member(item, key, path) for key, item in value.items()}
            return lambda start, stop: {key: part(start, stop) for key, part in members.items()}
        if _is_arguments_and_keywords(value):
            args, kwargs = self._of_members(tuple(value[0]), f"{path}[0]"), self._of(value[1], f"{path}[1]")
            return lambda start, stop: (args(start, stop), kwargs(start, stop))
        if self._are_rows(value):
            return self._sliced(value, len(value), path)
        if isinstance(value, (list, tuple)):
            return self._of_members(value, path)
        raise TypeError(
            f"expected tensors to split into chunks, got {type(value).__name__} ({path}); pass split_input_fn, or "
            f"declare the member with broadcast=(...) if every chunk is to receive it whole"
        )

    def _of_members(self, value: list[Any] | tuple[Any, ...], path: str) -> Part:
        parts = [self._of_member(item, k, path) for k, item in enumerate(value)]
        make = list if isinstance(value, list) else tuple
        return lambda start, stop: make(part(start, stop) for part in parts)

    def _of_member(self, item: Any, name: Name, of: str) -> Part:
        if name in self._broadcast or item is None or isinstance(item, (bool, int, float, complex, str)):
            return lambda start, stop: item
        is_list = isinstance(item, (list, tuple)) and not self._are_rows(item)
        if is_list and any(isinstance(x, (bool, int, float, str)) for x in item):
            # Ambiguous: one value per row, or one option for all rows. A wrong guess would repeat or lose rows.
            raise TypeError(
                f"expected tensors to split into chunks, got a {type(item).__name__} of plain values "
                f"({of}[{name!r}]); pass a tensor or split_input_fn, or declare it with broadcast=(...) if every chunk "
                f"is to receive it whole"
            )
        return self._of(item, f"{of}[{name!r}]")

    def _are_rows(self, value: Any) -> bool:
        return self._lists_are_rows and (isinstance(value, list) or _can_only_be_rows(value))
