"""The seam between bytes and the places where they rest.

A :class:`Tier` hands out :class:`Block` objects, one for each thing that rests (a shard's weights, its gradients), and
:class:`Scratch` space for boundaries, which come and go within a step. The engine speaks to places only through these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["Block", "Scratch", "Tier", "bytes_of"]


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor (of any strides that leave no holes) as a flat uint8 view; no copy."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return torch.view_as_real(flat).view(-1).view(torch.uint8) if flat.is_complex() else flat.view(torch.uint8)


class Block(ABC):
    """Bytes at rest, of a size that never changes."""

    #: The bytes themselves, flat, uint8. ``Parameter.data`` at home is a view of this.
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.tensor.numel()

    @abstractmethod
    def read_into(self, destination: Tensor, offset: int = 0) -> None:
        """Copies the bytes from ``offset`` on into ``destination`` (uint8, flat, on any device), as many as it holds.

        Raises:
            OSError: if the place cannot be read, or has fewer bytes than it must.
        """

    @abstractmethod
    def staged(self) -> Tensor:
        """The bytes in host memory, to be read piece by piece: the block itself, or a copy that was read in one go."""

    @abstractmethod
    def write(self, source: Tensor, offset: int) -> None:
        """Overwrites the bytes from ``offset`` on with those of ``source`` (uint8, flat, on any device)."""


class Scratch(ABC):
    """Room for tensors that rest for a part of a step. It vanishes with its owner, also when the process dies."""

    #: How errors call this place.
    name: str

    @abstractmethod
    def store(self, tensor: Tensor) -> object:
        """Copies a tensor here; returns a ticket. Any dense layout is kept, others become contiguous."""

    @abstractmethod
    def fetch(self, ticket: object) -> Tensor:
        """A new tensor on the compute device, equal to what was stored."""

    @abstractmethod
    def release(self, ticket: object) -> None:
        """Gives the room of a ticket back."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""


class Tier(ABC):
    """A kind of place."""

    #: How errors and reports call this place.
    name: str
    #: Whether reading and writing block the calling thread, so that only a thread can hide them.
    blocking_io: bool

    @property
    def staging_bytes(self) -> int:
        """Host memory that bytes pass through on their way from and to this place, as far as it has been needed."""
        return 0

    @abstractmethod
    def allocate(self, nbytes: int, label: str, *, cyclic: bool = False) -> Block:
        """A block of exactly ``nbytes``, zeros.

        ``cyclic`` says that a step passes it once, always in the same order as others: by the time that it is used
        again, all others have been.

        Raises:
            OSError: if the place has no room; nothing is left behind.
        """

    def home(self, j: int, nbytes: int) -> Block:
        """The block where the weights of shard ``j`` rest; a place that keeps them may have it already.

        Raises:
            OSError: if the place has no room; nothing is left behind.
        """
        return self.allocate(nbytes, f"shard{j}-weights")

    @abstractmethod
    def scratch(self) -> Scratch | None:
        """Room for boundaries, or None where the compute device is this very place."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back. Blocks that are still referenced keep their bytes until they go."""
