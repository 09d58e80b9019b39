"""Detects layers that write into their input in place, and runs them on copies, so that they can run again.

The second run starts from the input of the first one, which may be the caller's own tensor. So layers that write into
their input run on a copy of it. Whether they write is detected in their first run (for each combination of ``training``
flags), which uses a copy; if they begin to write later, that run raises, and later ones copy. Inference tensors have no
version counter: they are always copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipe.nested import map_tensors, tensors_in
from pipe.torch_private.tensors import memory_of

__all__ = ["InputWrites"]


class InputWrites:
    """Records whether some layers, called ``name`` in errors, write into their (nested) input."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._writes: dict[Hashable, bool] = {}

    def copies(self, kind: Hashable) -> bool:
        """Whether runs of a kind (with the same ``training`` flags) use copies."""
        return self._writes.get(kind, True)

    def writes(self, kind: Hashable) -> bool:
        """Whether runs of a kind have written into their input."""
        return self._writes.get(kind, False)

    @contextlib.contextmanager
    def survived(self, value: Any, kind: Hashable) -> Iterator[Any]:
        """Yields the input for one run of the layers: ``value`` or a copy of it. Raises if ``value`` was changed."""
        copies = self.copies(kind)
        given = map_tensors(Tensor.clone, value) if copies else value
        tensors = tensors_in(given)
        if not tensors or any(tensor.is_inference() for tensor in tensors):
            yield given
            return
        before = [tensor._version for tensor in tensors]
        yield given
        written = [tensor._version != version for tensor, version in zip(tensors, before, strict=True)]
        if copies:
            self.note(kind, tensors_in(value), written)
        elif any(written):
            self.refuse(kind)

    def note(self, kind: Hashable, tensors: Sequence[Tensor], written: Sequence[bool]) -> None:
        """Notes which tensors of the input a run has written, if any.

        Raises RuntimeError if one of them shares memory with another one: only in the bare model the write changes
        both. Here each tensor is copied, and gets its gradient, separately.
        """
        self._writes[kind] = any(written) or self.writes(kind)
        places = [(k, x, *_place(x)) for k, x in enumerate(tensors) if x.layout is torch.strided and x.numel()]
        for k, x, memory, begin, end in places:
            if written[k] and any(x is not o and memory == m and begin < e and b < end for _, o, m, b, e in places):
                raise RuntimeError(
                    f"{self._name} writes in place into tensor {k} of its input, which shares memory with another "
                    f"tensor of the same input; pass clones on, or use an operation that does not write in place"
                )

    def refuse(self, kind: Hashable) -> None:
        """Raises RuntimeError for a run that wrote into its input, unlike those before; later ones get copies."""
        self._writes[kind] = True
        raise RuntimeError(
            f"{self._name} wrote into its input in place, which it did not do when it ran first. Discard this "
            f"forward and run it again: the input is copied from now on"
        )


def _place(tensor: Tensor) -> tuple[int, int, int]:
    """The storage of a strided tensor, its first byte in it, and the one behind its last."""
    size = tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * size
    return memory_of(tensor), begin, begin + (int(last) + 1) * size
