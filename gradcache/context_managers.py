"""Saves and restores the random states of a chunk's forward, so that its second forward draws the same numbers.

A second forward is the same function only if every generator that the first one drew from is rewound: the CPU's, each
device's (a wrapper may move CPU inputs to an accelerator, so the devices of inputs are not enough), Python's and
NumPy's. This is the interface of the package ``GradCache`` on top of ``pipe.recompute.replay``.

Guarantees
    * Inside ``with context:`` the draws equal those made since the context was made; afterwards every generator has the
      state that it had before the ``with``.
    * A context can be entered any number of times, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from gradcache.nested import tensors_in
from pipe.recompute.replay import Replay, devices_of

__all__ = ["RandContext", "device_of", "devices_in_use"]


def device_of(*owners: Any) -> torch.device:
    """The device that the first module computes on, or that the first tensor is on; the CPU if there is neither."""
    for owner in owners:
        stated = getattr(owner, "device", None) if isinstance(owner, nn.Module) else None
        if isinstance(stated, (torch.device, str)):  # an offloaded model's parameters are on another device
            return torch.device(stated)
        for tensor in owner.parameters() if isinstance(owner, nn.Module) else tensors_in(owner):
            return tensor.device
    return torch.device("cpu")


def devices_in_use(*values: Any) -> set[torch.device]:
    """Devices of the tensors in ``values``, and every device of an accelerator that this process has initialized.

    Saving the state of an unused generator costs a copy on the host; omitting one that is used gives another dropout
    mask in the second pass.
    """
    devices = devices_of(*values)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if not hasattr(module, "is_initialized") or module.is_initialized():
            devices |= {torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())}
    return devices


class RandContext:
    """The present random states and autocast settings, to be entered as a context around a second forward.

    Args:
        *tensors: inputs of the forward that is about to run; their devices are included besides those in use.
        generators: random generators that the model holds itself.
        replay: states that were saved already, to be used instead.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), section 3.
    """

    def __init__(self, *tensors: Any, generators: Iterable[Any] = (), replay: Replay | None = None) -> None:
        self._replay = Replay.capture(devices_in_use(*tensors), generators) if replay is None else replay
        self._entered = ExitStack()

    def record_changes(self) -> RandContext:
        """Drops generators whose state has not changed; call it after the first forward. Returns itself."""
        self._replay.record_changes()
        return self

    @property
    def drawn(self) -> tuple[str, ...]:
        """Names of the generators that a second forward rewinds."""
        return self._replay.drawn

    def __enter__(self) -> None:
        self._entered.enter_context(self._replay.again())

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
