"""Runs layers a second time with the state of their first forward, and with an input that they may write in place::

layers = RepeatableLayers(watched, devices, InputWrites("layer 3"))
replay = layers.begin()
with replay.first():
    output = layers.run(call, input, replay)
...
output = layers.repeat(call, input, replay)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pipe.recompute.input_writes import InputWrites
from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.phase import enable_recomputing
from pipe.recompute.replay import Replay, autocast_without_cache
from pipe.torch_private.modules import caches_parametrizations

__all__ = ["RepeatableLayers", "refuse_cached_parametrizations", "trial"]

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


@contextlib.contextmanager
def trial(watched: Sequence[WatchedModule], devices: Collection[torch.device]) -> Iterator[None]:
    """A context for a trial forward, whose changes of modules and generators are undone.

    ``is_recomputing`` is True in it, for layers that count forwards in Python.
    """
    replays = [RepeatableLayers(each, devices, InputWrites("a layer")).begin() for each in watched]
    with contextlib.ExitStack() as stack:
        for replay in replays:
            stack.enter_context(replay.running())
        stack.enter_context(enable_recomputing())
        try:
            yield
        finally:
            for replay in replays:
                replay.take_back()


class RepeatableLayers:
    """Layers that can run again, with knowledge from their earlier runs.

    Args:
        watched: the modules.
        devices: the devices that they run on.
        inputs: whether they write into their input.
    """

    def __init__(self, watched: WatchedModule, devices: Collection[torch.device], inputs: InputWrites) -> None:
        self.watched, self.devices, self.inputs = watched, devices, inputs

    def begin(self, *, attributes: bool = True) -> Replay:
        """To be called just before a first run that is to be repeated.

        ``attributes``: False for a part of a forward, whose attributes the next part reads.
        """
        refuse_cached_parametrizations(self.watched.all)
        state = ModuleState(self.watched, attributes=attributes, compares=False)
        return Replay.capture(self.devices, self.watched.generators, state)

    @property
    def modes(self) -> tuple[bool, ...]:
        """The ``training`` flags of all modules."""
        return tuple([module.training for module in self.watched.all])

    def run(self, call: Call, value: Any, replay: Replay | None = None) -> Any:
        """A first run: the result of ``call(value)``; ``replay`` notes if that needs a copy of ``value``."""
        modes = self.modes
        # Autocast's cache would keep casted weights after their use, and casts whose graph was freed.
        with self.inputs.survived(value, modes) as given, autocast_without_cache(self.devices):
            output = call(given)
        if replay is not None:
            replay.copies_input = self.inputs.copies(modes)
        return output

    def repeat(self, call: Call, value: Any, replay: Replay, *, until: contextlib.ExitStack | None = None) -> Any:
        """``call(value)`` again; ``value`` is not changed. ``until``: see :meth:`Replay.again`."""
        with replay.again(until=until):
            return call(self.inputs.copy(value) if replay.copies_input else value)
