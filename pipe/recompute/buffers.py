"""Keeps the value that a buffer had before a forward, and knows which buffers forwards write.

A large buffer is copied before its first forward, which shows whether forwards write it; then only if they do. Forwards
between two writes share one copy, or the buffer itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipe.torch_private.modules import BatchOrInstanceNorm

__all__ = ["Buffer", "BufferHabits"]

# Copying up to this size costs no more than finding out whether a copy is needed.
_SMALL_BYTES = 1 << 14

Mark = tuple[int | None, int]


def _mark(tensor: Tensor) -> Mark:
    """What changes with the value, unless a kernel writes without a word: version (None: uncounted) and address."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return None if tensor.is_inference() else tensor._version, tensor.data_ptr() if plain else 0


class _Value:
    """The value of a buffer between two writes, shared by all forwards that find it."""

    __slots__ = ("copied", "mark", "saved", "tensor")

    def __init__(self, tensor: Tensor, mark: Mark) -> None:
        # No weak reference: a graph holds this, see :mod:`pipe.freed`.
        self.tensor, self.mark = tensor, mark
        #: Another tensor with the same memory, which is kept even if the buffer gets other memory; or a copy of it.
        self.saved = tensor.detach()
        self.copied = False

    def copy(self) -> None:
        if not self.copied:
            self.saved, self.copied = self.saved.clone(), True

    @property
    def is_lost(self) -> bool:
        return not self.copied and self.saved._version != self.mark[0]


class BufferHabits:
    """What is known of a buffer between forwards; by evaluation and training."""

    __slots__ = ("counted", "last", "silent")

    def __init__(self, owner: nn.Module) -> None:
        #: Whether forwards write it, and count a version.
        self.counted = [False, False]
        #: Whether they write it without counting one, as kernels of normalisation layers do; None: unknown.
        self.silent: list[bool | None] = [None, True if isinstance(owner, BatchOrInstanceNorm) else None]
        self.last: _Value | None = None

    def may_change(self, buffer: Tensor, *, training: bool) -> bool:
        """Whether forwards may write the buffer before a backward: if it is small, or an earlier one wrote it."""
        return buffer.nbytes <= _SMALL_BYTES or self.counted[training] or bool(self.silent[training])


class Buffer:
    """One buffer before a forward."""

    __slots__ = ("counted", "habits", "name", "owner", "training", "value")

    def __init__(self, owner: nn.Module, name: str, habits: BufferHabits, tensor: Tensor) -> None:
        self.owner, self.name, self.habits, self.training = owner, name, habits, owner.training
        mark, value, silent = _mark(tensor), habits.last, habits.silent[owner.training]
        if value is None or value.tensor is not tensor or value.mark != mark:
            value = habits.last = _Value(tensor, mark)
        if silent is not False or habits.counted[owner.training] or tensor.nbytes <= _SMALL_BYTES or mark[0] is None:
            value.copy()
        self.value = value
        #: After the forward: whether a version tells that it wrote the buffer.
        self.counted = False

    def note_write(self) -> None:
        """After the forward: notes whether it changed the buffer. Raises if its old value was not copied."""
        value, habits, tensor = self.value, self.habits, self.value.tensor
        self.counted = self.owner._buffers.get(self.name) is not tensor or not self._marked
        if self.counted:
            habits.counted[self.training] = True
            if value.is_lost:
                raise RuntimeError(
                    f"buffer {self.name!r} of a {type(self.owner).__name__} was written by a forward, which earlier "
                    f"ones did not, so its old value is lost to the recomputation of this forward; run the step "
                    f"again: from now on it is copied before the forward"
                )
            value.copy()  # the memory of a buffer that was replaced may be written later
        elif habits.silent[self.training] is None:
            # A kernel that writes without counting a version does so in every forward: one comparison is enough.
            habits.silent[self.training] = not self._is_same
        if self.counted or habits.silent[self.training]:
            habits.last = None
        elif not habits.may_change(tensor, training=self.training):
            value.saved, value.copied = tensor.detach(), False

    def read(self) -> Tensor:
        """The old value: the buffer itself if it has that; else a copy, which the run may write."""
        if self._marked and not self.counted and self.habits.silent[self.training] is False:
            return self.value.tensor
        return self.value.saved.clone() if self.value.copied else self.value.saved

    @property
    def _marked(self) -> bool:
        return self.value.mark[0] is not None and _mark(self.value.tensor) == self.value.mark

    @property
    def _is_same(self) -> bool:
        return self.value.tensor.is_meta or torch.equal(self.value.saved, self.value.tensor)

    def take_back(self) -> None:
        """Restores the buffer after a forward: its old value, in the same tensor object."""
        value = self.value
        self.owner._buffers[self.name] = value.saved.clone() if value.mark[0] is None else value.tensor
        if value.copied and value.mark[0] is not None and not (self._marked and self._is_same):
            with torch.no_grad():
                value.tensor.copy_(value.saved)
