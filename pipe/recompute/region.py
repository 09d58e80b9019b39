"""Modules that run more than once with the same result, and what is learned of them so that later runs save less.

Modules without buffers that changed no attribute in their first runs cost one comparison of each generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from pipe.recompute.contents import Contents
from pipe.recompute.generators import Generator, generators_of
from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.replay import Replay
from pipe.recompute.thread_state import Settings

__all__ = ["Region", "RegionReplay", "Settled"]

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

    def note_drawn(self, drawn: Sequence[str]) -> None:
        """Called after a first run with the names of the generators that it drew from."""
        if any(each.name in drawn and each not in self._drawn for each in self._generators):
            self._drawn = [each for each in self._generators if each in self._drawn or each.name in drawn]

    def begin(self, settings: Settled | None = None) -> RegionReplay:
        """The state before a first run; ``settings``: the present :attr:`settings`, if they are known."""
        settings = self.settings if settings is None else settings
        stateful = bool(self.watched.buffers) or self.changes or False in [plain for _, plain in settings]
        if self._begun < RUNS_NOTED:  # generators may be assigned at any time before
            self._begun += 1
            self.watched.find_generators()
            self._find_generators()
            stateful = True
        return RegionReplay(self, settings, ModuleState(self.watched, compares=False) if stateful else None)

    @property
    def settings(self) -> Settled:
        """On what it depends what the modules do: of each, its mode, and whether it has no forward hooks."""
        # In one list: properties and generators cost a call each.
        return tuple([(m.training, not m._forward_hooks and not m._forward_pre_hooks) for m in self.modules])


class RegionReplay(Replay):
    """The state of a region before one run, from which it is learned what its later runs need to save."""

    __slots__ = ("_modes", "_region")

    def __init__(self, region: Region, modes: Settled, modules: ModuleState | None) -> None:
        super().__init__(region.generators(modes), Settings(region.devices), modules)
        self._region, self._modes = region, modes

    def record_changes(self) -> Replay:
        """After the first run: drops what it did not change, and notes what it did."""
        super().record_changes()
        if self._states:
            self._region.note_drawn(self.drawn)
        if self.modules is not None:
            self._region.changes |= self.modules.changed
        return self

    def present(self) -> Contents | None:
        """What the modules hold now, if it is to be put back."""
        if self.modules is None and self._region.settings == self._modes:
            return None
        return Contents.of_modules(self._region.modules)

    def put(self) -> None:
        """Gives the modules their state from before the first run."""
        if self.modules is not None:
            self._region.changes |= self.modules.put()
        elif self._region.settings != self._modes:
            for module, (training, _) in zip(self._region.modules, self._modes, strict=True):
                module._forward_hooks.clear()  # modules that had hooks have a ``ModuleState``
                module._forward_pre_hooks.clear()
                module.training = training
