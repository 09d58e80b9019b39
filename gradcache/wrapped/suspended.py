"""Suspends one chunk's forward at each call of a streamed model inside it, and resumes it by running it again.

A tower with a streamed model inside computes something before the model's call and something after it. All chunks
must reach that call before any continues, so that the model runs all their calls while each shard is loaded once::

    segment 0   prefix           call 0 of the model; its outputs are computed outside
    segment 1   ...              call 1 of the model
    segment 2   suffix           ends with the representation

A forward is suspended by raising an exception in the call, and resumed by running it again from its beginning, where
completed calls return their stored outputs. So it needs no thread: it runs in the caller's thread, with its settings,
and what a tower sets in the prefix and reads in the suffix (an attribute, an element of a list, a global) is of its own
chunk. Forwards that wait in threads of their own would find what the last chunk has set there. The repetition is cheap,
since streamed models do not run again.

Guarantees
    * Together the runs have the side effects of one forward: each segment draws random numbers and writes buffers the
      first time; when it is repeated it gets the same numbers and the same buffers, and changes neither.
    * A forward keeps no graph between two runs.
    * Stored outputs are returned as copies, so a tower may write into them in place.

Assumes that a tower does not catch ``BaseException`` around the call of a streamed model.

The calls of many chunks run together, later than each chunk made its own. Other chunks' forwards run in between, so
state that a chunk set around its call (an attribute of a layer, a disabled adapter, a swapped parameter, a context
variable) may have changed. Thread settings and ``training`` flags are restored; for other state a change is only
detected, and the call then runs inside the forward.

The outputs are returned each time the forward around the call is repeated. Each time they begin a new graph, and the
gradients that are computed there are summed until all users of the outputs have run backward.

Limits: objects that layers refer to are compared one level deep, so a value that changes at a deeper level, or in a
global or a closure, is taken to be the same for all chunks.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcache import representations
from gradcache.autograd_node import Gradients, with_backward
from gradcache.two_pass import InputGradients, device_of, repeatable
from offload import OffloadModel
from pipe.interception import intercepting
from pipe.nested import TreeSpec, flatten, tensors_in, unflatten
from pipe.phony import get_phony
from pipe.recompute.phase import enable_recomputing, is_checkpointing
from pipe.recompute.replay import Replay, Rewound
from pipe.recompute.thread_state import ThreadState
from pipe.torch_private.autograd import saved_tensor_hooks
from pipe.torch_private.dispatch import DISPATCH_MODES
from pipe.torch_private.tracing import transform_of_functions_under_way

__all__ = ["Call", "Observer", "SuspendedForward", "TowerState"]


class Observer:
    """Reads the state that the calls of one streamed model depend on besides their arguments."""

    def __init__(self, model: nn.Module) -> None:
        # The model's own attributes change whenever it runs; a caller's changes are in its layers.
        self.modules = [module for child in model.children() for module in child.modules()]
        #: The device types whose autocast settings matter.
        self.devices = [device_of(model).type]
        self._last: list[Any] = []

    def state(self) -> list[Any]:
        """The objects that the modules' attributes refer to. Consecutive equal states are the same list."""
        # The objects themselves, not their ids: the id of a freed object may be reused.
        state: list[Any] = [torch.get_default_dtype()]
        state.extend(item for pair in contextvars.copy_context().items() for item in pair)
        for module in self.modules:
            for name, value in module.__dict__.items():
                if name == "training":
                    continue
                state.append(value)
                if isinstance(value, dict):
                    state.extend(dict.values(value))  # not value.values(): a subclass may record that as a read
                elif isinstance(value, (list, tuple, set)):
                    state.extend(value)
                elif not isinstance(value, (Tensor, nn.Module, type)) and hasattr(value, "__dict__"):
                    state.extend(vars(value).values())
        if not _same(state, self._last):
            self._last = state
        return self._last


class Call:
    """A call of a streamed model, at which a forward is suspended until it has run."""

    def __init__(self, model: Any, micro_batches: Sequence[Any], observer: Observer) -> None:
        inputs, self._input_spec = flatten(list(micro_batches))
        self.model = model
        self._requires = _requires(inputs)
        self._inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        self._versions = _versions(inputs)
        self._observer = observer
        self._thread_state = thread = ThreadState.capture(observer.devices)
        self._modes = tuple(module.training for module in observer.modules)
        self._state = observer.state()
        function_modes = tuple(type(mode) for mode in thread.function_modes)
        settings = (thread.grad, thread.inference, thread.autocasts, function_modes, thread.hooks is None)
        #: Equal for calls that can be run together.
        self.key = (model, self._modes, *settings)
        #: Whether it ran with gradients.
        self._records = False
        self.input_gradients: list[Tensor | None] = []
        #: The outputs, flat and detached.
        self.outputs: list[Any] = []
        self._spec: TreeSpec | None = None
        #: Number of leaves of the output of each micro-batch.
        self._leaves: list[int] = []
        self._differentiable: list[bool] = []
        self._gradients: list[Tensor | None] = []

    # --- the run, later -----------------------------------------------------------------------------------------

    @property
    def lost(self) -> str:
        """The reason why it cannot run any more as when it was made; empty if it can."""
        if not _same(self._observer.state(), self._state):
            return "the tower changes its state only during the call"
        return "its arguments are overwritten by the next chunk's" if _versions(self._inputs) != self._versions else ""

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """A context with the thread settings and ``training`` flags of the call."""
        modules = self._observer.modules
        before = [module.training for module in modules]
        try:
            set_modes(modules, self._modes)
            with self._thread_state.again():
                yield
        finally:
            set_modes(modules, before)

    def enter(self) -> list[Any]:
        """The micro-batches for the run, which is about to begin in the context of :meth:`settings`."""
        self._records = torch.is_grad_enabled()
        inputs, self._inputs, self._state = self._inputs, [], []
        del self._thread_state
        self.input_gradients = [None] * len(inputs)
        entering = _with_graph(inputs, self._requires, self.input_gradients, copy=False)
        return unflatten(entering, self._input_spec)  # type: ignore[no-any-return]

    def fill(self, outputs: list[Any]) -> None:
        """Stores the outputs of all micro-batches, without their graph."""
        leaves, self._spec = flatten(outputs)
        self.outputs = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._leaves = [len(flatten(output)[0]) for output in outputs]
        self._differentiable = _requires(leaves)
        self._gradients = [None] * len(leaves)

    # --- the forward around it ----------------------------------------------------------------------------------

    def repeats(self, model: Any, micro_batches: Sequence[Any]) -> str:
        """How a call that was made in its place differs from it; empty if it does not."""
        inputs, spec = flatten(list(micro_batches))
        if model is not self.model or spec != self._input_spec:
            return "in another order, or with other arguments, than"
        # A call that ran without gradients in the first pass cannot return gradients.
        same = torch.is_grad_enabled() == self._records and _requires(inputs) == self._requires
        return "" if same else "with inputs that need other gradients than"

    def attach(self) -> list[Any]:
        """Copies of the outputs, with a new graph if they need a gradient, which is added to that of other copies."""
        assert self._spec is not None
        wanted = [wants and torch.is_grad_enabled() for wants in self._differentiable]
        copies: list[Any] = unflatten(_with_graph(self.outputs, wanted, self._gradients, copy=True), self._spec)
        return copies

    def take_gradients(self) -> list[Any]:
        """The summed gradients of the outputs, one per micro-batch (None if it has none). Drops them.

        A list of the gradient of each leaf: containers of some libraries forget members that are None.
        """
        gradients, self._gradients = iter(self._gradients), []
        parts = [list(itertools.islice(gradients, leaves)) for leaves in self._leaves]
        return [part if representations.has_gradient(part) else None for part in parts]


def _with_graph(leaves: Sequence[Any], wanted: Sequence[bool], sums: list[Tensor | None], *, copy: bool) -> list[Any]:
    """Copies of ``leaves``, or detached, with a graph for those ``wanted``, whose gradients are added to ``sums``.

    The graph begins with a node, not with leaves: autograd copies a leaf's gradient into the leaf's own layout, and the
    next operation would then sum it in another order than in the plain model.
    """
    made = [x if not isinstance(x, Tensor) else x.clone() if copy else x.detach() for x in leaves]
    positions = [k for k, wants in enumerate(wanted) if wants]

    def add(gradients: Gradients) -> Gradients:
        for k, gradient in zip(positions, gradients, strict=True):
            before = sums[k]
            sums[k] = gradient if before is None else before if gradient is None else before + gradient
        return (None,)

    if positions:
        values = [made[k] for k in positions]
        with torch.enable_grad():
            values = with_backward(values, [get_phony(values[0].device, requires_grad=True)], add)
        for k, value in zip(positions, values, strict=True):
            made[k] = value
    return made


