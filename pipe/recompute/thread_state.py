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
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch

from pipe.recompute.phase import is_recomputing, lent_weights, phase
from pipe.torch_private.autograd import (
    SavedTensorHooks,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
)
from pipe.torch_private.dispatch import DISPATCH_MODES, FUNCTION_MODES, modes_active

__all__ = [
    "PACKAGES",
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


P = ParamSpec("P")
R = TypeVar("R")


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
        output = state.run(layer, input)                    # in another thread, or inside backward
    """

    grad: bool
    inference: bool
    #: Device type, whether autocast is on for it, and the type that it casts to.
    autocasts: tuple[tuple[str, bool, torch.dtype], ...]
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
        modes = modes_active()
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=_autocasts(device_types),
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

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``function(*args, **kwargs)`` with the saved settings and context variables, in this thread."""
        with self.again():
            return self.variables.copy().run(function, *args, **kwargs)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context with the saved settings in this thread, but for context variables."""
        before = ThreadState.capture([kind for kind, _, _ in self.autocasts])
        changes = self.inference != before.inference
        with torch.inference_mode(self.inference) if changes else contextlib.nullcontext():
            try:
                torch.set_grad_enabled(self.grad)
                phase.flags = self.phase
                self.apply()
                yield
            finally:
                before.restore(pushed=self.dispatch_modes)

    def apply(self, *, recomputation: bool = False) -> None:
        """Gives this thread the saved settings, but for grad mode, phase and context variables.

        ``recomputation``: whether this is a second forward, not the first in another thread. Autocast has no cache
        then: it is keyed by parameter and outlives a recomputation inside an enclosing autocast, and a cast in it that
        was made under ``no_grad`` would lose the gradient.
        """
        torch.autocast_increment_nesting()
        _set_autocasts(self.autocasts, self.cache_casts and not recomputation)
        hooks = None if recomputation and self.hooks and _ends_with_its_forward(self.hooks) else self.hooks
        if hooks is not None and hooks != saved_tensor_hooks():
            push_saved_tensor_hooks(*hooks)
        for kind, modes in ((FUNCTION_MODES, self.function_modes), (DISPATCH_MODES, self.dispatch_modes)):
            active = set(map(id, kind.active())) if modes else set()
            for mode in modes:
                if id(mode) not in active:
                    kind.push(mode)

    def restore(self, *, pushed: tuple[Any, ...] = ()) -> None:
        """Restores the saved settings in this thread, also if an exception prevented a context from doing so.

        To be called in the thread of :meth:`capture`; again, if it was interrupted itself. ``pushed``: modes that were
        not entered.
        """
        while (hooks := saved_tensor_hooks()) is not None and hooks != self.hooks:
            pop_saved_tensor_hooks()
        while len(left := DISPATCH_MODES.active()) > len(self.dispatch_modes):
            entered = all(left[-1] is not mode for mode in (*self.dispatch_modes, *pushed))
            try:
                left[-1].__exit__(None, None, None) if entered else DISPATCH_MODES.pop()
            except IndexError:  # an interrupt stopped its __exit__ before the last statement, which is this one
                DISPATCH_MODES.pop()
        while len(FUNCTION_MODES.active()) > len(self.function_modes):
            FUNCTION_MODES.pop()
        _set_autocasts(self.autocasts, self.cache_casts)
        # Without this, casts of weights are kept for ever, and later steps compute with them.
        while _autocast_depth() > self.autocast_depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        torch.set_grad_enabled(self.grad)
        phase.flags = self.phase
        lent_weights.set(self.variables.get(lent_weights))
        if not self.holds_generators:
            release_generators()


def _autocast_depth() -> int:
    return int(torch.autocast_increment_nesting() and torch.autocast_decrement_nesting())


def _autocasts(device_types: Iterable[str]) -> tuple[tuple[str, bool, torch.dtype], ...]:
    kinds = sorted({"cpu", *device_types} - {"meta"})
    return tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds])


def _set_autocasts(autocasts: tuple[tuple[str, bool, torch.dtype], ...], cache: bool) -> None:
    torch.set_autocast_cache_enabled(cache)
    for kind, enabled, dtype in autocasts:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def in_settings_of_this_thread(job: Callable[[], R]) -> Callable[[], R]:
    """The job with this thread's settings around it, for another thread."""
    thread_state = ThreadState.capture({"cuda", *_kind_here()})
    thread_state.phase = phase.flags[0], is_recomputing()  # a backward is under way in this thread alone
    # The current device belongs to a thread as well: without this, a loader's "cuda" would be device 0.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> R:
        with contextlib.nullcontext() if device is None else torch.cuda.device(device):
            return thread_state.run(job)

    return run


class Settings:
    """The settings of this thread that a further run must have again: autocast, default device, modes, variables.

    Args:
        devices: those that the run uses.
        whole: also the saved-tensor hooks.
    """

    __slots__ = ("_kinds", "_then", "_variables")

    def __init__(self, devices: Iterable[torch.device], *, whole: bool = False) -> None:
        self._kinds = {"cpu", *(device.type for device in devices)} - {"meta"}
        self._variables = contextvars.copy_context()
        self._then = ThreadState.capture(self._kinds) if whole or self._any_set() else None

    def _any_set(self) -> bool:
        return modes_active() or any(map(torch.is_autocast_enabled, self._kinds))

    def run(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """``function(*args, **kwargs)`` with the context variables that there were."""
        return self._variables.copy().run(function, *args, **kwargs)

    def to_restore(self) -> ThreadState | None:
        """The present settings, if :meth:`apply` would change them."""
        return None if self._then is None and not self._any_set() else ThreadState.capture(self._kinds)

    def apply(self, present: ThreadState) -> None:
        """Gives this thread the settings of the first run, but for grad mode, which is the caller's, and variables."""
        off = tuple([(kind, False, dtype) for kind, _, dtype in present.autocasts])
        (self._then or replace(present, autocasts=off)).apply(recomputation=True)

    def restore(self, before: ThreadState) -> None:
        """Ends :meth:`apply`. May be called again."""
        before.restore(pushed=() if self._then is None else self._then.dispatch_modes)


@functools.cache
def _kind_here() -> list[str]:
    device = torch.accelerator.current_accelerator()
    return [] if device is None else [device.type]


def restores_thread_state(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which leaves this thread's settings as they were also if an interrupt stops a context's exit."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        before = ThreadState.capture(_kind_here())
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            # An exception of the packages' own ends a call that is suspended, and leaves its contexts as it should.
            if isinstance(error, Exception) or not _is_ours(type(error).__module__):
                close_contexts(error)
                before.restore()
            raise

    return wrapped


def close_contexts(error: BaseException) -> None:
    """Ends the contexts of :mod:`contextlib` that an interrupt kept the ``with`` statement from ending.

    A generator would otherwise restore what it saved when the traceback is freed, in the middle of other code, and an
    ``ExitStack`` never; nor has that a context that it is just entering, or that it has taken off to leave.
    """
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        ending = frame.f_code.co_filename == contextlib.__file__
        if not ending and not _is_ours(frame.f_globals.get("__name__", "")):
            continue
        for value in reversed(frame.f_locals.values()):
            # Of a context that a stack was leaving, before the others in it, there is only its bound exit.
            context = getattr(value, "__self__", value) if ending else value
            with contextlib.suppress(Exception):  # the first error counts
                if isinstance(context, contextlib.ExitStack):
                    context.close()
                elif ending and isinstance(context, contextlib._GeneratorContextManager):
                    context.gen.close()


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


#: Those whose objects and modules keep their own state.
PACKAGES = ("pipe", "offload", "gradcache")
