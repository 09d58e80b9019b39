"""Saves random generator states and thread settings before a forward, and restores them around its recomputation.

A recomputed forward is only the same function if it draws the same random numbers and runs under the same settings
(autocast, default device, modes, saved-tensor hooks: see :mod:`pipe.recompute.thread_state`).

Guarantees
    * Inside :meth:`Replay.again` every saved generator repeats the draws of the first forward. Afterwards it has the
      state from before the recomputation, so the user's draws do not change.
    * A generator that the forward did not draw from is dropped by :meth:`Replay.record_changes`: a deterministic
      forward is recomputed without reading or writing any generator.
    * Recomputations in several threads that draw from generators of the process or of layers run one at a time.

Assumes
    * Nothing else draws from a shared generator *while* a recomputation that draws from it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pipe.nested import tensors_in
from pipe.recompute.generators import Generator, generators_of
from pipe.recompute.phase import enable_recomputing
from pipe.recompute.thread_state import ThreadState, shared_generators

__all__ = ["Replay", "autocast_without_cache", "devices_of"]


def devices_of(*values: Any) -> set[torch.device]:
    """The devices of all tensors in nested ``values``."""
    return {tensor.device for tensor in tensors_in(values)}


@contextlib.contextmanager
def autocast_without_cache(devices: Iterable[torch.device]) -> Iterator[None]:
    """A context with the present autocast settings, but without the cache of casted weights.

    For a first forward under ``no_grad``: a cast that it cached would have no gradient, and a later forward inside the
    same autocast would use it.
    """
    kinds = {"cpu", *(device.type for device in devices)} - {"meta"}
    if not any(map(torch.is_autocast_enabled, kinds)):
        yield
        return
    with ThreadState.capture(kinds).again(cache_casts=False):
        yield


class Replay:
    """The generator states and thread settings at the start of one forward.

    Usage::

        replay = Replay.capture([device])
        output = function(input)            # draws random numbers, casts
        replay.record_changes()                       # drops the generators that were not drawn from
        ...
        with replay.again():
            output = function(input)        # the same numbers, the same casts

    Source: GPipe (Huang et al., 2019), section 2.3; torchgpipe saves the CPU's and one device's state only.
    """

    __slots__ = ("_states", "_thread_state")

    def __init__(self, states: list[tuple[Generator, Any]], thread_state: ThreadState) -> None:
        self._states = states
        self._thread_state = thread_state

    @classmethod
    def capture(cls, devices: Iterable[torch.device], generators: Iterable[Any] = ()) -> Replay:
        """Saves the state before a forward that runs on ``devices`` and may draw from ``generators`` of layers."""
        devices = set(devices)
        states = [(generator, generator.get()) for generator in generators_of(devices, generators)]
        return cls(states, ThreadState.capture(device.type for device in devices))

    def record_changes(self) -> Replay:
        """Drops every generator whose state has not changed since :meth:`capture`. Returns itself."""
        self._states = [(generator, state) for generator, state in self._states if generator.moved(state)]
        return self

    @property
    def drawn(self) -> tuple[str, ...]:
        """Names of the generators that a replay rewinds."""
        return tuple(generator.name for generator, _ in self._states)

    def rewind(self) -> None:
        """Sets the saved generators to their states from before the forward."""
        for generator, state in self._states:
            generator.set(state)

    @contextlib.contextmanager
    def again(self, *, settings: bool = True) -> Iterator[None]:
        """A context with the generator states and thread settings of :meth:`capture`; restores the present ones.

        Grad mode is the caller's: a recomputation usually needs a graph where the forward had none.

        Args:
            settings: False for a part of a forward, which runs with the settings that the parts before it have left.
        """
        shared = any(generator.shared for generator, _ in self._states)
        # Not by the stack: an interrupt between taking a lock and registering its release would leave it locked.
        with shared_generators if shared else contextlib.nullcontext(), contextlib.ExitStack() as stack:
            for generator, state in self._states:
                # Registered before the generator is rewound, so that an exception in between restores all of them.
                stack.callback(generator.set, generator.get())
                generator.set(state)
            stack.enter_context(enable_recomputing())
            if settings:
                # Without autocast's cache of casted weights: it is keyed by parameter and outlives a recomputation
                # inside an enclosing autocast; it may hold a cast made under no_grad, whose gradient would be lost.
                stack.enter_context(self._thread_state.again(recomputation=True, cache_casts=False))
            yield
