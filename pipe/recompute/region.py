"""The state besides inputs that a recomputation must find as its forward did: generators, buffers, attributes, modes.

``torch.utils.checkpoint`` restores autocast and the global generators. A :class:`Region` adds what modules hold, for
one call of some modules that is to be repeated::

    state = region.begin()
    with state.first():
        output = call(...)
    ...
    with state.again():
        call(...)

Guarantees
    * Buffers, attributes, objects that are arguments, and modes have their values from before the first run in each
      further one, and those from before it afterwards: a running statistic, or a counter, counts once.
    * A generator that the first run drew from repeats its draws. One that it did not draw from is neither read nor
      written again.
    * Modules without buffers that changed no attribute in their first runs cost one comparison of each generator.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from pipe.recompute.generators import Generator, generators_in, generators_of
from pipe.recompute.module_contents import ModuleContents
from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.objects import Objects, Present
from pipe.recompute.phase import phase
from pipe.recompute.thread_state import ThreadState, no_autocast, shared_generators, with_variables
from pipe.torch_private.dispatch import modes_active

__all__ = ["Region", "RegionState", "RunState", "Settings", "Settled"]

#: Runs before which generators are looked for.
RUNS_NOTED = 2

#: See :attr:`Region.settings`.
Settled = tuple[tuple[bool, bool], ...]


class Settings:
    """The settings of this thread that a further run must have again: autocast, default device, modes."""

    __slots__ = ("_kinds", "_then", "_variables")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._kinds = [device.type for device in devices]
        self._variables = contextvars.copy_context()
        self._then = ThreadState.capture(self._kinds) if _any_set(self._kinds) else None

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """A context with these settings."""
        if self._then is not None:
            # Without autocast's cache of casted weights, which outlives this run.
            return self._then.again(recomputation=True, cache_casts=False)
        if self._variables != contextvars.copy_context():
            return with_variables(self._variables)
        return no_autocast({"cpu", *self._kinds}) if _any_set(self._kinds) else contextlib.nullcontext()


def _any_set(kinds: list[str]) -> bool:
    return modes_active() or torch.is_autocast_enabled("cpu") or any(map(torch.is_autocast_enabled, kinds))


class RunState:
    """The state before one run: generators, what modules hold (None: nothing of it can change), and objects.

    Args:
        devices: those that the run draws random numbers on.
        generators: those that it may draw from.
    """

    __slots__ = ("_module_state", "_objects", "_states", "devices")

    def __init__(
        self, devices: Iterable[torch.device], generators: Iterable[Generator], module_state: ModuleState | None
    ) -> None:
        self.devices = devices
        self._objects: Objects | None = None
        self._states: list[tuple[Generator, Any]] = [(each, each.get()) for each in generators]
        self._module_state = module_state

    def first(self) -> _First:
        """A context for the first run."""
        return _First(self)

    def again(self) -> _Again:
        """A context for a further run, whose changes are undone."""
        return _Again(self)

    def add_objects(self, objects: Sequence[Any]) -> None:
        """Before the first run: adds what can be reached from the objects that the modules get as arguments."""
        self._objects = Objects(objects)
        known = [generator.owner for generator, _ in self._states]
        more = [each for each in generators_in(self._objects.found) if not any(each is other for other in known)]
        self._states += [(each, each.get()) for each in generators_of((), more)[-len(more) :] if more]

    def check(self, name: str) -> None:
        """Raises RuntimeError if a further run would read other values of buffers than the first; ``name``: of it."""
        written = [] if self._module_state is None else self._module_state.written_since
        if written:
            raise RuntimeError(
                f"buffer {', '.join(written[:3])} of {name} was written in place between the forward and its backward, "
                f"which runs the layers again: they would read the new value. Write it after the backward, assign a "
                f"new tensor instead, or compute without recomputation"
            )

    def take_back(self) -> None:
        """After the first run: undoes what it drew, and wrote into buffers and attributes."""
        for generator, before in self._states:
            generator.set(before)
        if self._module_state is not None:
            self._module_state.take_back()
        if self._objects is not None:
            self._objects.take_back()

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """To be held while :meth:`again`: two recomputations that rewind a generator of the process mix their draws."""
        for generator, _ in self._states:
            if generator.shared:
                return shared_generators
        return contextlib.nullcontext()

    @property
    def drawn(self) -> bool:
        """After the first run: whether it drew random numbers."""
        return bool(self._states)

    def record_changes(self) -> None:
        """After the first run: drops what it did not change."""
        self._states = [(each, state) for each, state in self._states if each.moved(state)]
        if self._module_state is not None:
            self._module_state.record_changes()
        if self._objects is not None:
            self._objects.record_changes()

    def present(self) -> ModuleContents | None:
        """What the modules hold now, to be put back after a further run."""
        return None if self._module_state is None else self._module_state.present()

    def put(self) -> None:
        """Gives the modules their state from before the first run."""
        if self._module_state is not None:
            self._module_state.put()


class Region:
    """Modules that run more than once with the same result.

    Args:
        modules: by name; their submodules are part of the region.
        devices: the devices that they draw random numbers on.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], devices: Sequence[torch.device]) -> None:
        self._group = nn.Module()
        self._group._modules.update(dict(modules))
        self.devices = devices
        self.find()

    def find(self) -> None:
        """Finds the modules, buffers and generators that there are now."""
        self._begun = 0
        self.watched = WatchedModule(self._group)
        #: Whether runs change attributes.
        self.changes = False
        self._find_generators()
        self.modules = self.watched.all

    def _find_generators(self) -> None:
        self._generators = generators_of(self.devices, self.watched.generators)
        #: Those of torch, and of the modules themselves, are always compared: that takes no time.
        self._drawn = [each for each in self._generators if each.name not in ("python", "numpy")]
        self._runs: dict[Settled, int] = {}

    def generators(self, settings: Settled) -> Sequence[Generator]:
        """Those that the modules may draw from: of the process, only if they did in their first runs."""
        runs = self._runs[settings] = self._runs.get(settings, 0) + 1
        return self._generators if runs <= RUNS_NOTED else self._drawn

    def note_drawn(self, drawn: Sequence[Generator]) -> None:
        """Called after a first run with the generators that it drew from."""
        more = [each for each in drawn if each not in self._drawn]
        if more:
            self._drawn = [each for each in self._generators if each in self._drawn or each in more]

    def begin(self, settings: Settled | None = None) -> RegionState:
        """The state before a first run; ``settings``: the present :attr:`settings`, if they are known."""
        settings = self.settings if settings is None else settings
        stateful = bool(self.watched.buffers) or self.changes or False in [plain for _, plain in settings]
        if self._begun < RUNS_NOTED:  # generators may be assigned at any time before
            self._begun += 1
            self.watched.find_generators()
            self._find_generators()
            stateful = True
        return RegionState(self, settings, ModuleState(self.watched) if stateful else None)

    @property
    def settings(self) -> Settled:
        """On what it depends what the modules do: of each, its mode, and whether it has no forward hooks."""
        # In one list: properties and generators cost a call each.
        return tuple([(m.training, not m._forward_hooks and not m._forward_pre_hooks) for m in self.modules])


