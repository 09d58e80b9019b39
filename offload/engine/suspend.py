"""Suspends the forward of a model at each call of a block, so that the block can run for many chunks in one visit.

Each chunk's forward has a thread, of which one runs at a time: it runs until its forward calls a block, hands over the
arguments, and waits for the output. So local variables, loops and contexts of the forward stay as they are.

Limit: a thread has torch's settings and the context variables of the caller, but not what that keeps in a
``threading.local``.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from pipe.recompute.thread_state import ThreadState
from pipe.stream import current_stream, use_device, use_stream

__all__ = ["BlockCall", "SuspendedForward"]


@dataclass(frozen=True, eq=False)
class BlockCall:
    """A call of block ``j``, with the settings of the thread in which it was made."""

    j: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    settings: ThreadState


class _Cancelled(BaseException):
    """Ends a suspended forward that will not be resumed."""


class SuspendedForward:
    """A forward in a thread of its own, with the settings and the context variables of the thread that makes it.

    Args:
        forward: called with a function that the forward calls for each block: ``call_block(j, args, kwargs)``.
        device: of the blocks.
    """

    def __init__(self, forward: Callable[[Callable[..., Any]], Any], device: torch.device) -> None:
        self._device = device
        self._stream = current_stream(device)
        self._settings = ThreadState.capture([device.type])
        self._context = contextvars.copy_context()
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        # A daemon: a forward that is interrupted must not keep the interpreter alive.
        self._thread = threading.Thread(target=self._run, args=(forward,), name="offload-forward", daemon=True)
        self._ended = False
        #: The call of a block at which it is suspended, and the output once it has ended.
        self.call: BlockCall | None = None
        self.output: Any = None

    def start(self) -> None:
        """Runs to the first call of a block, or to the end."""
        self._thread.start()
        self._wait()

    def resume(self, output: Any) -> None:
        """Runs on with the output of the block at which it is suspended."""
        self._answers.put((True, output))
        del output
        self._wait()

    def cancel(self) -> None:
        """Ends the forward, if it has not ended, and waits for it. May be called again after an interrupt."""
        if self._thread.ident is None:
            return
        if not self._ended:
            self._answers.put((False, None))
        while self._thread.is_alive():
            self._thread.join(1.0)

    def _wait(self) -> None:
        self.call, self.output, error = self._requests.get()
        self._ended = self.call is None
        if error is not None:
            try:
                raise error
            finally:
                del error  # a cycle with the traceback

    def _run(self, forward: Callable[[Callable[..., Any]], Any]) -> None:
        try:
            with use_device(self._device), use_stream(self._stream), self._settings.again():
                ended: Any = None, self._context.run(forward, self._call), None
        except _Cancelled:
            return
        except BaseException as error:
            ended = None, None, error
        self._requests.put(ended)
        # Without this, the frame of an error's traceback refers to the error.
        del ended, forward

    def _call(self, j: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._requests.put((BlockCall(j, args, kwargs, ThreadState.capture([self._device.type])), None, None))
        del args, kwargs
        resumed, output = self._answers.get()
        if not resumed:
            raise _Cancelled
        return output
