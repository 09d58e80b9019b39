"""Updates of parameters, gradients and optimizer states that are stored in files: read, step in memory, write back.

A step on memory-mapped files would read by page faults in the middle of its arithmetic, a full or failing disk would
kill the process with a signal, and a half-written state could not be told from a complete one. So one update block of a
param block at a time is read into an I/O buffer and updated there, while earlier ones are written back and later ones
are prefetched.

::

    weights    home file  --> slot, or I/O buffer ----+                +--> home file
    gradient   its file   --> I/O buffer -------------+--> update -----+
    states     their file --> I/O buffer -------------+                +--> their file

Guarantees
    * Memory is that of a few update blocks, whatever the size of the model and of its largest parameter. A parameter
      larger than one block is updated in several, where the class is known to be elementwise.
    * Files are written only after a block's arithmetic is complete, and a failed write is repeated, not computed again.
      So an update can be resumed after any error, and nothing is applied twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.optim.dynamic_map import BLOCK
from offload.optim.io_buffers import Blocks, IOBuffer, IOBufferPool, Read, UpdateBlock, Write
from offload.optim.param_block import ParamBlock, States, UpdateJob
from offload.optim.state_forms import EncodedWeights, copied, elements_per_entry
from offload.partition import aligned
from offload.storage import Block, Tier
from offload.storage.buffer import PAGE_BYTES, whole_pages
from offload.storage.contract import bytes_of, in_order
from offload.streaming.slices import Slice
from pipe.torch_private.autograd import outside_inference_mode

__all__ = ["DiskParamBlock", "group_slices"]


def is_stored(value: Any) -> bool:
    """Whether a state is stored in a file: not counts of steps, nor sparse tensors (momentum of sparse gradients)."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.layout is torch.strided


class StateFile(NamedTuple):
    """Where a state is stored: from an offset of a block on, and a tensor on it."""

    block: Block
    offset: int
    view: Tensor

    @classmethod
    def at(cls, block: Block, offset: int, like: Tensor) -> StateFile:
        """At an offset of a block, with the type and layout of ``like``."""
        # Not an autograd view, which would reference its base: references to the storage of a block are counted.
        begin = (block.tensor.storage_offset() + offset) // like.dtype.itemsize
        with outside_inference_mode():
            view = torch.empty(0, dtype=like.dtype)
            return cls(block, offset, view.set_(block.tensor.untyped_storage(), begin, like.shape, like.stride()))

    def span(self, key: str, update_block: UpdateBlock) -> tuple[int, int]:
        """Offset and size of what belongs to a block of the parameter; the state is named ``key``."""
        return update_block.span(self.view.nbytes, self.view.element_size(), elements_per_entry(key))


def group_slices(slices: Sequence[Slice], max_bytes: int) -> Iterator[list[Slice]]:
    """Groups parameters into param blocks of at most ``max_bytes``; a larger parameter is one of its own.

    In order of size: norms and biases, which are stored between matrices, are then updated together.
    """
    param_block: list[Slice] = []
    for s in sorted(slices, key=lambda s: s.full_nbytes):
        if param_block and sum(member.full_nbytes for member in param_block) + s.full_nbytes > max_bytes:
            yield param_block
            param_block = []
        param_block.append(s)
    if param_block:
        yield param_block


#: Key of the lower halves of weights, beside those of states.
_LOWER = object()


