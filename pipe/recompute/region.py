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
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from pipe.recompute.generators import Generator, generators_in, generators_of
from pipe.recompute.module_hooks import HookAttributes
from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.objects import Objects, Present
from pipe.recompute.phase import phase
from pipe.recompute.replay import shared_generators
from pipe.recompute.thread_state import ThreadState, with_variables
from pipe.torch_private.dispatch import modes_active

__all__ = ["Region", "RegionState", "Settings", "Settled"]

#: Runs before which generators are looked for.
RUNS_NOTED = 2

#: See :attr:`Region.settings`.
Settled = tuple[tuple[bool, bool], ...]


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
        self._find_generators()
        self.modules = [module for _, module in self.watched.modules]

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
        if self._begun < RUNS_NOTED:  # generators may be assigned at any time before
            self._begun += 1
            self.watched.find_generators()
            self._find_generators()
        return RegionState(self, self.settings if settings is None else settings)

    @property
    def settings(self) -> Settled:
        """On what it depends what the modules do: of each, its mode, and whether it has no forward hooks."""
        # In one list: properties and generators cost a call each.
        return tuple([(m.training, not m._forward_hooks and not m._forward_pre_hooks) for m in self.modules])


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
        return _no_autocast({"cpu", *self._kinds}) if _any_set(self._kinds) else contextlib.nullcontext()


def _any_set(kinds: list[str]) -> bool:
    return modes_active() or torch.is_autocast_enabled("cpu") or any(map(torch.is_autocast_enabled, kinds))


@contextlib.contextmanager
def _no_autocast(kinds: Iterable[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class RegionState:
    """The state of a region before one run. ``None`` parts need no restoring."""

    __slots__ = ("_module_state", "_objects", "_region", "_settings", "_states")

    def __init__(self, region: Region, settings: Settled) -> None:
        self._region, self._settings = region, settings
        self._objects: Objects | None = None
        self._states: list[tuple[Generator, Any]] = [(each, each.get()) for each in region.generators(settings)]
        watched = region.watched
        stateful = watched.buffers or watched.stateful.modules or [plain for _, plain in settings if not plain]
        self._module_state = ModuleState(watched, attributes=True) if stateful else None

    def first(self) -> _First:
        """A context for the first run."""
        return _First(self)

    def again(self) -> _Again:
        """A context for a further run, whose changes are undone."""
        return _Again(self)

    def add_objects(self, objects: Sequence[Any]) -> None:
        """Before the first run: adds what can be reached from the objects that the modules get as arguments."""
        self._objects = Objects(objects)
        known = self._region.watched.generators
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

    @property
    def devices(self) -> Sequence[torch.device]:
        """Those that the modules draw random numbers on."""
        return self._region.devices

    def take_back(self) -> None:
        """After the first run: undoes what it drew, and wrote into buffers and attributes."""
        for generator, before in self._states:
            generator.set(before)
        if self._module_state is not None:
            self._module_state.take_back(attributes=True)
        if self._objects is not None:
            self._objects.take_back()

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """To be held while :meth:`again`: two recomputations that rewind a generator of the process mix their draws."""
        shared = any(generator.shared for generator, _ in self._states)
        return shared_generators if shared else contextlib.nullcontext()

    @property
    def drawn(self) -> bool:
        """After the first run: whether it drew random numbers."""
        return bool(self._states)

    def _record_changes(self) -> None:
        self._states = [(each, state) for each, state in self._states if each.moved(state)]
        if self._states:
            self._region.note_drawn([each for each, _ in self._states])
        if self._module_state is not None:
            self._module_state.record_changes(others=True)
        if self._objects is not None:
            self._objects.record_changes()


class _First:
    """See :meth:`RegionState.first`."""

    __slots__ = ("_checkpointing", "_running", "_state")

    def __init__(self, state: RegionState) -> None:
        self._state = state
        self._running: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._checkpointing, phase.checkpointing = phase.checkpointing, True
        if self._state._module_state is not None:
            self._running = self._state._module_state.running()
            self._running.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        phase.checkpointing = self._checkpointing
        if self._running is not None:
            self._running.__exit__(kind, error, traceback)
        if kind is None:
            self._state._record_changes()


class _Again:
    """See :meth:`RegionState.again`. It can be left again where an interrupt kept it from being left."""

    __slots__ = ("_buffers", "_entered", "_generators", "_hooks", "_modes", "_objects", "_phase", "_running", "_state")

    def __init__(self, state: RegionState) -> None:
        self._state = state
        self._entered = False

    def __enter__(self) -> None:
        state, region = self._state, self._state._region
        module_state, settings = state._module_state, region.settings
        hooked = [m for m, (_, plain) in zip(region.modules, settings, strict=True) if not plain]
        self._phase = phase.checkpointing, phase.recomputing
        self._generators = [(generator, generator.get()) for generator, _ in state._states]
        self._modes = [training for training, _ in settings]
        self._hooks = HookAttributes(region.modules if module_state is not None else hooked)
        watched = () if module_state is None else region.watched.buffers
        self._buffers = [(owner._buffers, name, owner._buffers.get(name)) for owner, name, _ in watched]
        self._running: contextlib.AbstractContextManager[None] | None = None
        self._objects: Present | None = None
        self._entered = True
        phase.checkpointing, phase.recomputing = False, True
        if state._objects is not None:
            self._objects = state._objects.again()
        for generator, before in state._states:
            generator.set(before)
        if module_state is not None:
            self._running = module_state.again(strict=False)
            self._running.__enter__()
            return
        for module in hooked:  # modules that had hooks have a ``ModuleState``
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        if settings != state._settings:
            _set_modes(region, [training for training, _ in state._settings])

    def __exit__(self, *raised: Any) -> None:
        if self._running is not None:
            self._running.__exit__(*raised)
        self.restore()

    def restore(self) -> None:
        """Restores what it found. May be called at any time, and again."""
        if not self._entered:
            return
        for generator, now in self._generators:
            generator.set(now)
        _set_modes(self._state._region, self._modes)
        self._hooks.restore()
        for buffers, name, buffer in self._buffers:
            buffers[name] = buffer
        if self._objects is not None:
            self._objects.restore()
        phase.checkpointing, phase.recomputing = self._phase
        self._entered = False


def _set_modes(region: Region, modes: list[bool]) -> None:
    for module, training in zip(region.modules, modes, strict=True):
        if module.training is not training:
            module.training = training
