"""Saves and restores the state around a pass: settings of the thread, phase, module modes and buffers, generators.

Layers run inside contexts that change and restore these. An exception between the body of a ``with`` statement and its
exit, such as Ctrl-C, skips the restoration. So a pass saves all of it once at its begin, and restores it if it fails.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipe.recompute.module_hooks import HookAttributes
from pipe.recompute.module_state import WatchedModule
from pipe.recompute.replay import Replay
from pipe.recompute.thread_state import ThreadState

__all__ = ["StateBefore"]


class StateBefore:
    """The state of this thread and of some modules when the object is made.

    ``recomputed`` modules run again with the modes, buffers and random numbers of an earlier forward. Without them,
    random numbers drawn and buffers written by a forward stay so, as in plain torch.
    """

    def __init__(self, device: torch.device, recomputed: Iterable[WatchedModule] = ()) -> None:
        self._modes: list[tuple[nn.Module, bool]] = []
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        found = list(recomputed)
        self._hooks = HookAttributes(module for watched in found for _, module in watched.modules)
        for watched in found:
            self._modes += [(module, module.training) for _, module in watched.modules]
            self._buffers += [(owner._buffers, name, owner._buffers.get(name)) for owner, name, _ in watched.buffers]
        self._settings: ThreadState | Replay
        self._settings = Replay.capture([device]) if self._modes else ThreadState.capture([device.type])

    def restore(self) -> None:
        """Restores the state. May be called again after an interrupt."""
        self._settings.restore()
        for module, training in self._modes:
            if module.training != training:
                module.training = training
        self._hooks.restore()
        for buffers, name, buffer in self._buffers:
            buffers[name] = buffer
