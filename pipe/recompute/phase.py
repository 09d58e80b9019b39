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

from pipe.torch_private.autograd import in_backward

__all__ = [
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
    "phase",
]


class _Phase(threading.local):
    checkpointing = False
    recomputing = False

    @property
    def flags(self) -> tuple[bool, bool]:
        """What the two functions of the user read."""
        return self.checkpointing, self.recomputing

    @flags.setter
    def flags(self, flags: tuple[bool, bool]) -> None:
        self.checkpointing, self.recomputing = flags


#: The flags of this thread.
phase = _Phase()


@contextlib.contextmanager
def _enabled(flag: str, value: bool) -> Iterator[None]:
    before = getattr(phase, flag)
    setattr(phase, flag, value)
    try:
        yield
    finally:
        setattr(phase, flag, before)


def enable_checkpointing(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """A context in which :func:`is_checkpointing` returns ``enabled`` in this thread."""
    return _enabled("checkpointing", enabled)


def enable_recomputing(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """A context in which :func:`is_recomputing` returns ``enabled`` in this thread (always True inside a backward)."""
    return _enabled("recomputing", enabled)


def is_checkpointing() -> bool:
    """Whether this forward keeps only its input, and will run again during backward."""
    return phase.checkpointing


def is_recomputing() -> bool:
    """Whether this forward repeats an earlier one to get its activations back.

    It guards side effects::

        def forward(self, input):
            if not is_recomputing():
                self.calls += 1
            return input
    """
    return phase.recomputing or in_backward()
