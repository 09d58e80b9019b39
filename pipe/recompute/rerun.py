"""Runs layers a second time with the state of their first forward, so that the result is the same.

Checkpointing, the two passes of GradCache, and the engine that streams shards all use it. Generators and casts are
restored by :class:`~pipe.recompute.replay.Replay`; modes, buffers and attributes by
:class:`~pipe.recompute.module_state.ModuleState`; an input that layers write in place by
:class:`~pipe.recompute.input_writes.InputWrites`. ::

    layers = RepeatableLayers(watched, devices, InputWrites("layer 3"))
    rerun = layers.rerun()
    with rerun.first():
        output, _ = layers.run(call, input, rerun=rerun)
    ...
    output = rerun.repeat(call, input)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipe.nested import map_distinct
from pipe.recompute.generators import generators_in
from pipe.recompute.input_writes import InputWrites
from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.phase import enable_checkpointing, enable_recomputing
from pipe.recompute.replay import Replay, autocast_without_cache
from pipe.torch_private.modules import caches_parametrizations

__all__ = ["RepeatableLayers", "Rerun", "refuse_cached_parametrizations", "trial"]

Call = Callable[[Any], Any]


def refuse_cached_parametrizations(modules: Iterable[nn.Module]) -> None:
    """Raises RuntimeError inside ``parametrize.cached()`` if one of the modules has a parametrization.

    The cache belongs to the process. A second run finds it empty, computes weights again and moves the vectors of a
    spectral norm once more; or finds weights of a run without gradients; or those of a graph that ended.
    """
    if caches_parametrizations(modules):
        raise RuntimeError(
            "expected no torch.nn.utils.parametrize.cached() around layers that run again for their gradients or are "
            "loaded and evicted: the second run would not find what the first one cached; leave the context out, or "
            "enter it inside a layer's forward"
        )


class Rerun:
    """The state of one forward, besides its input, that is needed to repeat it.

    Args:
        watched: the modules that run; None if not known.
        devices: the devices that they run on.
        value: the input of the modules, which may hold random generators.
        attributes: False for a part of a forward, whose attributes the next part reads.
    """

    __slots__ = ("copies_input", "copy", "module_state", "replay")

    def __init__(
        self,
        watched: WatchedModule | None,
        devices: Collection[torch.device],
        value: Any = None,
        attributes: bool = True,
    ) -> None:
        if watched is not None:
            refuse_cached_parametrizations(module for _, module in watched.modules)
        held = [] if watched is None else watched.generators
        passed = [] if value is None else generators_in(value)
        more = [each for each in passed if not any(each is known for known in held)]
        self.replay = Replay.capture(devices, [*held, *more])
        self.module_state = None if watched is None else ModuleState(watched, attributes=attributes)
        #: Whether the layers write into their input, so that each run needs a copy of it.
        self.copies_input = False
        self.copy: Callable[[Any], Any] = partial(map_distinct, Tensor.clone)

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """A context for the first forward. Raises RuntimeError if it changed a value that could not be saved."""
        with contextlib.nullcontext() if self.module_state is None else self.module_state.running():
            yield
        self.replay.record_changes()
        if self.module_state is not None:
            self.module_state.record_changes()

    @property
    def written(self) -> list[tuple[nn.Module, str]]:
        """The buffers that the first forward certainly wrote, by owner and name."""
        return [] if self.module_state is None else self.module_state.written

    def take_back(self) -> None:
        """Undoes what the first forward, which has just ended, drew and wrote into buffers."""
        self.replay.rewind()
        if self.module_state is not None:
            self.module_state.take_back()

    @contextlib.contextmanager
    def again(
        self, *, strict: bool = False, until: contextlib.ExitStack | None = None, settings: bool = True
    ) -> Iterator[None]:
        """A context with the state from the start of the forward; restores the present state at its end.

        Args:
            strict: raise if parameters or modes have changed.
            until: restores modes, buffers and attributes instead of this context, for a backward that reads them.
            settings: see :meth:`pipe.recompute.replay.Replay.again`.
        """
        with contextlib.ExitStack() as stack:
            if self.module_state is not None:
                (stack if until is None else until).enter_context(self.module_state.again(strict=strict))
            stack.enter_context(self.replay.again(settings=settings))
            stack.enter_context(enable_checkpointing(False))
            yield

    def repeat(
        self,
        call: Call,
        value: Any,
        mode: contextlib.AbstractContextManager[Any] | None = None,
        *,
        until: contextlib.ExitStack | None = None,
    ) -> Any:
        """``call(value)`` again, inside the context ``mode``; ``value`` is not changed."""
        mode = contextlib.nullcontext() if mode is None else mode
        with self.again(until=until):
            given = self.copy(value) if self.copies_input else value
            with mode:
                return call(given)


@contextlib.contextmanager
def trial(watched: Sequence[WatchedModule], devices: Collection[torch.device]) -> Iterator[None]:
    """A context for a trial forward, whose changes of modules and generators are undone.

    ``is_recomputing`` is True in it, for layers that count forwards in Python.
    """
    reruns = [Rerun(each, devices) for each in watched]
    with contextlib.ExitStack() as stack:
        for rerun in reruns:
            if rerun.module_state is not None:
                stack.enter_context(rerun.module_state.running())
        stack.enter_context(enable_recomputing())
        try:
            yield
        finally:
            for rerun in reruns:
                rerun.take_back()


class RepeatableLayers:
    """Layers that can run again, with knowledge from their earlier runs."""

    def __init__(
        self, watched: WatchedModule, devices: Collection[torch.device], inputs: InputWrites | None = None
    ) -> None:
        self.watched = watched
        self.devices = devices
        self.inputs = InputWrites("a layer") if inputs is None else inputs

    def rerun(self, value: Any = None, *, attributes: bool = True) -> Rerun:
        """To be called just before a first run that is to be repeated; the arguments: see :class:`Rerun`."""
        rerun = Rerun(self.watched, self.devices, value, attributes)
        rerun.copy = self.inputs.copy
        return rerun

    @property
    def modes(self) -> tuple[bool, ...]:
        """The ``training`` flags of all modules."""
        return tuple([module.training for _, module in self.watched.modules])

    def run(
        self,
        call: Call,
        value: Any,
        *around: contextlib.AbstractContextManager[Any],
        rerun: Rerun | None = None,
        keeps_input: bool = True,
    ) -> tuple[Any, Any]:
        """A first run: ``call(value)``, where ``value`` is not changed if ``keeps_input``.

        Args:
            call: runs the layers.
            value: their input.
            around: contexts around the layers only.
            rerun: told whether it has to copy the value as well.

        Returns:
            The result, and the input that the layers ran on: ``value``, or a copy of it.
        """
        modes = self.modes
        survived = self.inputs.survived(value, modes) if keeps_input else contextlib.nullcontext(value)
        with survived as given, contextlib.ExitStack() as stack:
            # Autocast's cache would keep casted weights after their use, and casts whose graph was freed.
            stack.enter_context(autocast_without_cache(self.devices))
            for mode in around:
                stack.enter_context(mode)
            output = call(given)
        if rerun is not None:
            rerun.copies_input = self.inputs.copies(modes)
        return output, given
