"""Random states: what a chunk's second forward must draw again.

A second forward is only the same function if every generator that the first one drew from is rewound: the CPU's, each
device's (a wrapper may move CPU inputs to an accelerator, so the inputs do not tell which), Python's and NumPy's.
``pipe.recompute.replay`` does the work; this module gives it the face that users of GradCache know.

Guarantees
    * Inside ``with context:`` the draws equal those made since the context was made; afterwards every generator goes on
      from where it was.
    * A context can be entered any number of times, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from pipe.recompute.replay import Replay, devices_of

__all__ = ["RandContext", "devices_in_use"]


def devices_in_use(*values: Any) -> set[torch.device]:
    """Devices of the tensors in ``values``, and every device of an accelerator that this process has started.

    Reading the state of a generator that is never drawn from costs a copy on the host; missing one that is drawn from
    gives another dropout mask in the second pass.
    """
    devices = devices_of(*values)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if not hasattr(module, "is_initialized") or module.is_initialized():
            devices |= {torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())}
    return devices


class RandContext:
    """Random states and autocast as they are now, to be entered again around a second forward.

    Args:
        *tensors: inputs of the forward that is about to run; their devices are noted besides those in use.
        generators: generators of random numbers that the model holds itself.
        replay: what was noted already, instead.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), section 3.
    """

    def __init__(self, *tensors: Any, generators: Iterable[Any] = (), replay: Replay | None = None) -> None:
        self._replay = Replay.capture(devices_in_use(*tensors), generators) if replay is None else replay
        self._entered: list[Any] = []

    def seal(self) -> RandContext:
        """Forgets the generators that have not moved since; call it when the first forward is done. Returns itself."""
        self._replay.seal()
        return self

    @property
    def drawn(self) -> tuple[str, ...]:
        """Names of the generators that a second forward rewinds."""
        return self._replay.drawn

    def __enter__(self) -> None:
        again = self._replay.again()
        again.__enter__()
        self._entered.append(again)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)
