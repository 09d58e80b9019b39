"""Runs layers a second time with the state of their first forward, so that the result is the same.

The two passes of GradCache use it. Generators and casts are
restored by :class:`~pipe.recompute.replay.Replay`; modes, buffers and attributes by
:class:`~pipe.recompute.module_state.ModuleState`; an input that layers write in place by
:class:`~pipe.recompute.input_writes.InputWrites`. ::

    layers = RepeatableLayers(watched, devices, InputWrites("layer 3"))
    rerun = layers.rerun()
    with rerun.first():
        output = layers.run(call, input, rerun)
    ...
    output = rerun.repeat(call, input)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

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
        layers: the modules that run.
        attributes: False for a part of a forward, whose attributes the next part reads.
    """

    __slots__ = ("_copy", "copies_input", "module_state", "replay")

    def __init__(self, layers: RepeatableLayers, attributes: bool = True) -> None:
        watched = layers.watched
        refuse_cached_parametrizations(watched.all)
        self.replay = Replay.capture(layers.devices, watched.generators)
        self.module_state = ModuleState(watched, attributes=attributes)
        #: Whether the layers write into their input, so that each run needs a copy of it.
        self.copies_input = False
        self._copy = layers.inputs.copy

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """A context for the first forward. Raises RuntimeError if it changed a value that could not be saved."""
        with self.module_state.running():
            yield
        self.replay.record_changes()
        self.module_state.record_changes()

    def take_back(self) -> None:
        """Undoes what the first forward, which has just ended, drew and wrote into buffers."""
        self.replay.rewind()
        self.module_state.take_back()

    @contextlib.contextmanager
    def again(self, *, until: contextlib.ExitStack | None = None, settings: bool = True) -> Iterator[None]:
        """A context with the state from the start of the forward; restores the present state at its end.

        Args:
            until: restores modes, buffers and attributes instead of this context, for a backward that reads them.
            settings: see :meth:`pipe.recompute.replay.Replay.again`.
        """
        with contextlib.ExitStack() as stack:
            (stack if until is None else until).enter_context(self.module_state.again())
            stack.enter_context(self.replay.again(settings=settings))
            stack.enter_context(enable_checkpointing(False))
            yield

    def repeat(self, call: Call, value: Any, *, until: contextlib.ExitStack | None = None) -> Any:
        """``call(value)`` again; ``value`` is not changed."""
        with self.again(until=until):
            return call(self._copy(value) if self.copies_input else value)


@contextlib.contextmanager
def trial(watched: Sequence[WatchedModule], devices: Collection[torch.device]) -> Iterator[None]:
    """A context for a trial forward, whose changes of modules and generators are undone.

    ``is_recomputing`` is True in it, for layers that count forwards in Python.
    """
    reruns = [RepeatableLayers(each, devices, InputWrites("a layer")).rerun() for each in watched]
    with contextlib.ExitStack() as stack:
        for rerun in reruns:
            stack.enter_context(rerun.module_state.running())
        stack.enter_context(enable_recomputing())
        try:
            yield
        finally:
            for rerun in reruns:
                rerun.take_back()


class RepeatableLayers:
    """Layers that can run again, with knowledge from their earlier runs.

    Args:
        watched: the modules.
        devices: the devices that they run on.
        inputs: whether they write into their input.
    """

    def __init__(self, watched: WatchedModule, devices: Collection[torch.device], inputs: InputWrites) -> None:
        self.watched, self.devices, self.inputs = watched, devices, inputs

    def rerun(self, *, attributes: bool = True) -> Rerun:
        """To be called just before a first run that is to be repeated."""
        return Rerun(self, attributes)

    @property
    def modes(self) -> tuple[bool, ...]:
        """The ``training`` flags of all modules."""
        return tuple([module.training for module in self.watched.all])

    def run(self, call: Call, value: Any, rerun: Rerun | None = None) -> Any:
        """A first run: the result of ``call(value)``; ``rerun`` is told if that needs a copy of ``value``."""
        modes = self.modes
        # Autocast's cache would keep casted weights after their use, and casts whose graph was freed.
        with self.inputs.survived(value, modes) as given, autocast_without_cache(self.devices):
            output = call(given)
        if rerun is not None:
            rerun.copies_input = self.inputs.copies(modes)
        return output
