"""Optimizer states in files: where each state of a param block is, and what is read and written for an update of it.

States of one update are allocated as one block of storage. Only dense states are stored in files: what counts steps,
and states that are sparse, stay in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.io_buffers import IOBuffer
from offload.optim.io_requests import Read, UpdateBlock, Write, adjacent, span_bytes
from offload.optim.state_forms import elements_per_entry
from offload.planning.partition import aligned
from offload.storage import Block, Tier
from offload.storage.buffer import PAGE_BYTES, host_buffer, whole_pages
from offload.storage.contract import bytes_of
from offload.storage.host import MemoryBlock
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice
from pipe.torch_private.autograd import outside_inference_mode

__all__ = ["StateFiles", "copy_unstored", "is_stored"]

#: The states of each parameter, by name.
States = Sequence[Mapping[str, Any]]


def is_stored(value: Any) -> bool:
    """Whether a state is stored in a file: not numbers, nor sparse tensors such as the momentum of sparse gradients."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.layout is torch.strided


def copy_unstored(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the state entries that are not stored in files, such as counts of steps."""
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in state.items()
        if not is_stored(value)
    }


@dataclass(frozen=True)
class StateSlice:
    """The location of a state tensor in its file."""

    block: Block
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    #: Elements of the parameter for each entry of the state.
    per: int = 1

    def span(self, update_block: UpdateBlock) -> tuple[int, int]:
        """Offset and size in bytes, within the state, of what belongs to a block of the parameter."""
        if update_block.end is None:
            return 0, self.nbytes
        begin, end = (-(-element // self.per) for element in (update_block.begin, update_block.end))
        return begin * self.dtype.itemsize, (end - begin) * self.dtype.itemsize

    def view(self) -> Tensor:
        """The state as a tensor on its file, without a copy."""
        # Not an autograd view, which would reference its base: references to the storage of a block are counted.
        block = self.block.tensor
        offset = (block.storage_offset() + self.offset) // self.dtype.itemsize
        with outside_inference_mode():
            return torch.empty(0, dtype=self.dtype).set_(block.untyped_storage(), offset, self.shape, self.stride)


class StateFiles:
    """The states of parameters ``slices`` of ``shard``, in blocks of ``tier``. ``kind``: the class that makes them."""

    def __init__(self, shard: Shard, slices: Sequence[Slice], tier: Tier, kind: type[Optimizer]) -> None:
        self._shard = shard
        self._slices = slices
        self._tier = tier
        self._kind = kind
        #: By position of the parameter, and name of the state.
        self.places: dict[tuple[int, str], StateSlice] = {}

    def _of(self, k: int) -> Iterator[tuple[str, StateSlice]]:
        return ((key, place) for (owner, key), place in self.places.items() if owner == k)

    def reads(self, k: int, update_block: UpdateBlock) -> Iterator[Read]:
        """Reads of the states of parameter ``k``, as far as they belong to a block of it."""
        for key, place in self._of(k):
            offset, nbytes = place.span(update_block)
            yield Read((k, key), place.block, place.offset + offset, nbytes)

    def in_buffer(self, k: int, update_block: UpdateBlock, io_buffer: IOBuffer) -> dict[str, Tensor]:
        """The states of parameter ``k`` as tensors on what :meth:`reads` has read."""
        return {
            key: update_block.shape(io_buffer.part((k, key)), place.dtype, place.shape, place.stride)
            for key, place in self._of(k)
        }

    def in_memory(self, states: States) -> list[tuple[Tensor, Tensor]]:
        """All states, each with a copy in memory; adjacent ones are read at once."""
        moved = []
        found = {(place.block, place.offset): (place, states[k][key]) for (k, key), place in self.places.items()}
        for group in adjacent(Read(None, block, offset, s.nbytes) for (block, offset), (s, _) in found.items()):
            begin = group[0].offset
            memory = MemoryBlock(host_buffer(span_bytes(group)))
            group[0].block.read_into(memory.tensor, begin)
            for read in group:
                place, state = found[read.block, read.offset]
                moved.append((state, replace(place, block=memory, offset=read.offset - begin).view()))
        return moved

    def check(self, states: States, chosen: Iterable[int]) -> None:
        """Raises TypeError for states unfit for a file."""
        for k in chosen:
            for key, value in states[k].items():
                if is_stored(value) and type(value) not in (Tensor, torch.nn.Parameter):
                    raise TypeError(
                        f"{self._kind.__name__} keeps state {key!r} of parameter {self._slices[k].name} as "
                        f"{type(value).__name__}, which cannot be stored in a file; use homes in host memory "
                        f"(offload_device='cpu'), or a class whose states are plain tensors"
                    )

    def drop_stale(self, states: States, chosen: Sequence[int], update_block: UpdateBlock) -> None:
        """Forgets the places of states that were removed or changed. Raises TypeError for states unfit for a file."""
        self.check(states, chosen)
        for k, key in [place for place in self.places if place[0] in chosen]:
            place, state = self.places[k, key], states[k].get(key)
            same = state is not None and is_stored(state) and state.dtype == place.dtype
            if not same or (update_block.end is None and states[k][key].shape != place.shape):
                del self.places[k, key]

    def allocate(self, states: States, chosen: Iterable[int], update_block: UpdateBlock) -> None:
        """Allocates one block for all states that have no place yet. Raises OSError if the storage is full."""
        found, end = [], 0
        for k in chosen:
            s = self._slices[k]
            for key, value in states[k].items():
                if not is_stored(value) or (k, key) in self.places:
                    continue
                whole = update_block.end is None
                per = elements_per_entry(key)
                if whole:
                    shape, stride = value.shape, torch.empty_like(value, device="meta").stride()
                elif per == 1:
                    shape, stride = s.parameter.shape, s.stride
                else:
                    shape, stride = torch.Size([-(-s.parameter.numel() // per)]), (1,)
                nbytes = shape.numel() * value.element_size()
                if nbytes > PAGE_BYTES:
                    end = whole_pages(end)  # large states begin on a page, so that a disk can transfer whole pages
                found.append((k, key, end, nbytes, value.dtype, shape, stride, per))
                end += aligned(nbytes)
        if found:
            block = self._tier.allocate(end, f"shard{self._shard.index}-states", cyclic=True)
            for k, key, offset, nbytes, dtype, shape, stride, per in found:
                self.places[k, key] = StateSlice(block, offset, nbytes, dtype, shape, stride, per)

    def writes(self, k: int, state: Mapping[str, Any], update_block: UpdateBlock) -> Iterator[Write]:
        """Writes of the states of parameter ``k``: of all elements, or of those of a block of it."""
        for key, value in state.items():
            if is_stored(value):
                place = self.places[k, key]
                dense = value
                if update_block.end is None and value.stride() != place.stride:
                    dense = torch.empty_strided(place.shape, place.stride, dtype=place.dtype).copy_(value)
                yield Write(bytes_of(dense), place.block, place.offset + place.span(update_block)[0])

    def show(self, k: int, state: dict[str, Any]) -> None:
        """Makes the states of parameter ``k`` views of their files; drops those that only an I/O buffer holds."""
        for key in [key for key, value in state.items() if is_stored(value)]:
            place = self.places.get((k, key))
            if place is None:
                del state[key]
            else:
                state[key] = place.view()
