"""What is known to fail and not mended yet: left out of the random draw, by name, and expected to fail in the corpus.

The aim is an empty list. An entry names claims of :mod:`tests.offload.fuzz.corpus`, whose programs are expected to
fail, strictly, so that an entry whose fault is mended has to go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.offload.fuzz.program import Setup, Statement

__all__ = ["KNOWN", "Known", "excluded"]


@dataclass(frozen=True)
class Known:
    """A fault, the claims of the corpus that it breaks, and what of the draw would run into it."""

    name: str
    claims: tuple[str, ...]
    #: Given a setup, and None or one of its statements.
    runs_into: Callable[[Setup, Statement | None], bool]
    #: Whether that is so only while an output waits for its backward.
    waiting: bool = False
    #: If given, that is so only behind such a statement.
    behind: Callable[[Statement], bool] | None = None
    #: Whether it ends the interpreter, so that its claims cannot even be tried.
    crashes: bool = False


KNOWN: list[Known] = []


def excluded(
    setup: Setup,
    statement: Statement | None,
    *,
    waiting: bool = False,
    behind: Sequence[Statement] = (),
    but: str | None = None,
) -> bool:
    """Whether a setup, or a statement in it, runs into what is known to fail.

    Args:
        setup: of the program.
        statement: None for the setup alone.
        waiting: whether an output waits for its backward.
        behind: the statements before it.
        but: the name of a fault that may be run into.
    """
    return any(
        known.runs_into(setup, statement)
        for known in KNOWN
        if known.name != but
        and (waiting or not known.waiting)
        and (known.behind is None or any(known.behind(earlier) for earlier in behind))
    )
