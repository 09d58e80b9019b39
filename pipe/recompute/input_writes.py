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

from pipe.nested import map_distinct, tensors_in

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

    def copy(self, value: Any) -> Any:
        """A copy for one run."""
        return map_distinct(Tensor.clone, value)

    @contextlib.contextmanager
    def survived(self, value: Any, kind: Hashable) -> Iterator[Any]:
        """Yields the input for one run of the layers: ``value`` or a copy of it. Raises if ``value`` was changed."""
        copies = self.copies(kind)
        given = self.copy(value) if copies else value
        tensors = tensors_in(given)
        counted = bool(tensors) and not any(tensor.is_inference() for tensor in tensors)
        before = [tensor._version for tensor in tensors] if counted else []
        yield given
        if not counted:
            return
        written = [tensor._version != version for tensor, version in zip(tensors, before, strict=True)]
        writes = any(written)
        if writes and not copies:
            self.refuse(kind)
        if writes:
            self._check_apart(tensors_in(value), written)
        self._writes.setdefault(kind, writes)

    def note(self, kind: Hashable, tensors: Sequence[Tensor], written: Sequence[bool]) -> None:
        """Notes which tensors of the input a run has written. Raises if a copy of each does not serve further runs."""
        self._writes[kind] = True
        self._check_apart(tensors, written)

    def refuse(self, kind: Hashable) -> None:
        """Raises RuntimeError for a run that wrote into its input, unlike those before; later ones get copies."""
        self._writes[kind] = True
        raise RuntimeError(
            f"{self._name} wrote into its input in place, which it did not do when it ran first. Discard this "
            f"forward and run it again: the input is copied from now on"
        )

    def _check_apart(self, tensors: Sequence[Tensor], written: Sequence[bool]) -> None:
        """Raises if a written tensor shares memory with another one: only in the bare model the write changes both.

        Here each tensor is copied, and gets its gradient, separately.
        """
        places = [_place(tensor) for tensor in tensors]
        for k, (tensor, place) in enumerate(zip(tensors, places, strict=True)):
            if not written[k] or place is None:
                continue
            for other, there in zip(tensors, places, strict=True):
                if other is not tensor and there is not None and _overlap(place, there):
                    raise RuntimeError(
                        f"{self._name} writes in place into tensor {k} of its input, which shares memory with another "
                        f"tensor of the same input; pass clones on, or use an operation that does not write in place"
                    )


def _place(tensor: Tensor) -> tuple[int, int, int] | None:
    """The storage of a strided tensor, and its first and last byte in it; None for other tensors and empty ones."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) * tensor.element_size()
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin, begin + int(last) + tensor.element_size()


def _overlap(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]
