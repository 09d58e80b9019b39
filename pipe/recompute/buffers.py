"""Keeps the value that a buffer had before a forward, and knows which buffers forwards write.

A large buffer is copied before its first forward, which shows whether forwards write it; then only if they do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipe.torch_private.modules import BatchOrInstanceNorm

__all__ = ["Buffer", "BufferHabits"]

#: Copying up to this size costs no more than finding out whether a copy is needed.
_SMALL_BYTES = 1 << 14

Mark = tuple[int | None, int]


def _mark(tensor: Tensor) -> Mark:
    """What changes with the value, unless a kernel writes without a word: version (None: uncounted) and address."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return None if tensor.is_inference() else tensor._version, tensor.data_ptr() if plain else 0


class BufferHabits:
    """What is known of a buffer between forwards; by evaluation and training."""

    __slots__ = ("writes",)

    def __init__(self, owner: nn.Module) -> None:
        #: Whether forwards write it, with or without counting a version, as kernels of normalisation layers do; None:
        #: unknown.
        self.writes: list[bool | None] = [None, True if isinstance(owner, BatchOrInstanceNorm) else None]

    def may_change(self, buffer: Tensor, *, training: bool) -> bool:
        """Whether forwards may write the buffer before a backward: if it is small, or an earlier one wrote it."""
        return buffer.nbytes <= _SMALL_BYTES or bool(self.writes[training])


class Buffer:
    """One buffer before a forward."""

    __slots__ = ("_copied", "_mark", "_saved", "_tensor", "_training", "_writes", "counted", "name", "owner")

    def __init__(self, owner: nn.Module, name: str, habits: BufferHabits, tensor: Tensor) -> None:
        # No weak reference: a graph holds this, see :mod:`pipe.freed`.
        self.owner, self.name, self._tensor = owner, name, tensor
        self._writes, self._training, self._mark = habits.writes, owner.training, _mark(tensor)
        may_change = habits.may_change(tensor, training=owner.training)
        self._copied = may_change or self._writes[owner.training] is None or self._mark[0] is None
        # Another tensor with the same memory, which is kept even if the buffer gets other memory; or a copy of it.
        self._saved = tensor.detach().clone() if self._copied else tensor.detach()
        #: After the forward: whether a version tells that it wrote the buffer.
        self.counted = False

    @property
    def is_lost(self) -> bool:
        """Whether the old value was overwritten."""
        return not self._copied and self._saved._version != self._mark[0]

    def note_write(self) -> None:
        """After the forward: notes whether it changed the buffer. Raises if its old value was not copied."""
        writes, tensor = self._writes, self._tensor
        self.counted = self.owner._buffers.get(self.name) is not tensor or not self._marked
        if self.counted:
            writes[self._training] = True
            if self.is_lost:
                raise RuntimeError(
                    f"buffer {self.name!r} of a {type(self.owner).__name__} was written by a forward, which earlier "
                    f"ones did not, so its old value is lost to the recomputation of this forward; run the step "
                    f"again: from now on it is copied before the forward"
                )
            if not self._copied:  # the memory of a buffer that was replaced may be written later
                self._saved, self._copied = self._saved.clone(), True
        elif writes[self._training] is None:
            # A kernel that writes without counting a version does so in every forward: one comparison is enough.
            writes[self._training] = not self._is_same
        if not writes[self._training] and tensor.nbytes > _SMALL_BYTES:
            self._saved, self._copied = tensor.detach(), False

    def read(self) -> Tensor:
        """The old value: the buffer itself if it has that; else a copy, which the run may write."""
        if self._marked and self._writes[self._training] is False:
            return self._tensor
        return self._saved.clone() if self._copied else self._saved

    @property
    def _marked(self) -> bool:
        return self._mark[0] is not None and _mark(self._tensor) == self._mark

    @property
    def _is_same(self) -> bool:
        return self._tensor.is_meta or torch.equal(self._saved, self._tensor)

    def take_back(self) -> None:
        """Restores the buffer after a forward: its old value, in the same tensor object."""
        counts = self._mark[0] is not None
        self.owner._buffers[self.name] = self._tensor if counts else self._saved.clone()
        if self._copied and counts and not (self._marked and self._is_same):
            with torch.no_grad():
                self._tensor.copy_(self._saved)
