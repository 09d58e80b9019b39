"""The storage interface: every storage implements :class:`Tier`, :class:`Block` and :class:`Scratch`.

A :class:`Tier` allocates one :class:`Block` for each stored array (the weights of all layers, the gradients of a
shard), and a :class:`Scratch` for boundaries, which are stored for a part of one step. A shard's weights are a part of
the block of all: a range of its bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Block", "Scratch", "Tier", "bytes_of", "in_order"]


def in_order(dense: Tensor) -> Tensor:
    """The elements of a dense tensor (any strides without holes) in the order of its memory, flat; no copy."""
    return dense.detach().as_strided((dense.numel(),), (1,))


def bytes_of(tensor: Tensor) -> Tensor:
    """A flat uint8 view of a dense tensor (any strides without holes); no copy."""
    flat = in_order(tensor)
    return torch.view_as_real(flat).view(-1).view(torch.uint8) if flat.is_complex() else flat.view(torch.uint8)


class Block(ABC):
    """Stored bytes of a fixed size."""

    #: The stored bytes, flat, uint8. ``Parameter.data`` is a view of them while no shard is loaded.
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.tensor.numel()

    @abstractmethod
    def read_into(self, destination: Tensor, offset: int = 0) -> None:
        """Fills ``destination`` (uint8, flat, on any device) with the bytes from ``offset`` on.

        Raises OSError if the storage cannot be read, or is shorter than the block.
        """

    @abstractmethod
    def write(self, source: Tensor, offset: int) -> None:
        """Overwrites the bytes from ``offset`` on with ``source`` (uint8, flat, on any device)."""

    @abstractmethod
    def part(self, offset: int, nbytes: int) -> Block:
        """The ``nbytes`` from ``offset`` on as a block of their own, at the same place: nothing is copied.

        Its tensor has a storage of its own in the same memory, since users of a block are counted by its storage.
        """


class Scratch(ABC):
    """Temporary storage of tensors within a step. It is freed with its owner, also when the process is killed."""

    #: Used in error messages.
    name: str

    @abstractmethod
    def store(self, tensor: Tensor) -> Callable[[Tensor], None]:
        """Stores a copy of a tensor. What is returned fills a tensor of the same shape and dense strides with it.

        As ``copy_`` does: on the current stream, and without waiting for it where both ends allow that.
        """

    def close(self) -> None:  # noqa: B027
        """Frees files; what was stored in them cannot be read any more."""


class Tier(ABC):
    """A storage: host memory, or a directory."""

    #: Used in error messages and reports.
    name: str
    #: Whether reads and writes block the calling thread, so that only another thread overlaps them with compute.
    blocking_io: bool
    #: Whether layers compute in this memory.
    on_device = False
    #: Whether stored weights outlive the model.
    keeps = False

    @property
    def staging_bytes(self) -> int:
        """Host memory allocated so far as staging buffers between this storage and the compute device."""
        return 0

    def limit_staging(self, nbytes: int) -> None:  # noqa: B027
        """Limits :attr:`staging_bytes`. Called before the first transfer."""

    @abstractmethod
    def allocate(self, nbytes: int, label: str, *, cyclic: bool = False) -> Block:
        """A zeroed block of exactly ``nbytes``. Raises OSError if the storage is full; nothing is left behind.

        ``cyclic``: each step uses the cyclic blocks once, in a fixed order, so between two uses of a block all others
        are used.
        """

    def weights(self, nbytes: int) -> Block:
        """The block of the weights of all layers, which persistent storage may hold already. See :meth:`allocate`."""
        return self.allocate(nbytes, "weights")

    def weights_are_written(self, block: Block) -> None:  # noqa: B027
        """Called when the block of :meth:`weights` has its first values."""

    @abstractmethod
    def scratch(self) -> Scratch | None:
        """Storage of boundaries, or None where this storage is the compute device's memory."""

    def close(self) -> None:  # noqa: B027
        """Frees everything. Blocks that are still referenced keep their bytes until they are collected."""
