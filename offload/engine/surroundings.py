"""What a pass must leave as it was, whatever ended it: settings of the thread, phase, modules, generators.

Layers run inside contexts that change these and put them back. An exception that is raised between the body of a
``with`` statement and its end, as Ctrl-C can raise it, skips the second half. So a pass notes everything once when it
begins, and a pass that failed puts it back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipe.recompute.module_hooks import HookAttributes
from pipe.recompute.module_state import WatchedModule
from pipe.recompute.phase import phase_of_thread, set_phase_of_thread
from pipe.recompute.replay import Replay
from pipe.recompute.thread_state import ThreadState

__all__ = ["StateBefore"]


class StateBefore:
    """Notes what this thread and these modules are like now.

    Args:
        device: of the layers.
        recomputed: the modules that will be run again, in the modes, with the buffers and the random numbers of an
            earlier forward. Without them, what a forward draws and writes stays, as in plain torch.
    """

    def __init__(self, device: torch.device, recomputed: Iterable[WatchedModule] = ()) -> None:
        self._phase = phase_of_thread()
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
        """Puts it back. May be called again after it was interrupted itself."""
        self._settings.restore()
        set_phase_of_thread(self._phase)
        for module, training in self._modes:
            if module.training != training:
                module.training = training
        self._hooks.restore()
        for buffers, name, buffer in self._buffers:
            buffers[name] = buffer
