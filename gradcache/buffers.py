"""Buffers: counted once although every chunk runs forward twice.

A second forward would move BatchNorm's statistics a second time, and spectral_norm's vectors one power iteration
further, which changes the very representations whose gradient is being computed. So the first pass notes which
buffers each chunk moved and what they held before; the second pass sees that, and afterwards every buffer is as the
first pass left it.

Statistics that a layer only writes (BatchNorm in training mode) are put back, but their value per chunk is not kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["BufferStates", "BufferTrace"]


def _assign(module: nn.Module, name: str, tensor: Tensor, value: Tensor | None) -> None:
    """Makes ``tensor`` the buffer again, holding ``value``; under no_grad."""
    if value is not None:
        tensor.copy_(value)
    module._buffers[name] = tensor


@dataclass(frozen=True)
class _Moved:
    module: nn.Module
    name: str
    tensor: Tensor
    before: Tensor | None  # None: written, never read


class BufferStates:
    """The buffers that one chunk moved, as they were before it."""

    __slots__ = ("_moved",)

    def __init__(self, moved: list[_Moved]) -> None:
        self._moved = moved

    def __bool__(self) -> bool:
        return bool(self._moved)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the buffers hold what they held before the chunk's first forward; afterwards, what they hold now."""
        now: list[tuple[_Moved, Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for moved in self._moved:
                    current = moved.module._buffers[moved.name]
                    assert current is not None
                    now.append((moved, current, current.clone()))
                    _assign(moved.module, moved.name, moved.tensor, moved.before)
            yield
        finally:
            with torch.no_grad():
                for moved, tensor, value in now:
                    _assign(moved.module, moved.name, tensor, value)


class _Slot:
    """One buffer of one module: the tensor, its version, and its value as last noted."""

    __slots__ = ("module", "name", "tensor", "unversioned", "value", "version")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.tensor: Tensor | None = None
        self.version = -1
        self.value: Tensor | None = None
        # torch's normalisation kernels write their statistics without counting it as a version.
        self.unversioned = False

    def _written_only(self) -> bool:
        module = self.module
        return isinstance(module, _NormBase) and module.training and bool(module.track_running_stats)

    def moved(self) -> bool:
        if self.unversioned or self._written_only():
            return True
        current = self.module._buffers.get(self.name)
        return current is not self.tensor or (current is not None and current._version != self.version)

    def differs(self) -> bool:
        """Whether the value differs from the one noted. Reads it: a synchronisation where it lives on a device."""
        current = self.module._buffers.get(self.name)
        return current is not None and self.value is not None and not torch.equal(current, self.value)

    def note(self) -> None:
        current = self.module._buffers[self.name]
        assert current is not None
        self.tensor, self.version = current, current._version
        self.value = None if self._written_only() else current.detach().clone()


class BufferTrace:
    """Watches the buffers of a model over the chunks of a first pass. A buffer that never moves is copied once."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = [
            _Slot(module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]
        self._compared = False

    def before_chunk(self) -> None:
        """Notes the buffers that moved since they were last noted."""
        for slot in self._slots:
            if slot.moved():
                slot.note()

    def after_chunk(self) -> BufferStates:
        """The buffers that moved since :meth:`before_chunk`."""
        if not self._compared:  # once: a kernel that writes without a version does so for every chunk
            for slot in self._slots:
                slot.unversioned = not slot.moved() and slot.differs()
            self._compared = True
        moved = [slot for slot in self._slots if slot.moved()]
        return BufferStates([_Moved(s.module, s.name, s.tensor, s.value) for s in moved if s.tensor is not None])
