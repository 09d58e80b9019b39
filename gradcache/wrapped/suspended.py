"""Suspends one chunk's forward at each call of a streamed model inside it, and resumes it by running it again.

A tower with a streamed model inside computes something before the model's call and something after it. All chunks
must reach that call before any continues, so that the model runs all their calls while each shard is loaded once::

    segment 0   prefix           call 0 of the model; its outputs are computed outside
    segment 1   ...              call 1 of the model
    segment 2   suffix           ends with the representation

A forward is suspended by raising an exception in the call, and resumed by running it again from its beginning, where
completed calls return their stored outputs. So it needs no thread: it runs in the caller's thread, with its settings,
and attributes that a tower sets in the prefix and reads in the suffix are those of its own chunk. The repetition is
cheap, since streamed models do not run again.

Guarantees
    * Together the runs have the side effects of one forward: each segment draws random numbers and writes buffers the
      first time; when it is repeated it gets the same numbers and the same buffers, and changes neither.
    * A forward keeps no graph between two runs.
    * Stored outputs are returned as copies, so a tower may write into them in place.

Assumes that a tower does not catch ``BaseException`` around the call of a streamed model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcache import representations
from gradcache.nested import map_tensors, tensors_in
from gradcache.two_pass import InputGradients, repeatable
from gradcache.wrapped.call_state import CallState, Observer, set_modes, why_not_deferred
from gradcache.wrapped.calls import Call, Receiver
from pipe.interception import intercepting
from pipe.nested import TreeSpec, flatten
from pipe.recompute.phase import enable_recomputing
from pipe.recompute.rerun import Rerun
from pipe.recompute.thread_state import ThreadState

__all__ = ["SuspendedForward", "TowerState"]


class _Suspend(BaseException):
    """Raised in the call of a streamed model to suspend a forward."""

    def __init__(self, forward: SuspendedForward) -> None:
        super().__init__("a forward is suspended here; it will be run again from its beginning")
        self.forward = forward


class TowerState:
    """State shared by the forwards of all chunks of one tower."""

    def __init__(self, model: nn.Module, observers: Mapping[int, Observer]) -> None:
        self.name = type(model).__name__
        self.modules = list(model.modules())
        self.layers = repeatable(model)
        #: Of the streamed models whose calls are intercepted, by the model's ``id``.
        self.observers = observers
        #: The reason why calls run inside the forward, chunk by chunk, by the model's ``id``.
        self.not_deferred: dict[int, str] = {}


class SuspendedForward:
    """The forward of one chunk through a tower, from the raw chunk to its representation."""

    def __init__(self, chunk: Any, encoder: Callable[[Any], Any], tower: TowerState) -> None:
        self._chunk = chunk
        self._encoder = encoder
        self.tower = tower
        self._thread_state = ThreadState.capture(device.type for device in tower.layers.devices)
        self._segments: list[Rerun] = []
        #: Those that have run, by number; None if the model runs the call itself, inside the forward.
        self.calls: list[Call | None] = []
        #: The call at which the forward is suspended, if it is.
        self.call: Call | None = None
        self.representation: Any = None
        self.finished = False
        self.requires_grad = False
        # Of the current run:
        self._running = False
        self._modes: tuple[bool, ...] | None = None
        self._position = 0
        self._stop_at: int | None = None
        self._in_backward = False
        self._suspended = False
        self._entering: list[Any] = []
        self._given: list[tuple[Call, Receiver]] = []
        self._segment = contextlib.ExitStack()

    # --- the first pass -----------------------------------------------------------------------------------------

    def advance(self, *, in_turn: bool) -> list[tuple[nn.Module, str]]:
        """Runs to the next call, which is then in :attr:`call`, or to the end. Returns the buffers that it wrote.

        ``in_turn``: whether all chunks before this one are finished. If not, an end that writes buffers (running
        statistics) is taken back, to be run again in its turn: these chunks will write them, too.
        """
        self.call = None
        modes = self.tower.layers.modes
        output = self._run(map_tensors(_as_leaf, self._chunk))
        written = self._segments[-1].module_state.written
        early = not (self._suspended or in_turn) and bool(written)
        if early:
            self._segments.pop().take_back()
        if self._suspended or early:
            # Flags that a tower sets before a call and resets after it must not affect the next chunk.
            set_modes(self.tower.modules, modes)
            return [] if early else written
        self.requires_grad = any(tensor.requires_grad for tensor in tensors_in(output))
        self.representation = representations.detached(output)
        self.finished = True
        return written

    # --- the second pass ----------------------------------------------------------------------------------------

    def begin_backward(self, inputs: InputGradients) -> None:
        """To be called before the two methods below; ``inputs`` collects the gradients of the chunk itself."""
        self._chunk = inputs.as_leaves(self._chunk)

    def backward(self, gradient: Any, first: Any) -> float:
        """Repeats the forward with a graph, and runs backward from the representation to the outputs of calls.

        Returns the greatest difference from the representations ``first`` of the first pass; 0 if that is None.
        """
        with self._repeated(None) as output:
            difference = 0.0 if first is None else representations.greatest_difference(first, output)
            representations.backward([output], [gradient])
        return difference

    def backward_from(self, k: int) -> None:
        """Repeats the forward up to call ``k``, and runs backward from its inputs to the outputs of earlier calls.

        Frees the stored outputs of call ``k``.
        """
        call = self.calls[k]
        assert call is not None
        gradients, call.entered.gradients = call.entered.gradients, []
        if any(gradient is not None for gradient in gradients):
            with self._repeated(k):
                entering, self._entering = self._entering, []
                pairs = [(x, g) for x, g in zip(entering, gradients, strict=True) if g is not None]
                torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        call.outputs = []

    @contextlib.contextmanager
    def _repeated(self, stop_at: int | None) -> Iterator[Any]:
        """Yields the result of a run with a graph; gradients computed inside are added to those of the calls."""
        self._stop_at, self._in_backward = stop_at, True
        self._modes = self.tower.layers.modes
        try:
            with (
                self._thread_state.again(recomputation=True, cache_casts=False),
                enable_recomputing(),
                torch.enable_grad(),
            ):
                output = self._run(self._chunk)
                given, self._given = self._given, []
                # Backward may read buffers, or repeat code that writes them: the earliest segments are restored last.
                for segment in reversed(self._segments):
                    self._segment.enter_context(segment.module_state.again())
                yield output
                for call, receiver in given:
                    call.collect(receiver)
        finally:
            self._stop_at, self._in_backward, self._given, self._entering = None, False, [], []
            self.reset()

    def reset(self) -> None:
        """Ends a run that was interrupted anywhere: restores buffers, generators and ``training`` flags."""
        self._running = False
        self._segment.__exit__(*sys.exc_info())
        modes, self._modes = self._modes, None
        if modes is not None:
            set_modes(self.tower.modules, modes)

    # --- one run ------------------------------------------------------------------------------------------------

    def _run(self, chunk: Any) -> Any:
        """Runs from the beginning; None if it was suspended."""
        self._position, self._suspended, self._given, self._running = 0, False, [], True
        try:
            return self.tower.layers.run(self._encode, chunk)
        except _Suspend as suspend:
            if suspend.forward is not self:
                raise
            return None
        finally:
            self._running = False

    def _encode(self, chunk: Any) -> Any:
        with intercepting(self._intercepted), self._segment:
            self._begin()
            output = self._encoder(chunk)
            if self._suspended and self._stop_at is None:
                raise RuntimeError(
                    f"the forward of {self.tower.name} was suspended by an exception at the call of the streamed model "
                    f"inside it, and caught that exception; catch Exception there, not BaseException"
                )
            return output

    def _intercepted(self, model: Any, micro_batches: Sequence[Any]) -> list[Any] | None:
        """Returns the stored outputs of a call, suspends the forward, or returns None to let the model run the call."""
        observer = self.tower.observers.get(id(model))
        if observer is None or not self._running:
            return None
        if self._suspended:  # the tower caught the exception that suspends it
            raise _Suspend(self)
        reason = why_not_deferred()
        if reason:
            self.tower.not_deferred[id(model)] = reason
            return None
        k = self._position
        self._position += 1
        inputs, spec = flatten(list(micro_batches))
        requires = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
        self._end()
        if k == self._stop_at:
            self._entering = inputs
        elif k < len(self.calls):
            call = self.calls[k]
            self._begin(k + 1)
            if call is None:
                return None
            self._check_repeated(call, model, spec, requires)
            outputs, receiver = call.attach()
            self._given.append((call, receiver))
            return outputs
        elif self._in_backward:
            raise self._differs(f"calls {type(model).__name__} once more than")
        else:
            self.call = Call(model, inputs, spec, requires, CallState(observer))
        self._suspended = True
        raise _Suspend(self)

    def _check_repeated(self, call: Call, model: Any, spec: TreeSpec, requires: list[bool]) -> None:
        if model is not call.model or spec != call.input_spec:
            raise self._differs(f"calls {type(model).__name__} in another order, or with other arguments, than")
        # A call that ran without gradients in the first pass cannot return gradients.
        if torch.is_grad_enabled() != call.records or requires != call.requires:
            raise self._differs(f"calls {type(model).__name__} with inputs that need other gradients than")

    def _differs(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"the forward of {self.tower.name}, which is repeated around the call of a streamed model, {what} when it "
            f"ran first; make it do the same for the same chunk, or override GradCache.model_call, with which chunks "
            f"run one by one"
        )

    # --- one segment --------------------------------------------------------------------------------------------

    def _begin(self, k: int = 0) -> None:
        """Begins segment ``k``: the first time it records the state, later it restores that state."""
        if k == len(self._segments):
            # Attributes that a tower sets in one segment are read in the next.
            self._segments.append(self.tower.layers.rerun(attributes=False))
            self._segment.enter_context(self._segments[k].first())
        else:
            self._segment.enter_context(self._segments[k].again(settings=False))

    def _end(self) -> None:
        modes = self.tower.layers.modes
        self._segment.close()
        # Closing restores the flags from before the segment; keep those that the tower set in it.
        set_modes(self.tower.modules, modes)


def _as_leaf(tensor: Tensor) -> Tensor:
    # The graph before the chunk is the caller's; one backward runs through it, after all chunks.
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor
