"""Saves and restores torch's thread-local settings (grad mode, autocast, hooks, modes) and context variables.

A forward that runs in a worker thread, or again inside backward, would run under torch's defaults instead of the
contexts that the user entered around the call, and silently compute another result. :class:`ThreadState` saves the
settings in the user's thread and applies them where the forward runs.

Invariant: inside :meth:`ThreadState.again` every saved setting has its value from :meth:`ThreadState.capture`;
afterwards every setting of the thread has its previous value. A mode that is active already is not entered twice.

This is the only module that changes torch's mode stacks and default hooks.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType, MethodType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from pipe.recompute.phase import is_recomputing, phase
from pipe.torch_private.autograd import SavedTensorHooks, pop_saved_tensor_hooks, saved_tensor_hooks
from pipe.torch_private.dispatch import DISPATCH_MODES, FUNCTION_MODES, ModeStack, modes_active

__all__ = [
    "PACKAGES",
    "Autocast",
    "Settings",
    "ThreadState",
    "close_contexts",
    "holds_generators",
    "in_settings_of_this_thread",
    "lasting_hooks",
    "release_generators",
    "restores_thread_state",
    "shared_generators",
]

#: Generators of the process belong to all threads; two recomputations that rewind them must not overlap.
shared_generators = threading.RLock()


#: Whether this thread holds them.
holds_generators: Callable[[], bool] = shared_generators._is_owned  # type: ignore[attr-defined]


def release_generators() -> None:
    """Releases :data:`shared_generators` where an interrupt kept ``with`` statements of this thread from it."""
    while holds_generators():
        shared_generators.release()


_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

P = ParamSpec("P")
R = TypeVar("R")


class Autocast(NamedTuple):
    """The autocast settings of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def of(device_type: str) -> Autocast:
        """The settings of this thread for ``device_type``."""
        return Autocast(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))


def _ends_with_its_forward(hooks: SavedTensorHooks) -> bool:
    # torch.utils.checkpoint counts the tensors that one forward saves; tensors of a second one would be counted too.
    return getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def lasting_hooks() -> SavedTensorHooks | None:
    """The active saved-tensor hooks, or None; hooks that count one forward's tensors are excluded."""
    hooks = saved_tensor_hooks()
    return None if hooks is None or _ends_with_its_forward(hooks) else hooks


@dataclass(slots=True)
class ThreadState:
    """The thread-local settings around one call.

    Usage::

        state = ThreadState.capture({"cpu", "cuda"})        # in the user's thread, inside the user's contexts
        with state.again():                                 # in another thread, or inside backward
            output = layer(input)
    """

    grad: bool
    inference: bool
    autocasts: tuple[Autocast, ...]
    cache_casts: bool
    hooks: SavedTensorHooks | None
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    phase: tuple[bool, bool]
    holds_generators: bool
    #: Contexts of autocast that are open: when the last one ends, torch forgets the casts of weights.
    autocast_depth: int
    #: Of :mod:`contextvars`. Not compared: a copy differs from every other one.
    variables: contextvars.Context = field(compare=False)

    @classmethod
    def capture(cls, device_types: Iterable[str] = ()) -> ThreadState:
        """Saves the settings of this thread; autocast for the CPU and for ``device_types``."""
        return cls._of(_with_autocast(frozenset(device_types)))

    @classmethod
    def _of(cls, kinds: tuple[str, ...]) -> ThreadState:
        modes = modes_active()
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=tuple([Autocast.of(kind) for kind in kinds]),
            cache_casts=torch.is_autocast_cache_enabled(),
            hooks=saved_tensor_hooks(),
            # The default device is one of these modes, whether set by set_default_device or by a context.
            function_modes=tuple(FUNCTION_MODES.active()) if modes else (),
            dispatch_modes=tuple(DISPATCH_MODES.active()) if modes else (),
            phase=phase.flags,
            holds_generators=holds_generators(),
            autocast_depth=_autocast_depth(),
            variables=contextvars.copy_context(),
        )

    @contextlib.contextmanager
    def again(self, *, recomputation: bool = False, cache_casts: bool | None = None) -> Iterator[None]:
        """A context with the saved settings in this thread.

        Args:
            recomputation: whether this is a second forward, not the first in another thread. Grad mode is then kept.
            cache_casts: overrides whether autocast may cache casted weights.
        """
        cache = self.cache_casts if cache_casts is None else cache_casts
        with contextlib.ExitStack() as stack:
            if not recomputation:
                if self.inference != torch.is_inference_mode_enabled():
                    stack.enter_context(torch.inference_mode(self.inference))
                if self.grad != torch.is_grad_enabled():
                    stack.enter_context(torch.set_grad_enabled(self.grad))
                stack.callback(setattr, phase, "flags", phase.flags)
                phase.flags = self.phase
            for autocast in self.autocasts:
                now = Autocast.of(autocast.device_type)
                if now != autocast or (autocast.enabled and cache != torch.is_autocast_cache_enabled()):
                    kind, enabled, dtype = autocast
                    _enter_autocast(stack, torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cache))
            hooks = None if recomputation and self.hooks and _ends_with_its_forward(self.hooks) else self.hooks
            if hooks is not None and hooks != saved_tensor_hooks():
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            _enter(stack, FUNCTION_MODES, self.function_modes)
            _enter(stack, DISPATCH_MODES, self.dispatch_modes)
            _enter_variables(stack, self.variables)
            yield

    def restore(self) -> None:
        """Restores the saved settings in this thread if an exception prevented a context from doing so.

        To be called in the thread of :meth:`capture`; again, if it was interrupted itself.
        """
        while (hooks := saved_tensor_hooks()) is not None and hooks != self.hooks:
            pop_saved_tensor_hooks()
        while len(left := DISPATCH_MODES.active()) > len(self.dispatch_modes):
            again = any(left[-1] is mode for mode in self.dispatch_modes)  # pushed once more by again()
            try:
                DISPATCH_MODES.pop() if again else left[-1].__exit__(None, None, None)
            except IndexError:  # an interrupt stopped its __exit__ before the last statement, which is this one
                DISPATCH_MODES.pop()
        while len(FUNCTION_MODES.active()) > len(self.function_modes):
            FUNCTION_MODES.pop()
        for autocast in self.autocasts:
            if Autocast.of(autocast.device_type) != autocast:
                torch.set_autocast_enabled(autocast.device_type, autocast.enabled)
                torch.set_autocast_dtype(autocast.device_type, autocast.dtype)
        torch.set_autocast_cache_enabled(self.cache_casts)
        _end_autocasts(self.autocast_depth)
        torch.set_grad_enabled(self.grad)
        phase.flags = self.phase
        if not self.holds_generators:
            release_generators()


def _autocast_depth() -> int:
    return int(torch.autocast_increment_nesting() and torch.autocast_decrement_nesting())


def _end_autocasts(depth: int) -> None:
    """Ends contexts of autocast beyond ``depth`` of them, which an interrupt kept from ending.

    Without this, casts of weights are kept for ever, and later steps compute with them.
    """
    while _autocast_depth() > depth:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _enter_autocast(stack: contextlib.ExitStack, context: contextlib.AbstractContextManager[Any]) -> None:
    stack.callback(_end_autocasts, _autocast_depth())
    stack.enter_context(context)


def in_settings_of_this_thread(job: Callable[[], R], device_types: Iterable[str]) -> Callable[[], R]:
    """The job with this thread's settings around it, for another thread."""
    thread_state = ThreadState.capture({"cuda", *device_types})
    thread_state.phase = phase.checkpointing, is_recomputing()  # a backward is under way in this thread alone
    # The current device belongs to a thread as well: without this, a loader's "cuda" would be device 0.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> R:
        with contextlib.nullcontext() if device is None else torch.cuda.device(device), thread_state.again():
            return thread_state.variables.run(job)

    return run


@functools.lru_cache(maxsize=64)
def _with_autocast(device_types: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted({"cpu", *device_types} - {"meta"}))


@functools.cache
def _kinds_here() -> tuple[str, ...]:
    device = torch.accelerator.current_accelerator()
    return _with_autocast(frozenset(() if device is None else [device.type]))


def _enter(stack: contextlib.ExitStack, kind: ModeStack, modes: tuple[Any, ...]) -> None:
    active = {id(mode) for mode in kind.active()} if modes else set()
    for mode in modes:
        if id(mode) not in active:
            stack.enter_context(kind.pushed(mode))


