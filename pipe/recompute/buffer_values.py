"""Keeps the value that a buffer had before a forward, and knows which buffers forwards write.

A large buffer is copied only if a forward writes it: before the forward if an earlier one wrote it, else just before
the first write. Forwards that only read a buffer share one value of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipe.torch_private.modules import BatchOrInstanceNorm
from pipe.torch_private.tensors import memory_of

__all__ = ["BufferBefore", "BufferHabits", "BufferValue"]

# Copying up to this size costs no more than finding out whether a copy is needed.
_SMALL_BYTES = 1 << 14


class BufferValue:
    """The value of a buffer between two writes, shared by all forwards that read it instead of a copy each."""

    __slots__ = ("tensor", "value", "version")

    def __init__(self, tensor: Tensor, version: int | None) -> None:
        # No weak reference: a graph holds this, see :mod:`pipe.freed`.
        self.tensor, self.version = tensor, version
        #: Set when a later forward writes the buffer.
        self.value: Tensor | None = None

    @property
    def is_lost(self) -> bool:
        """Whether other code has written the buffer in place."""
        return self.value is None and self.version is not None and self.tensor._version != self.version


class BufferHabits:
    """Knowledge about a buffer that is kept between forwards."""

    __slots__ = ("normalises", "shared", "uncounted", "written")

    def __init__(self, owner: nn.Module) -> None:
        # Kernels of normalisation layers write running statistics in training, possibly without counting a version.
        self.normalises = isinstance(owner, BatchOrInstanceNorm)
        #: In evaluation and in training: whether forwards write it, and whether some do so without counting a version.
        self.written: list[bool | None] = [None, None]
        self.uncounted = [False, False]
        self.shared: BufferValue | None = None

    def may_change(self, buffer: Tensor, *, training: bool) -> bool:
        """Whether forwards may write the buffer before a backward: if it is small, or an earlier one wrote it."""
        return bool(_memory_of(buffer)) and (bool(self.written[training]) or buffer.nbytes <= _SMALL_BYTES)

    def shared_value(self, tensor: Tensor, version: int | None) -> BufferValue:
        """What all forwards that read the buffer at this version share; made for the first."""
        shared = self.shared
        if shared is None or shared.version != version or shared.tensor is not tensor:
            shared = self.shared = BufferValue(tensor, version)
        return shared

    def keep_for_readers(self, tensor: Tensor, version: int | None, value: Tensor) -> None:
        """Keeps the ``value`` that a written buffer had at this version, for forwards that only read it."""
        shared, self.shared = self.shared, None
        if shared is not None and shared.version == version and shared.tensor is tensor:
            shared.value = value


class BufferBefore:
    """One buffer before a forward: a copy of it, or the buffer itself, to be copied before the first write."""

    __slots__ = (
        "copied", "copied_ahead", "counted", "known", "memory", "name", "owner", "tensor", "training", "value",
        "version",
    )  # fmt: skip

    def __init__(self, owner: nn.Module, name: str, known: BufferHabits, tensor: Tensor, compiled: bool) -> None:
        self.owner, self.name, self.known, self.tensor = owner, name, known, tensor
        self.training = owner.training
        # Inference tensors have no version counter.
        self.version = None if tensor.is_inference() else tensor._version
        self.memory: int | None = None
        self.copied_ahead = True
        if tensor.numel() * tensor.element_size() > _SMALL_BYTES and self.version is not None and not tensor.is_meta:
            self.memory = _memory_of(tensor)
            written = known.written[self.training]
            self.copied_ahead = self.memory is None or (compiled if written is None else written)
        self.copied = self.copied_ahead
        # If not copied, a tensor with the same memory, which is kept even if the buffer gets other memory.
        if self.copied:
            self.value = tensor.detach().clone() if tensor.requires_grad else tensor.clone()
        else:
            self.value = tensor.detach()

    def copy(self) -> None:
        """Copies the value before it is overwritten."""
        if not self.copied:
            self.value, self.copied = self.value.clone(), True

    def was_written(self, compared: set[tuple[BufferHabits, bool]]) -> bool:
        """To be called after the forward: whether it changed the buffer. Raises if it could not be copied before."""
        now = self.owner._buffers.get(self.name)
        replaced = now is not self.tensor or (self.memory is not None and _memory_of(self.tensor) != self.memory)
        if replaced and not self.copied and self.value._version == self.version:
            self.copy()  # the old memory is unchanged by now, but may be written later
        #: Whether a version tells that it did. Batch normalisation increments that of ``num_batches_tracked`` only.
        self.counted = replaced or (self.version is not None and self.tensor._version != self.version)
        known, mode = self.known, self.training
        counted = self.counted or self.version is None or (known.normalises and self.owner.training)
        if counted and not self.copied:
            known.written[mode] = True
            raise RuntimeError(
                f"buffer {self.name!r} of a {type(self.owner).__name__} was written without being detected in "
                f"advance, as by compiled code, so its old value is lost to the recomputation of this forward; "
                f"run the step again: from now on it is copied before the forward"
            )
        if not counted:
            uncounted = known.uncounted[mode] or (self.copied and not self.copied_ahead)
            if not uncounted and (known, mode) not in compared:
                # A kernel that writes without counting a version does so in every forward: one comparison is enough.
                compared.add((known, mode))
                uncounted = self.copied and not self.value.is_meta and not torch.equal(self.value, self.tensor)
            known.uncounted[mode] = uncounted
            if not uncounted:
                known.written[mode] = bool(known.written[mode])
                return False
        known.written[mode] = True
        known.keep_for_readers(self.tensor, self.version, self.value)
        return True

    def take_back(self) -> None:
        """Restores the buffer after a forward: its old value, in the same tensor object."""
        if self.was_written(set()):
            self.owner._buffers[self.name] = self.value if self.version is None else self.tensor
            if self.version is not None:
                with torch.no_grad():
                    self.tensor.copy_(self.value)


def _memory_of(tensor: Tensor) -> int | None:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return memory_of(tensor) if plain else None