def _same(a: list[Any], b: list[Any]) -> bool:
    return a is b or (len(a) == len(b) and all(map(operator.is_, a, b)))


def _requires(leaves: Sequence[Any]) -> list[bool]:
    return [isinstance(x, Tensor) and x.requires_grad for x in leaves]


def _versions(leaves: Sequence[Any]) -> list[int]:
    """The version counters of the tensors that have one (all except inference tensors)."""
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def why_not_deferred() -> str:
    """The reason why a call that is made now cannot be run later; empty if it can."""
    hooks = saved_tensor_hooks()
    if hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint":
        return "it is called inside torch.utils.checkpoint, which counts the tensors that its forward saves"
    if is_checkpointing():
        return "it is called inside pipe.checkpoint, which runs it again in backward"
    if transform_of_functions_under_way():
        return "it is called inside a transform of torch.func"
    if DISPATCH_MODES.active():
        return "it is called under a TorchDispatchMode, which sees the operations of the call"
    return ""


def set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Sets each module's ``training`` flag, without its children's."""
    for module, training in zip(modules, modes, strict=True):
        if module.training != training:
            module.training = training


class _Suspend(BaseException):
    """Raised in the call of a streamed model to suspend a forward."""

    def __init__(self, forward: SuspendedForward) -> None:
        super().__init__("a forward is suspended here; it will be run again from its beginning")
        self.forward = forward


class TowerState:
    """State shared by the forwards of all chunks of one tower."""

    def __init__(self, model: nn.Module, observers: Mapping[OffloadModel, Observer]) -> None:
        self.name = type(model).__name__
        self.layers = repeatable(model)
        #: Of the streamed models whose calls are intercepted.
        self.observers = observers
        #: The reason why calls of a model run inside the forward, chunk by chunk.
        self.not_deferred: dict[OffloadModel, str] = {}


class SuspendedForward:
    """The forward of one chunk through a tower, from the raw chunk to its representation."""

    def __init__(self, chunk: Any, encoder: Callable[[Any], Any], tower: TowerState) -> None:
        self._chunk, self._encoder, self.tower = chunk, encoder, tower
        self._thread_state = ThreadState.capture(device.type for device in tower.layers.devices)
        self._segments: list[Replay] = []
        #: Those that have run, by number; None if the model runs the call itself, inside the forward.
        self.calls: list[Call | None] = []
        #: The call at which the forward is suspended, if it is.
        self.call: Call | None = None
        self.representation: Any = None
        self.finished = False
        self.requires_grad = False
        # Of the current run:
        self._running = False
        self._modes: list[bool] | None = None
        self._position = 0
        self._in_backward = False
        #: The call before whose run a run in backward stops, and the arguments that this call would get.
        self._stop_at: int | None = None
        self._entering: list[Any] = []
        self._suspended = False
        self._segment = contextlib.ExitStack()

    # --- the first pass -----------------------------------------------------------------------------------------

    def advance(self, *, in_turn: bool) -> list[tuple[nn.Module, str]]:
        """Runs to the next call, which is then in :attr:`call`, or to the end. Returns the buffers that it wrote.

        ``in_turn``: whether all chunks before this one are finished. If not, an end that writes buffers (running
        statistics) is taken back, to be run again in its turn: these chunks will write them, too.
        """
        self.call = None
        modes = self.tower.layers.training
        # The graph before the chunk is the caller's; one backward runs through it, after all chunks.
        output = self._run(InputGradients().as_leaves(self._chunk))
        written = self._segments[-1].written
        early = not (self._suspended or in_turn) and bool(written)
        if early:
            self._segments.pop().take_back()
        if self._suspended or early:
            # Flags that a tower sets before a call and resets after it must not affect the next chunk.
            set_modes(self.tower.layers.modules, modes)
            return [] if early else written
        self.requires_grad = any(tensor.requires_grad for tensor in tensors_in(output))
        self.representation = representations.detached(output)
        self.finished = True
        return written

    # --- the second pass ----------------------------------------------------------------------------------------

    def begin_backward(self, inputs: InputGradients) -> None:
        """To be called before the two methods below; ``inputs`` collects the gradients of the chunk itself."""
        self._chunk = inputs.as_leaves(self._chunk)

    def backward(self, gradient: Any) -> None:
        """Repeats the forward with a graph, and runs backward from the representation to the outputs of calls."""
        with self._repeated(None) as output:
            representations.backward([output], [gradient])

    def backward_from(self, k: int) -> None:
        """Repeats the forward up to call ``k``, and runs backward from its inputs to the outputs of earlier calls.

        Frees the stored outputs of call ``k``.
        """
        call = self.calls[k]
        assert call is not None
        gradients, call.input_gradients = call.input_gradients, []
        if representations.has_gradient(gradients):
            with self._repeated(k) as entering:
                representations.backward([entering], [gradients])
        call.outputs = []

    @contextlib.contextmanager
    def _repeated(self, stop_at: int | None) -> Iterator[Any]:
        """Yields the representation, or the arguments of call ``stop_at``, with a graph from the outputs of calls."""
        self._stop_at, self._in_backward = stop_at, True
        self._modes = self.tower.layers.training
        try:
            with self._thread_state.again(), enable_recomputing(), torch.enable_grad(), contextlib.ExitStack() as run:
                # Before the thread's state is restored, which would take the generators from a segment that has them.
                run.callback(self.reset)
                output = self._thread_state.variables.copy().run(self._run, self._chunk)
                if stop_at is not None:
                    output, self._entering = self._entering, []
                # Backward may read buffers, or repeat code that writes them: the earliest segments are restored last.
                for segment in reversed(self._segments):
                    self._segment.enter_context(Rewound(segment, generators=False, settings=False))
                yield output
        finally:
            self._stop_at, self._in_backward, self._entering = None, False, []

    def reset(self) -> None:
        """Ends a run that was interrupted anywhere: restores buffers, generators and ``training`` flags."""
        self._running = False
        self._segment.__exit__(*sys.exc_info())
        modes, self._modes = self._modes, None
        if modes is not None:
            set_modes(self.tower.layers.modules, modes)

    # --- one run ------------------------------------------------------------------------------------------------

    def _run(self, chunk: Any) -> Any:
        """Runs from the beginning; None if it was suspended."""
        self._position, self._suspended, self._running = 0, False, True
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
        observer = self.tower.observers.get(model)
        if observer is None or not self._running:
            return None
        if self._suspended:  # the tower caught the exception that suspends it
            raise _Suspend(self)
        if reason := why_not_deferred():
            self.tower.not_deferred[model] = reason
            return None
        k = self._position
        self._position += 1
        modes = self.tower.layers.training
        self._segment.close()
        # Closing restores the flags from before the segment; keep those that the tower set in it.
        set_modes(self.tower.layers.modules, modes)
        if k == self._stop_at:
            self._entering = flatten(list(micro_batches))[0]
        elif k < len(self.calls):
            call = self.calls[k]
            self._begin(k + 1)
            if call is None:
                return None
            if difference := call.repeats(model, micro_batches):
                raise self._differs(model, difference)
            return call.attach()
        elif self._in_backward:
            raise self._differs(model, "once more than")
        else:
            self.call = Call(model, micro_batches, observer)
        self._suspended = True
        raise _Suspend(self)

    def _differs(self, model: Any, how: str) -> RuntimeError:
        return RuntimeError(
            f"the forward of {self.tower.name}, which is repeated around the call of a streamed model, calls "
            f"{type(model).__name__} {how} when it ran first; make it do the same for the same chunk, or override "
            f"GradCache.model_call, with which chunks run one by one"
        )

    def _begin(self, k: int = 0) -> None:
        """Begins segment ``k``: the first time it records the state, later it restores that state."""
        if k == len(self._segments):
            # Attributes that a tower sets in one segment are read in the next.
            self._segments.append(self.tower.layers.begin(attributes=False))
            self._segment.enter_context(self._segments[k].first())
        else:
            self._segment.enter_context(self._segments[k].again(settings=False))