@dataclass(eq=False, kw_only=True)
class DiskParamBlock(ParamBlock):
    """A param block in files of ``tier``, updated ``max_bytes`` at a time in the optimizer's ``buffer_pool``."""

    tier: Tier
    buffer_pool: IOBufferPool
    max_bytes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        #: Type and layout of each parameter.
        self._like = [s.like() for s in self.slices]
        #: For each parameter, where its states are, by their names.
        self._places: list[dict[str, StateFile]] = [{} for _ in self.slices]

    def load_states(self, states: States, options: Sequence[Mapping[str, Any]]) -> None:
        """Replaces all states: each given tensor is written to its file without a copy in memory."""
        previous, self._places = self._places, [{} for _ in self.slices]
        try:
            super().load_states(states, options)
        except BaseException:
            self._places = previous
            raise

    def adopt_states(self, states: States, options: Sequence[Mapping[str, Any]]) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`ParamBlock.adopt_states`; the states are written to files."""
        super().adopt_states(states, options)
        self._store_states()
        files = zip(states, self.states(), strict=True)
        return [(value, there[key]) for here, there in files for key, value in here.items() if is_stored(value)]

    def states_in_memory(self) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`ParamBlock.states_in_memory`."""
        found = []
        for state, places in zip(self.states(), self._places, strict=True):
            for key, place in places.items():
                copy = torch.empty_strided(place.view.shape, place.view.stride(), dtype=place.view.dtype)
                place.block.read_into(bytes_of(copy), place.offset)
                found.append((state[key], copy))
        return found

    @staticmethod
    def _copied(value: Any) -> Any:
        return value if is_stored(value) else ParamBlock._copied(value)

    def run(self, job: UpdateJob, slot: Tensor | None, upcoming: Callable[[], Blocks] = tuple) -> None:
        """Updates block by block, from where an earlier attempt failed, and begins to read the jobs in ``upcoming``."""
        self.prepare(job.options, sparse=job.sparse)
        self._begin(job)
        in_memory = []
        for k, (s, gradient) in enumerate(zip(self.slices, job.gradients, strict=True)):
            if gradient is None or job.gradient_places[k] is not None:
                continue
            if not gradient.is_sparse and (gradient.stride() != s.stride or gradient.device.type != "cpu"):
                pinned = gradient.is_cuda  # see copied_to()
                dense = torch.empty_strided(s.parameter.shape, s.stride, dtype=gradient.dtype, pin_memory=pinned)
                gradient = job.gradients[k] = dense.copy_(gradient)
            in_memory.append((k, gradient))
        job.clip([gradient for k, gradient in in_memory if gradient.dtype == self.proxies[k].dtype])
        while job.blocks_done < len(job.update_blocks):
            self._run_update_block(job, slot, upcoming)
        coefficient = job.coefficient_on(torch.device("cpu"))
        if coefficient is not None:
            for k, gradient in in_memory:
                if gradient.dtype != self.proxies[k].dtype and gradient is self.slices[k].parameter.grad:
                    gradient.mul_(coefficient)  # it stays clipped as well, as one in its file does already
        job.group_changes = self.group_changes()

    def to_read(self, job: UpdateJob, skip: int = 0) -> Blocks:
        """The blocks that are still to be updated, but the first to ``skip``."""
        self._begin(job)
        for index in range(job.blocks_done + skip, len(job.update_blocks)):
            yield (job, index), partial(self._requests, job, index)

    def _begin(self, job: UpdateJob) -> None:
        """Cuts the job into blocks and records the states before it, on its first use."""
        if job.update_blocks:
            return
        states = zip(self.states(), self._places, strict=True)
        job.states_before = [copied(state, places) if state else None for state, places in states]
        job.gradient_places = [*map(self._place_of_gradient, self.slices, job.gradients)]
        s = self.slices[0]
        if len(self.slices) > 1 or s.full_nbytes <= self.max_bytes or job.sparse or not self.factory.elementwise:
            job.update_blocks = [UpdateBlock()]
            return
        step, count = self.max_bytes // s.full_dtype.itemsize, s.parameter.numel()
        if self.encoded or s.form is not None:
            step = max(step // BLOCK, 1) * BLOCK  # elements that share a scale, or random bits, are not separated
        job.update_blocks = [UpdateBlock(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def _requests(self, job: UpdateJob, index: int) -> tuple[list[Read], int]:
        """Reads of the parts of a block that are in files, and bytes for its other parts."""
        update_block, reads, spare_bytes = job.update_blocks[index], [], 0
        for k, gradient in enumerate(job.gradients):
            if gradient is None:
                continue
            s = self.slices[k]
            offset, nbytes = update_block.span(s.nbytes, s.dtype.itemsize)
            spare_bytes += nbytes + PAGE_BYTES  # weights, where no slot has them
            if s.form is not None and self.shard.lower is not None:
                reads.append(Read((k, _LOWER), self.shard.lower, s.offset + offset, nbytes))
            if (place := job.gradient_places[k]) is not None:
                offset, nbytes = update_block.span(gradient.nbytes, gradient.element_size())
                reads.append(Read((k, None), place[0], place[1] + offset, nbytes))
            if gradient.dtype != self.proxies[k].dtype:  # it is widened
                spare_bytes += update_block.span(s.full_nbytes, s.full_dtype.itemsize)[1] + PAGE_BYTES
            if job.states_before[k] is not None:  # else the optimizer makes new states, for each block
                for key, state in self._places[k].items():
                    offset, nbytes = state.span(key, update_block)
                    reads.append(Read((k, key), state.block, state.offset + offset, nbytes))
        return reads, spare_bytes

    def _place_of_gradient(self, s: Slice, gradient: Tensor | None) -> tuple[Block, int] | None:
        """Block and offset of a gradient in the file of the shard's gradients; None if it is stored elsewhere."""
        region = self.shard.gradient_region(s.parameter)
        if gradient is None or region is None or not region.holds(gradient):
            return None
        block, place = region.block, region.offsets[id(s.parameter)]
        return (block, place) if gradient.data_ptr() == block.tensor.data_ptr() + place else None

    def _run_update_block(self, job: UpdateJob, slot: Tensor | None, upcoming: Callable[[], Blocks]) -> None:
        optimizer, update_block = self.optimizer, job.update_blocks[job.blocks_done]
        assert optimizer is not None
        io_buffer = self.buffer_pool.prepare(*next(iter(self.to_read(job))))
        chosen = [k for k, gradient in enumerate(job.gradients) if gradient is not None]
        writes: list[Write] = []
        weights: dict[int, EncodedWeights] = {}
        places_before = [dict(places) for places in self._places]
        try:
            for k in chosen:
                writes += self._bind_weights(job, k, update_block, io_buffer, slot, weights)
                self.proxies[k].grad = self._gradient(job, k, update_block, io_buffer, writes)
                self._bind_states(job, k, update_block, io_buffer)
            job.bytes_read += io_buffer.bytes_read
            self.buffer_pool.prefetch(itertools.chain(self.to_read(job, 1), upcoming()))
            self._step(weights)
            writes += self._state_writes(chosen, update_block)
        except BaseException:
            # No file has been written yet.
            self._places = places_before
            for k in chosen:
                state = optimizer.state[self.proxies[k]]
                state.clear()
                state.update(copied(job.states_before[k] or {}))
                self._restore_views(k)
            raise
        for k in chosen:
            self._restore_views(k)
        job.writes += writes
        job.bytes_written += sum(write.nbytes for write in writes)
        job.blocks_done += 1
        self.buffer_pool.write_back(writes)

    def _bind_weights(
        self,
        job: UpdateJob,
        k: int,
        update_block: UpdateBlock,
        io_buffer: IOBuffer,
        slot: Tensor | None,
        encoded: dict[int, EncodedWeights],
    ) -> Iterator[Write]:
        """Points one parameter at memory; yields the writes to do afterwards.

        Weights that are stored in a form are added to ``encoded``.
        """
        s, proxy, home, lower, wide = self.slices[k], self.proxies[k], self.shard.home, self.shard.lower, None
        assert home is not None
        offset, nbytes = update_block.span(s.nbytes, s.dtype.itemsize)
        at = s.offset + offset
        if slot is None:
            weights = io_buffer.read(home, at, nbytes)
        else:
            here = self.shard.slot_slice(s)
            begin, count = update_block.span(here.nbytes, here.dtype.itemsize)
            weights = slot[here.offset + begin : here.offset + begin + count]
            if here.dtype != s.dtype:
                wide, weights = weights.view(here.dtype), io_buffer.take(nbytes, at)
        yield Write(weights, home, at)
        if s.form is None:
            proxy.data = update_block.shape(weights, self._like[k])
            return
        low = None
        if lower is not None:
            yield (part := io_buffer.part((k, _LOWER)))
            low = part.source.view(torch.int16)
        upper = weights.view(s.dtype)
        like = self._like[k] if update_block.end is None else in_order(self._like[k])[: upper.numel()]
        proxy.data = torch.zeros((), dtype=like.dtype).expand(like.shape)
        encoded[k] = EncodedWeights(s.form, s.name, upper, low, like, job.step, update_block.begin, wide)

    def _gradient(
        self, job: UpdateJob, k: int, update_block: UpdateBlock, io_buffer: IOBuffer, writes: list[Write]
    ) -> Tensor:
        """The gradient of one parameter in memory; adds what is to be written after the update."""
        s, gradient = self.slices[k], job.gradients[k]
        assert gradient is not None
        if gradient.is_sparse:
            return gradient
        coefficient = job.coefficient_on(torch.device("cpu"))  # that of a device, where norms were computed
        part = None if job.gradient_places[k] is None else io_buffer.part((k, None))
        if part is None:
            offset, nbytes = update_block.span(gradient.nbytes, gradient.element_size())
            stored = bytes_of(gradient)[offset : offset + nbytes].view(gradient.dtype)
        else:
            stored = part.source.view(gradient.dtype)
        values, full = stored, self.proxies[k].dtype
        rounded = gradient.dtype != full
        if rounded:
            # Clipped in the parameter's type, from what is stored: it is not rounded again before its use.
            values = io_buffer.take(values.numel() * full.itemsize).view(full).copy_(values)
        if coefficient is not None and (rounded or part is not None):
            values.mul_(coefficient)
            if part is not None and s.parameter.grad is gradient:
                # A gradient that is not zeroed stays clipped, as after clip_grad_norm_.
                writes.append(part)
                if rounded:
                    stored.copy_(values)
        return update_block.shape(values, self._like[k])

    def _bind_states(self, job: UpdateJob, k: int, update_block: UpdateBlock, io_buffer: IOBuffer) -> None:
        """Points the states of one parameter at memory; it has none before its first update."""
        assert self.optimizer is not None
        state, before = self.optimizer.state[self.proxies[k]], job.states_before[k]
        state.clear()
        if before is not None:
            state.update(copied(before))
            for key, place in self._places[k].items():
                state[key] = update_block.shape(io_buffer.part((k, key)).source, place.view)

    def _restore_views(self, k: int) -> None:
        """The states of a parameter are views of their files again, and its proxy has no memory."""
        self.proxies[k].grad = None
        self.proxies[k].data = self._blank[k]
        self.states()[k].update({key: place.view for key, place in self._places[k].items()})

    def _state_writes(self, chosen: Iterable[int], update_block: UpdateBlock) -> list[Write]:
        """The writes of the states of some parameters: of all elements, or of those of a block.

        New states get places in one new block; places of no state are forgotten. Raises OSError if the storage is full,
        TypeError for states unfit for a file.
        """
        values: list[tuple[int, str, Tensor]] = []
        new: list[tuple[int, str, int, Tensor]] = []
        end, whole, states = 0, update_block.end is None, self.states()
        for k in chosen:
            stored = {key: value for key, value in states[k].items() if is_stored(value)}
            places = self._places[k] = {key: place for key, place in self._places[k].items() if key in stored}
            for key, value in stored.items():
                if type(value) not in (Tensor, torch.nn.Parameter):
                    raise TypeError(
                        f"{self.factory.kind.__name__} keeps state {key!r} of parameter {self.slices[k].name} as "
                        f"{type(value).__name__}, which cannot be stored in a file; use homes in host memory "
                        f"(offload_device='cpu'), or a class whose states are plain tensors"
                    )
                values.append((k, key, value))
                like = torch.empty_like(value, device="meta") if whole else self._whole_state(k, key, value)
                place = places.get(key)
                if place is not None and (place.view.dtype, place.view.shape) == (like.dtype, like.shape):
                    continue
                if like.nbytes > PAGE_BYTES:
                    end = whole_pages(end)  # large states begin on a page, so that a disk can transfer whole pages
                new.append((k, key, end, like))
                end += aligned(like.nbytes)
        if new:
            block = self.tier.allocate(end, f"shard{self.shard.index}-states", cyclic=True)
            for k, key, offset, like in new:
                self._places[k][key] = StateFile.at(block, offset, like)
        writes = []
        for k, key, value in values:
            place = self._places[k][key]
            if whole and value.stride() != place.view.stride():
                value = torch.empty_strided(value.shape, place.view.stride(), dtype=value.dtype).copy_(value)
            writes.append(Write(bytes_of(value), place.block, place.offset + place.span(key, update_block)[0]))
        return writes

    def _whole_state(self, k: int, key: str, part: Tensor) -> Tensor:
        """Type and layout of the state of which ``part`` belongs to a block of the parameter."""
        s, per = self.slices[k], elements_per_entry(key)
        if per == 1:
            return torch.empty_strided(s.parameter.shape, s.stride, dtype=part.dtype, device="meta")
        return torch.empty(-(-s.parameter.numel() // per), dtype=part.dtype, device="meta")

    def _store_states(self) -> None:
        """Writes all states to files, in one block."""
        super()._store_states()
        for write in self._state_writes(range(len(self.slices)), UpdateBlock()):
            write.run()
        for k, state in enumerate(self.states()):
            if state:
                self._restore_views(k)
