"""Layers that run more than once with the same result, and the state that a second run must find as the first did.

``torch.utils.checkpoint`` restores autocast and the global generators. A :class:`Replay` adds the generators that
layers hold, what modules, arguments and functions hold (buffers, attributes, hooks, variables), and all settings of the
thread::

    layers = Layers(module, devices=[device])
    replay = layers.begin()
    output = call(...)
    replay.record_changes()
    ...
    with replay.again():
        call(...)

Guarantees
    * In each further run buffers, attributes, modes, hooks and objects have their values from before the first run, and
      those from before it afterwards: a running statistic, or a counter, counts once.
    * Every generator repeats the draws of the first run, and has its present state afterwards. One that the first run
      did not draw from is neither read nor written again.
    * Further runs in several threads that draw from generators of the process or of layers run one at a time.
    * If parameters and modules are compared, :class:`RuntimeError` names those that were changed: gradients would be
      silently wrong.

Assumes
    * Nothing else draws from a shared generator *while* a run that draws from it is repeated, and one module does not
      compute in two threads at the same time.
    * A large buffer is written by torch operations, not through memory shared with NumPy or another library.

Source: GPipe (Huang et al., 2019), section 2.3; torchgpipe saves the CPU's and one device's state only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipe.nested import map_tensors, tensors_in
from pipe.recompute.buffers import Buffer, BufferHabits
from pipe.recompute.captured import captured
from pipe.recompute.contents import Contents
from pipe.recompute.generators import Generator, generators_in, generators_of, held_generator
from pipe.recompute.input_writes import InputWrites
from pipe.recompute.phase import enable_recomputing, phase
from pipe.recompute.thread_state import Settings, shared_generators
from pipe.torch_private.modules import caches_parametrizations

__all__ = ["Layers", "Modes", "Replay", "Rewound", "devices_of", "refuse_cached_parametrizations", "trial"]

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_known: WeakKeyDictionary[nn.Module, dict[str, BufferHabits]] = WeakKeyDictionary()

#: Runs before which generators are looked for.
RUNS_NOTED = 2

#: See :attr:`Layers.modes`.
Modes = tuple[tuple[bool, bool], ...]


def devices_of(*values: Any) -> set[torch.device]:
    """The devices of all tensors in nested ``values``."""
    return {tensor.device for tensor in tensors_in(values)}


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


class Layers:
    """Modules that run more than once, their parameters, buffers and submodules, and what is learned of their runs.

    Args:
        modules: valid until one of them is rebuilt; then :meth:`find` is to be called.
        devices: the devices that they draw random numbers on.
        name: for errors.
    """

    def __init__(self, *modules: nn.Module, devices: Iterable[torch.device] = (), name: str = "a layer") -> None:
        self._roots, self.devices = modules, devices
        #: Whether they write into their input.
        self.inputs = InputWrites(name)
        self.find()

    def find(self) -> None:
        """Finds the modules, parameters, buffers and generators that there are now."""
        memo: set[nn.Module] = set()
        self.names: dict[nn.Module, str] = {m: n for root in self._roots for n, m in root.named_modules(memo)}
        self.modules = [*self.names]
        self.parameters = [
            (f"{name}.{n}" if name else n, p)
            for m, name in self.names.items()
            for n, p in m._parameters.items()
            if p is not None
        ]
        self._buffers = [
            (owner, name, _known.setdefault(owner, {}).setdefault(name, BufferHabits(owner)))
            for owner in self.modules
            for name, b in owner._buffers.items()
            if b is not None
        ]
        self.generators = generators_in(self.modules)
        self._begun, self._changes = 0, False
        self._runs: dict[Modes, int] = {}
        #: Those that they may draw from, and those that are compared in every run.
        self._generators: list[Generator] = []
        self._compared: list[Generator] = []

    @property
    def own_devices(self) -> set[torch.device]:
        """The devices of their parameters and buffers."""
        return {p.device for _, p in self.parameters} | {b.device for _, _, _, b in self.present_buffers()}

    @property
    def modes(self) -> Modes:
        """On what it depends what they do: of each, its ``training`` flag, and whether it has no forward hooks."""
        # In one list: properties and generators cost a call each.
        return tuple([(m.training, not m._forward_hooks and not m._forward_pre_hooks) for m in self.modules])

    @property
    def training(self) -> list[bool]:
        """The ``training`` flag of each."""
        return [module.training for module in self.modules]

    def changing(self) -> list[Tensor]:
        """Buffers that forwards may write before a backward: small ones, and others that an earlier forward wrote."""
        return [b for owner, _, habits, b in self.present_buffers() if habits.may_change(b, training=owner.training)]

    def present_buffers(self) -> list[tuple[nn.Module, str, BufferHabits, Tensor]]:
        """The buffers, each with its owner, name and habits."""
        return [(o, name, habits, b) for o, name, habits in self._buffers if (b := o._buffers[name]) is not None]

    def members(self) -> list[Any]:
        """The present parameters and children of all modules."""
        # Not ``m._parameters.values()``: a subclass may record that as a read.
        return [x for m in self.modules for x in (*dict.values(m._parameters), *dict.values(m._modules))]

    def begin(self, *, attributes: bool = True) -> Replay:
        """To be called just before a first run that is to be repeated.

        ``attributes``: False for a part of a forward, whose attributes the next part reads.
        """
        refuse_cached_parametrizations(self.modules)
        settings = Settings(self.devices, whole=True)
        return Replay(generators_of(self.devices, self.generators), settings, self, attributes=attributes)

    def begin_in(self, modes: Modes) -> Replay:
        """The same in the present modes, with what was learned of earlier runs: it saves what these have changed.

        Modules without buffers that changed no attribute in their first runs cost one comparison of each generator.
        """
        stateful = bool(self._buffers) or self._changes or False in [plain for _, plain in modes]
        # Generators may be assigned in the first runs, and where there are some, in each.
        if self._begun < RUNS_NOTED or self.generators:
            self._begun += 1
            self.generators = generators_in(self.modules)
            self._generators = generators_of(self.devices, self.generators)
            # Those of torch, and of the modules themselves, take no time. Of others, those that the first runs used.
            self._compared = [each for each in self._generators if each.name not in ("python", "numpy")]
            self._runs, stateful = {}, True
        runs = self._runs[modes] = self._runs.get(modes, 0) + 1
        generators = self._generators if runs <= RUNS_NOTED else self._compared
        return Replay(generators, Settings(self.devices), self, unchanged_in=None if stateful else modes)

    def learn(self, drawn: Sequence[str], changed: bool) -> None:
        """Notes what a run drew from, and whether it changed attributes."""
        self._changes |= changed
        if drawn:
            self._compared = [each for each in self._generators if each in self._compared or each.name in drawn]

    def run(self, call: Callable[[Any], Any], value: Any, replay: Replay | None = None) -> Any:
        """A first run: the result of ``call(value)``; ``replay`` notes if that needs a copy of ``value``."""
        modes, cache = self.modes, torch.is_autocast_cache_enabled()
        with self.inputs.survived(value, modes) as given:
            # Autocast's cache would keep casted weights after their use, and casts that have no gradient.
            torch.set_autocast_cache_enabled(False)
            try:
                output = call(given)
            finally:
                torch.set_autocast_cache_enabled(cache)
        if replay is not None:
            replay.copies_input = self.inputs.copies(modes)
        return output

    def repeat(
        self, call: Callable[[Any], Any], value: Any, replay: Replay, *, until: contextlib.ExitStack | None = None
    ) -> Any:
        """``call(value)`` again; ``value`` is not changed. ``until``: see :meth:`Replay.again`."""
        with replay.again(until=until):
            return replay.settings.run(call, map_tensors(Tensor.clone, value) if replay.copies_input else value)


@contextlib.contextmanager
def trial(several: Iterable[Layers]) -> Iterator[None]:
    """A context for a trial forward, whose changes of modules and generators are undone.

    ``is_recomputing`` is True in it, for layers that count forwards in Python.
    """
    replays = [layers.begin() for layers in several]
    with enable_recomputing():
        try:
            yield
        finally:
            for replay in replays:
                replay.take_back()


class Replay:
    """The state before one run.

    Args:
        generators: those that the run may draw from.
        settings: of the thread.
        layers: the modules that run.
        attributes: whether their attributes are saved.
        compares: whether :meth:`check` finds parameters that were changed.
        unchanged_in: the modes in which they run without changing anything, so that nothing of them is saved.
        objects: what else the function that runs uses.
    """

    __slots__ = (
        "_attributes", "_buffers", "_compares", "_contents", "_layers", "_members", "_objects", "_states",
        "_unchanged_in", "_wanted", "copies_input", "settings",
    )  # fmt: skip

    def __init__(
        self,
        generators: Iterable[Generator],
        settings: Settings,
        layers: Layers | None = None,
        *,
        attributes: bool = True,
        compares: bool = False,
        unchanged_in: Modes | None = None,
        objects: Sequence[Any] = (),
    ) -> None:
        self._states: list[tuple[Generator, Any]] = [(each, each.get()) for each in generators]
        self.settings, self._layers, self._compares = settings, layers, compares and layers is not None
        self._attributes, self._unchanged_in = attributes, unchanged_in
        self._contents: Contents | None = None
        self._buffers: list[Buffer] = []
        if layers is not None and unchanged_in is None:
            self._contents = Contents.of_modules(layers.modules, attributes)
            self._buffers = [Buffer(*each) for each in layers.present_buffers()]
        #: Of objects that the function refers to, and of those that it gets as arguments.
        self._objects = [Contents.of(objects, records=True)] if objects else []
        #: Whether the layers write into their input, so that each run needs a copy of it.
        self.copies_input = False

    @classmethod
    def capture(cls, devices: Iterable[torch.device], generators: Iterable[Any] = ()) -> Replay:
        """The state before a run on ``devices`` that may draw from ``generators`` of layers."""
        devices = set(devices)
        return cls(generators_of(devices, generators), Settings(devices, whole=True))

    def add_arguments(self, objects: Sequence[Any]) -> None:
        """Before the first run: adds what can be reached from the objects that the function gets as arguments."""
        found = captured(*objects, whole=True)
        known = {id(generator.owner) for generator, _ in self._states}
        more = [held_generator(x) for x in found.generators if id(x) not in known]
        self._states += [(each, each.get()) for each in more]
        self._objects.append(Contents.of(found.objects))

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """A context for the first run."""
        yield
        self.record_changes()

    def record_changes(self) -> Replay:
        """After the first run: drops what it did not change. Returns itself.

        Raises RuntimeError if it changed a value that was not saved.
        """
        self._states = [(each, state) for each, state in self._states if each.moved(state)]
        changed = False
        if self._contents is not None:
            changed = self._contents.record_changes()
            for buffer in self._buffers:
                buffer.note_write()
        for objects in self._objects:
            objects.check("by the first run, which reads it")
        if self._layers is not None:
            self._layers.learn(self.drawn, changed)
            if self._compares:
                # Read after the run, so that a layer may change its own parameters in place in it, or replace them.
                self._members = self._layers.members()
                self._wanted = [(p._version, p.requires_grad) for _, p in self._layers.parameters]
        return self

    @property
    def drawn(self) -> tuple[str, ...]:
        """After the first run: names of the generators that it drew from."""
        return tuple([generator.name for generator, _ in self._states])

    @property
    def written(self) -> list[tuple[nn.Module, str]]:
        """After the first run: the buffers that it certainly wrote, by owner and name."""
        return [(buffer.owner, buffer.name) for buffer in self._buffers if buffer.counted]

    def take_back(self) -> None:
        """After the first run, or in it: undoes what it drew, and wrote into buffers, attributes and objects."""
        for generator, before in self._states:
            generator.set(before)
        for contents in (*self._objects, self._contents):
            if contents is not None:
                contents.put()
        for buffer in self._buffers:
            buffer.take_back()

    def check(self, name: str) -> None:
        """Raises RuntimeError if a further run would read other values than the first; ``name``: of it.

        That is if a buffer that the first run only read was written in place since, and its value is lost; and, if that
        is compared, if a parameter was modified in place or replaced.
        """
        for buffer in self._buffers:
            if buffer.is_lost:
                raise RuntimeError(
                    f"buffer {buffer.name!r} of {name} was written in place between the forward and its backward, "
                    f"which runs the layers again: they would read the new value. Write it after the backward, assign "
                    f"a new tensor instead, or compute without recomputation"
                )
        if self._compares and (changed := self._changed()):
            raise RuntimeError(
                "expected the module of the checkpointed forward to be the same in backward, but "
                + "; ".join(changed)
                + "; call backward() before optimizer.step(), requires_grad_() or a replacement, or compute without "
                "checkpointing"
            )

    def _changed(self) -> list[str]:
        layers, changed = self._layers, []
        assert layers is not None
        # Without this, what was replaced later would run in the recomputation and get the gradient.
        if replaced := _replaced(layers, self._members):
            changed.append(f"another object took the place of {', '.join(replaced)}")
        for (name, p), (version, wanted) in zip(layers.parameters, self._wanted, strict=True):
            if p._version != version:
                changed.append(f"parameter {name!r} was modified in place {p._version - version} time(s)")
            if p.requires_grad is not wanted:
                changed.append(f"parameter {name!r} changed from requires_grad={wanted} to {p.requires_grad}")
        return changed

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """To be held in a further run: two that rewind a generator of the process mix their draws."""
        shared = any(generator.shared for generator, _ in self._states)
        return shared_generators if shared else _NOTHING

    @contextlib.contextmanager
    def again(self, *, until: contextlib.ExitStack | None = None, settings: bool = True) -> Iterator[None]:
        """A context for a further run, whose changes are undone. Grad mode is the caller's.

        Args:
            until: restores modes, buffers and attributes instead of this context, for a backward that reads them.
            settings: False for a part of a run, which has the settings that the parts before it have left.
        """
        if until is not None:
            until.enter_context(Rewound(self, generators=False, settings=False))
        with self.lock, Rewound(self, contents=until is None, settings=settings):
            yield


class Rewound:
    """A context in which settings, generators, modules and objects are as before the first run.

    It can be left again where an interrupt kept it from being left.
    """

    __slots__ = ("_replay", "_undo", "_which")

    def __init__(
        self, replay: Replay, *, generators: bool = True, contents: bool = True, settings: bool = True
    ) -> None:
        self._replay, self._which = replay, (generators, contents, settings)
        self._undo: list[tuple[Callable[[Any], Any], Any]] = []

    def __enter__(self) -> None:
        replay = self._replay
        generators, contents, settings = self._which
        layers, objects = (replay._layers, replay._objects) if contents else (None, [])
        held = replay._contents
        if layers is not None and held is None and replay._unchanged_in == layers.modes:
            layers = None
        states = replay._states if generators else []
        undo: list[tuple[Callable[[Any], Any], Any]] = [(generator.set, generator.get()) for generator, _ in states]
        if generators:
            undo.append((partial(setattr, phase, "flags"), phase.flags))
        if layers is not None:
            undo.append((Contents.put, Contents.of_modules(layers.modules, replay._attributes)))
        undo += [(Contents.put, each.present()) for each in objects]
        for each in objects:
            each.check("by other code since the forward")
        before = replay.settings.to_restore() if settings else None
        if before is not None:
            undo.append((replay.settings.restore, before))
        self._undo = undo
        if before is not None:
            replay.settings.apply(before)
        if generators:
            phase.flags = False, True
        for each in objects:
            each.put()
        for generator, before in states:
            generator.set(before)
        if layers is not None and held is not None:
            held.check("before its backward")
            layers.learn((), held.put())
            for buffer in replay._buffers:
                buffer.owner._buffers[buffer.name] = buffer.read()
        elif layers is not None:
            for module, (training, _) in zip(layers.modules, replay._unchanged_in or (), strict=True):
                module._forward_hooks.clear()  # they had none
                module._forward_pre_hooks.clear()
                module.training = training

    def __exit__(self, *raised: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Restores what it found. May be called at any time, and again."""
        for function, value in self._undo:
            function(value)
        self._undo = []


def _replaced(layers: Layers, before: list[Any]) -> list[str]:
    """Names of parameters and modules that have taken the place of one of the members ``before``."""
    here, there = set(map(id, layers.members())), set(map(id, before))
    if here >= there or all(id(member) in here or _is_sharded(member) for member in before):
        return []  # none was removed: a parameter was added, or registered in another order
    return [
        f"{kind} {'.'.join(filter(None, (owner, name)))!r}"
        for module, owner in layers.names.items()
        for kind, register in (("parameter", dict[str, Any](module._parameters)), ("module", module._modules))
        for name, member in register.items()
        if id(member) not in there and not _is_sharded(member)
    ]


def _is_sharded(member: Any) -> bool:
    """Whether it is a DTensor: sharded modules replace sharded by whole parameters and vice versa."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(member, module.DTensor)
