"""Tells a layer whether its forward is the first one under checkpointing, a recomputation, or neither.

A layer with a side effect (a counter, running statistics) runs twice under checkpointing and must act once, so it can
query the phase. The phase is thread-local, and also covers recomputations of other packages: every forward that runs
while the autograd engine is inside a backward is a recomputation, a nested ``torch.utils.checkpoint`` included.

Source: ``is_checkpointing`` and ``is_recomputing`` of torchgpipe, which read False in such a nested recomputation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from pipe.torch_private.autograd import in_backward

__all__ = ["enable_recomputing", "is_checkpointing", "is_recomputing", "lent_weights", "phase"]


class _Phase(threading.local):
    #: Whether this thread is checkpointing, and whether it is recomputing.
    flags = False, False


#: The phase of this thread.
phase = _Phase()


#: Set while layers run that have their weights only for that time: ``references`` and ``around`` of each
#: :class:`~pipe.recompute.recomputed.Call` inside them, so that its second run has the weights again.
lent_weights: ContextVar[Any] = ContextVar("lent_weights", default=None)


@contextlib.contextmanager
def enable_recomputing() -> Iterator[None]:
    """A context in which :func:`is_recomputing` is True in this thread (as it always is inside a backward)."""
    before, phase.flags = phase.flags, (phase.flags[0], True)
    try:
        yield
    finally:
        phase.flags = before


def is_checkpointing() -> bool:
    """Whether this forward keeps only its input, and will run again during backward."""
    return phase.flags[0]


def is_recomputing() -> bool:
    """Whether this forward repeats an earlier one to get its activations back.

    It guards side effects::

        def forward(self, input):
            if not is_recomputing():
                self.calls += 1
            return input
    """
    return phase.flags[1] or in_backward()
