"""Runs one forward or backward of a model at a time, and cleans up after one that fails or is interrupted.

After an exception in either pass no copy is running, parameters are views of their homes, and the model can be used
again; gradients that were stored before stay, as in a backward of plain torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from offload.engine.cell import ShardRunner
from offload.engine.state_before import StateBefore
from offload.mesh.public import PublicParameters
from offload.streaming.streamer import Streamer
from pipe.process import check_process
from pipe.recompute.thread_state import close_contexts

__all__ = ["ExclusivePasses"]


class ExclusivePasses:
    """The base class of an executor, which is initialized when it has its streamer."""

    device: torch.device
    runners: Sequence[ShardRunner]
    streamer: Streamer
    public: PublicParameters
    #: Returns the engine that runs the model in place of this executor, or None.
    native: Any = staticmethod(lambda: None)
    #: How often saved tensors were recorded, by shard, rows and whether the graph was kept.
    recorded: dict[Any, int]
    #: The methods whose frames are running passes.
    pass_codes: frozenset[CodeType]

    def __init__(self) -> None:
        #: Whether a pass is running, or was interrupted before its cleanup.
        self._busy = False
        self._frozen_weights = 0
        self.recorded = {}
        #: The process that made the model.
        self.made_in = os.getpid()
        this = weakref.ref(self)  # without it, a cycle with the streamer

        def in_pass() -> bool:
            executor = this()
            if executor is None or (native := executor.native()) is None:
                return executor is not None and executor.busy
            return bool(native.in_forward)  # backwards of several models run in one of autograd

        def clean_up() -> None:
            executor = this()
            if executor is not None:
                executor.clean_up()

        self.streamer.in_pass, self.streamer.clean_up = in_pass, clean_up

    @property
    def busy(self) -> bool:
        """Whether a forward or backward is running."""
        native = self.native()
        return (native is not None and native.running) or (self._busy and self._passes() > 0)

    def _passes(self) -> int:
        """Number of running forwards and backwards of this model, in all threads."""
        count = 0
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None:
                if frame.f_code in self.pass_codes and frame.f_locals.get("self") is self:
                    count += 1
                frame = frame.f_back
        return count

    @contextlib.contextmanager
    def _exclusive_pass(
        self, on_failure: Callable[[], None] | None = None, *, recomputes: bool = False
    ) -> Iterator[None]:
        """Runs one pass at a time, and cleans up after an exception at any line, such as Ctrl-C.

        If it interrupts the cleanup itself, the next pass begins with that cleanup.
        """
        check_process(self.made_in, "this OffloadModel")
        self.refuse_other_passes()
        before = StateBefore(self.device, (runner.watched for runner in self.runners) if recomputes else ())
        with self.streamer.slot_pool.turn(self.streamer), self.public.in_layers():
            try:
                if self._busy or self.streamer.must_cancel:
                    self._cancel()
                if self.streamer.finish_step is not None:
                    self.streamer.finish_step()
                self._busy = True
                yield
                self._busy = False
            except GeneratorExit:
                # An interrupt kept the ``with`` statement from ending this context: it is closed when the traceback is
                # freed. By then the settings of its begin (grad mode off, inside a backward) are no longer in force.
                raise
            except BaseException as error:
                close_contexts(error)
                before.restore()
                self._cancel()
                if on_failure is not None:
                    on_failure()
                raise

    def refuse_other_passes(self) -> None:
        """Raises RuntimeError if a pass is running beside that of the caller."""
        if self._busy and self._passes() > 1:  # one is the caller
            raise RuntimeError(
                "this OffloadModel is in the middle of a forward or backward; a layer or a hook of it called it again, "
                "or another thread did"
            )

    @property
    def weights_are_frozen(self) -> bool:
        """Whether it is inside of :meth:`frozen_weights`."""
        return self._frozen_weights > 0

    @contextlib.contextmanager
    def frozen_weights(self) -> Iterator[None]:
        """A context in which parameters do not change: forwards reuse the shards that are in slots."""
        if not self._frozen_weights:
            self.streamer.release()
        self._frozen_weights += 1
        try:
            yield
        finally:
            self._frozen_weights -= 1

    def prefetch(self, *, backward: bool) -> None:
        """Begins to load the first shards of the next pass, unless a pass is running."""
        if not self._busy:
            self.streamer.prefetch(self.streamer.backward_order if backward else range(len(self.streamer.shards)))

    def clean_up(self) -> None:
        """Cleans up after a pass that was interrupted before its cleanup, if there is one."""
        native = self.native()
        if native is not None:
            native.clean_up()
        if self._busy and not self._passes():
            self._cancel()

    def _cancel(self) -> None:
        self.streamer.cancel()
        self._busy = False
