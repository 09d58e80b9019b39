"""The state besides arguments that a second run of some layers must find as the first did.

``torch.utils.checkpoint`` restores autocast and the global generators. A :class:`Replay` adds the generators that
layers hold, what modules and arguments hold (buffers, attributes, hooks), and all settings of the thread::

    replay = Replay.capture([device], modules=ModuleState(watched))
    with replay.first():
        output = call(...)
    ...
    with replay.again():
        call(...)

Guarantees
    * In each further run buffers, attributes, modes and objects that are arguments have their values from before the
      first run, and those from before it afterwards: a running statistic, or a counter, counts once.
    * Every generator repeats the draws of the first run, and has its present state afterwards. One that the first run
      did not draw from is neither read nor written again.
    * Further runs in several threads that draw from generators of the process or of layers run one at a time.

Assumes
    * Nothing else draws from a shared generator *while* a run that draws from it is repeated.

Source: GPipe (Huang et al., 2019), section 2.3; torchgpipe saves the CPU's and one device's state only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from pipe.nested import tensors_in
from pipe.recompute.captured import Captured
from pipe.recompute.contents import Contents
from pipe.recompute.generators import Generator, generators_among, generators_of
from pipe.recompute.module_state import ModuleState
from pipe.recompute.phase import phase
from pipe.recompute.thread_state import Settings, ThreadState, shared_generators

__all__ = ["Replay", "autocast_without_cache", "devices_of"]

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


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
    """The state before one run.

    Args:
        generators: those that the run may draw from.
        settings: of the thread.
        modules: what the modules that run hold; None: nothing of it can change.
        captured: what else the function that runs uses; it is compared.
    """

    __slots__ = ("_captured", "_objects", "_states", "copies_input", "modules", "settings")

    def __init__(
        self,
        generators: Iterable[Generator],
        settings: Settings,
        modules: ModuleState | None = None,
        captured: Captured | None = None,
    ) -> None:
        self._states: list[tuple[Generator, Any]] = [(each, each.get()) for each in generators]
        self.settings, self.modules, self._captured = settings, modules, captured
        #: Of objects that the modules get as arguments, or that the function refers to.
        self._objects = None if captured is None else Contents.of(captured.objects)
        #: Whether the layers write into their input, so that each run needs a copy of it.
        self.copies_input = False

    @classmethod
    def capture(
        cls, devices: Iterable[torch.device], generators: Iterable[Any] = (), modules: ModuleState | None = None
    ) -> Replay:
        """The state before a run on ``devices`` that may draw from ``generators`` of layers."""
        devices = set(devices)
        return cls(generators_of(devices, generators), Settings(devices, whole=True), modules)

    def add_arguments(self, objects: Sequence[Any]) -> None:
        """Before the first run: adds what can be reached from the objects that the modules get as arguments."""
        reached = Contents.reachable(objects)
        known = {id(generator.owner) for generator, _ in self._states}
        more = [each for each in generators_among(reached.values) if id(each.owner) not in known]
        self._states += [(each, each.get()) for each in more]
        self._objects = reached if self._objects is None else self._objects.with_those(reached)

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """A context for the first run. Raises RuntimeError if it changed a value that could not be saved."""
        with self.running():
            yield
        self.record_changes()

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """The same without :meth:`record_changes`."""
        return _NOTHING if self.modules is None else self.modules.running()

    def record_changes(self) -> Replay:
        """After the first run: drops what it did not change. Returns itself."""
        self._states = [(each, state) for each, state in self._states if each.moved(state)]
        if self.modules is not None:
            self.modules.record_changes()
        if self._objects is not None:
            self._objects.check("by the first run, which reads it")
        if self._captured is not None:
            self._captured.record_changes()
        return self

    def check(self, name: str) -> None:
        """Raises RuntimeError if a further run would read other values than the first; ``name``: of it."""
        if self.modules is not None:
            self.modules.check(name)
        if self._captured is not None:
            self._captured.check(name)

    def take_back(self) -> None:
        """After the first run: undoes what it drew, and wrote into buffers and attributes."""
        for generator, before in self._states:
            generator.set(before)
        if self.modules is not None:
            self.modules.take_back()
        if self._objects is not None:
            self._objects.put()

    @property
    def drawn(self) -> tuple[str, ...]:
        """After the first run: names of the generators that it drew from."""
        return tuple([generator.name for generator, _ in self._states])

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """To be held in a further run: two that rewind a generator of the process mix their draws."""
        for generator, _ in self._states:
            if generator.shared:
                return shared_generators
        return _NOTHING

    def present(self) -> Contents | None:
        """What the modules hold now, to be put back after a further run."""
        return None if self.modules is None else self.modules.present()

    def put(self) -> None:
        """Gives the modules their state from before the first run."""
        if self.modules is not None:
            self.modules.put()

    @contextlib.contextmanager
    def again(self, *, until: contextlib.ExitStack | None = None, settings: bool = True) -> Iterator[None]:
        """A context for a further run, whose changes are undone. Grad mode is the caller's.

        Args:
            until: restores modes, buffers and attributes instead of this context, for a backward that reads them.
            settings: False for a part of a run, which has the settings that the parts before it have left.
        """
        # Not by the stack: an interrupt between taking a lock and registering its release would leave it locked.
        with self.lock, contextlib.ExitStack() as stack:
            if until is not None:
                until.enter_context(Rewound(self, generators=False))
            stack.enter_context(Rewound(self, contents=until is None))
            if settings:
                stack.enter_context(self.settings.again())
            yield


class Rewound:
    """A context in which generators, modules and arguments are as before the first run.

    It can be left again where an interrupt kept it from being left.
    """

    __slots__ = ("_contents", "_entered", "_flags", "_generators", "_objects", "_replay", "_which")

    def __init__(self, replay: Replay, *, generators: bool = True, contents: bool = True) -> None:
        self._replay, self._which = replay, (generators, contents)
        self._entered = False

    def __enter__(self) -> None:
        replay = self._replay
        generators, contents = self._which
        states = replay._states if generators else ()
        self._flags = phase.checkpointing, phase.recomputing
        self._generators = [(generator, generator.get()) for generator, _ in states]
        self._contents = replay.present() if contents else None
        self._objects: Contents | None = None
        self._entered = True
        if generators:
            phase.checkpointing, phase.recomputing = False, True
        if contents and replay._objects is not None:
            self._objects = replay._objects.again()
        for generator, before in states:
            generator.set(before)
        if contents:
            replay.put()

    def __exit__(self, *raised: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Restores what it found. May be called at any time, and again."""
        if not self._entered:
            return
        for generator, now in self._generators:
            generator.set(now)
        for held in (self._contents, self._objects):
            if held is not None:
                held.put()
        if self._which[0]:
            phase.checkpointing, phase.recomputing = self._flags
        self._entered = False
