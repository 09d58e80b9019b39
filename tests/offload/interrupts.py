"""Raises ``KeyboardInterrupt`` at a line of the engine, as Ctrl-C might, but at each line in turn.

With ``contexts`` also at the lines of Python's and torch's own contexts that the engine enters and leaves: an interrupt
there keeps the ``with`` statement from leaving the context, or is raised before it was left.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import gradcache
import offload
import pipe
from pipe import freed
from pipe.recompute.thread_state import holds_generators

PACKAGES = tuple(str(Path(package.__file__).parent) + "/" for package in (offload, pipe, gradcache))
CONTEXTS = (contextlib.__file__, torch.autograd.grad_mode.__file__, torch.autograd.graph.__file__)


class Line(NamedTuple):
    """The ``count``-th time that a line is about to run, counted from 1. ``file`` of a context: also who entered it."""

    file: str
    number: int
    count: int

    def __str__(self) -> str:
        return f"{'/'.join(Path(self.file).parts[-3:])}:{self.number} #{self.count}"


def _trace(
    saw: Callable[[str, int], None], contexts: bool, wanted: Line | None
) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that tells of the lines of the engine; of ``wanted`` alone if there is one.

    Python calls it for each function that anything calls, and what it returns for each line of that function. Functions
    that cannot run the wanted line are left out, and most are told by the name of their file: others run untraced.
    """
    files: tuple[str, ...] = () if wanted is None else CONTEXTS if " in " in wanted.file else (wanted.file,)

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if files and code.co_filename not in files:
            return None
        name = _name(frame, contexts)
        if name is None or (wanted is not None and (name != wanted.file or wanted.number not in _numbers(code))):
            return None

        def inside(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                saw(name, frame.f_lineno)
            return inside

        return inside

    return called


#: By the identity of a code object, which lives as long as it is here: that object, and the numbers of its lines.
_known: dict[int, tuple[CodeType, frozenset[int | None]]] = {}


def _numbers(code: CodeType) -> frozenset[int | None]:
    found = _known.get(id(code))
    if found is None:
        found = _known[id(code)] = code, frozenset(number for _, _, number in code.co_lines())
    return found[1]


def _name(frame: FrameType, contexts: bool) -> str | None:
    file = frame.f_code.co_filename
    if file.startswith(PACKAGES):
        return file
    at_context = contexts and file in CONTEXTS and frame.f_code.co_name in ("__enter__", "__exit__")
    caller = frame.f_back if at_context else None
    while caller is not None and caller.f_code.co_filename in CONTEXTS:
        caller = caller.f_back
    if caller is None or not caller.f_code.co_filename.startswith(PACKAGES):
        return None
    return f"{Path(file).name} in {caller.f_code.co_filename}:{caller.f_lineno}"


@contextlib.contextmanager
def _tracing(saw: Callable[[str, int], None], contexts: bool, wanted: Line | None = None) -> Iterator[None]:
    # Python 3.11 may free a trace function that nothing else holds while it calls it.
    before, trace = sys.gettrace(), _trace(saw, contexts, wanted)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(run: Callable[[], object], *, contexts: bool = False) -> list[Line]:
    """All lines of the engine that the main thread runs, in order."""
    counts: Counter[tuple[str, int]] = Counter()
    lines: list[Line] = []

    def saw(file: str, number: int) -> None:
        counts[file, number] += 1
        lines.append(Line(file, number, counts[file, number]))

    with _tracing(saw, contexts):
        run()
    return lines


def first_lines(run: Callable[[], object]) -> list[Line]:
    """Every other line of the sources that runs, its first time."""
    return list({line[:2]: line for line in reversed(lines_of(run))}.values())[::2]


def interrupted(run: Callable[[], object], line: Line, *, contexts: bool = False) -> str:
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
    # A finalizer interrupts again a little later, which may be after the run.
    again = vars(freed)["start_new_thread"]
    setattr(freed, "start_new_thread", lambda *_: 0)  # noqa: B010
    try:
        with _tracing(saw, contexts, line):
            run()
    except KeyboardInterrupt:
        assert not holds_generators(), f"other threads wait for ever after an interrupt at {line}"
        return "raised"
    finally:
        sys.unraisablehook = before
        setattr(freed, "start_new_thread", again)  # noqa: B010
    return "swallowed" if fired else "not reached"
