"""Raises ``KeyboardInterrupt`` at a line of the engine, as Ctrl-C might, but at each line in turn."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import offload
import pipe

PACKAGES = tuple(str(Path(package.__file__).parent) + "/" for package in (offload, pipe))


class Line(NamedTuple):
    """The ``count``-th time that a line is about to run, counted from 1."""

    file: str
    number: int
    count: int

    def __str__(self) -> str:
        return f"{'/'.join(Path(self.file).parts[-3:])}:{self.number} #{self.count}"


def _trace(saw: Callable[[str, int], None]) -> Callable[[FrameType, str, Any], Any]:
    def inside(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            saw(frame.f_code.co_filename, frame.f_lineno)
        return inside

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        return inside if frame.f_code.co_filename.startswith(PACKAGES) else None

    return called


@contextlib.contextmanager
def _tracing(saw: Callable[[str, int], None]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(_trace(saw))
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(run: Callable[[], object]) -> list[Line]:
    """All lines of the engine that the main thread runs, in order."""
    counts: Counter[tuple[str, int]] = Counter()
    lines: list[Line] = []

    def saw(file: str, number: int) -> None:
        counts[file, number] += 1
        lines.append(Line(file, number, counts[file, number]))

    with _tracing(saw):
        run()
    return lines


def interrupted(run: Callable[[], object], line: Line) -> str:
    """Runs until a line, where ``KeyboardInterrupt`` is raised.

    Returns:
        What became of it: ``"raised"``, ``"swallowed"`` (by a finalizer, where Python ignores all exceptions) or
        ``"not reached"``.
    """
    count = 0
    fired = False

    def saw(file: str, number: int) -> None:
        nonlocal count, fired
        if (file, number) == line[:2]:
            count += 1
            if count == line.count:
                fired = True
                raise KeyboardInterrupt(str(line))

    def ignored(error: Any) -> None:
        if not isinstance(error.exc_value, KeyboardInterrupt):
            before(error)

    before, sys.unraisablehook = sys.unraisablehook, ignored
    try:
        with _tracing(saw):
            run()
    except KeyboardInterrupt:
        return "raised"
    finally:
        sys.unraisablehook = before
    return "swallowed" if fired else "not reached"