class Settings:
    """The settings of this thread that a further run must have again: autocast, default device, modes, variables.

    Args:
        devices: those that the run uses.
        whole: also the saved-tensor hooks.
    """

    __slots__ = ("_kinds", "_then", "_variables")

    def __init__(self, devices: Iterable[torch.device], *, whole: bool = False) -> None:
        self._kinds = [device.type for device in devices]
        self._variables = contextvars.copy_context()
        self._then = ThreadState.capture(self._kinds) if whole or self._any_set() else None

    def _any_set(self) -> bool:
        kinds = self._kinds
        return modes_active() or torch.is_autocast_enabled("cpu") or any(map(torch.is_autocast_enabled, kinds))

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """A context with these settings; grad mode is the caller's."""
        if self._then is None and not self._any_set() and self._variables == contextvars.copy_context():
            return _NOTHING
        return self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._then is not None:
                # Without autocast's cache of casted weights: it is keyed by parameter and outlives a recomputation
                # inside an enclosing autocast; it may hold a cast made under no_grad, whose gradient would be lost.
                stack.enter_context(self._then.again(recomputation=True, cache_casts=False))
            else:
                for kind in {"cpu", *self._kinds} if self._any_set() else ():
                    _enter_autocast(stack, torch.autocast(kind, enabled=False))
                _enter_variables(stack, self._variables)
            yield


_UNSET: Any = object()


def _enter_variables(stack: contextlib.ExitStack, then: contextvars.Context) -> None:
    """Sets the context variables of this thread to their values in ``then``."""
    now = contextvars.copy_context()
    for variable in {**then, **now}:
        try:  # one that was not set then had its default, which an empty context shows
            value = then[variable] if variable in then else contextvars.Context().run(variable.get)
        except LookupError:
            continue  # it has none
        if value is not now.get(variable, _UNSET):
            stack.callback(variable.reset, variable.set(value))


def restores_thread_state(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which leaves this thread's settings as they were also if an interrupt stops a context's exit."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        before = ThreadState._of(_kinds_here())
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not _is_control_flow(error):
                close_contexts(error)
                before.restore()
            raise

    return wrapped


def _is_control_flow(error: BaseException) -> bool:
    """Whether an exception of the packages' own ends a call that is suspended, and leaves its contexts as it should."""
    return not isinstance(error, Exception) and type(error).__module__.partition(".")[0] in PACKAGES


def close_contexts(error: BaseException) -> None:
    """Ends the contexts of :mod:`contextlib` that an interrupt kept the ``with`` statement from ending.

    A generator would otherwise restore what it saved when the traceback is freed, in the middle of other code, and an
    ``ExitStack`` never; nor has that a context that it is just entering, or that it has taken off to leave.
    """
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        for context in _contexts_in(frame):
            with contextlib.suppress(Exception):  # the first error counts
                (context if isinstance(context, contextlib.ExitStack) else context.gen).close()


def _contexts_in(frame: FrameType) -> Iterator[Any]:
    """Contexts that a frame of an interrupted call may have left open; those that have ended can be closed again."""
    ours = frame.f_globals.get("__name__", "").partition(".")[0] in PACKAGES
    if frame.f_code not in _ENDS and not ours:
        return
    code = frame.f_code
    given = 0 if code in _ENDS else code.co_argcount + code.co_kwonlyargcount  # stacks of the caller
    there = frame.f_locals
    for value in reversed([there[name] for name in code.co_varnames[given:] if name in there]):
        # Of a context that a stack was leaving, before the others in it, there is only its bound exit.
        each = getattr(value, "__self__", None) if frame.f_code in _ENDS and isinstance(value, MethodType) else value
        if isinstance(each, contextlib.ExitStack) or (not ours and isinstance(each, _Generator)):
            yield each


#: Those whose objects and modules keep their own state.
PACKAGES = ("pipe", "offload", "gradcache")
_Generator = contextlib._GeneratorContextManager
_ENDS = {
    _Generator.__enter__.__code__,
    _Generator.__exit__.__code__,
    contextlib.ExitStack.__exit__.__code__,
    contextlib.ExitStack.enter_context.__code__,
}