class RegionState(RunState):
    """The state of a region before one run, from which it is learned what its later runs need to save."""

    __slots__ = ("_modes", "_region", "_settings")

    def __init__(self, region: Region, settings: Settled, module_state: ModuleState | None) -> None:
        super().__init__(region.devices, region.generators(settings), module_state)
        self._region, self._settings = region, settings

    def record_changes(self) -> None:
        """After the first run: drops what it did not change, and notes what it did."""
        super().record_changes()
        if self._states:
            self._region.note_drawn([each for each, _ in self._states])
        if self._module_state is not None:
            self._region.changes |= self._module_state.changed

    def present(self) -> ModuleContents | None:
        """What the modules hold now, if it is to be put back."""
        if self._module_state is None and self._region.settings == self._settings:
            return None
        return ModuleContents(self._region.modules)

    def put(self) -> None:
        """Gives the modules their state from before the first run."""
        if self._module_state is not None:
            self._region.changes |= self._module_state.put()
        elif self._region.settings != self._settings:
            for module, (training, _) in zip(self._region.modules, self._settings, strict=True):
                module._forward_hooks.clear()  # modules that had hooks have a ``ModuleState``
                module._forward_pre_hooks.clear()
                module.training = training


class _First:
    """See :meth:`RunState.first`."""

    __slots__ = ("_checkpointing", "_running", "_state")

    def __init__(self, state: RunState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._checkpointing, phase.checkpointing = phase.checkpointing, True
        module_state = self._state._module_state
        self._running = None if module_state is None or not module_state._before else module_state.running()
        if self._running is not None:
            self._running.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        phase.checkpointing = self._checkpointing
        if self._running is not None:
            self._running.__exit__(kind, error, traceback)
        if kind is None:
            self._state.record_changes()


class _Again:
    """See :meth:`RunState.again`. It can be left again where an interrupt kept it from being left."""

    __slots__ = ("_contents", "_entered", "_generators", "_objects", "_phase", "_state")

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._entered = False

    def __enter__(self) -> None:
        state = self._state
        self._phase = phase.checkpointing, phase.recomputing
        self._generators = [(generator, generator.get()) for generator, _ in state._states]
        self._contents = state.present()
        self._objects: Present | None = None
        self._entered = True
        phase.checkpointing, phase.recomputing = False, True
        if state._objects is not None:
            self._objects = state._objects.again()
        for generator, before in state._states:
            generator.set(before)
        state.put()

    def __exit__(self, *raised: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Restores what it found. May be called at any time, and again."""
        if not self._entered:
            return
        for generator, now in self._generators:
            generator.set(now)
        if self._contents is not None:
            self._contents.put()
        if self._objects is not None:
            self._objects.restore()
        phase.checkpointing, phase.recomputing = self._phase
        self._entered = False
