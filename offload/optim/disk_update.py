"""A piece whose parameters, gradients and states rest in files: read in large pieces, updated in memory, written back.

An optimizer could work on the mapped files themselves. But then it reads by page faults in the middle of its
arithmetic, a full or failing disk is a signal that kills the process, and what was half-written cannot be told from
what was not. So a block of the piece at a time is read onto an I/O buffers in memory and updated there, while those
before it are being written, and the next ones read.

::

    weights    home file  --> slot, or I/O buffers ----+                +--> home file
    gradient   its file   --> I/O buffers -------------+--> update -----+
    states     their file --> I/O buffers -------------+                +--> their file

Guarantees
    * The I/O buffers holds a few blocks. A parameter larger than one block is updated in several, where the class is
      known to treat every element alone. So memory grows neither with the model nor with its largest parameter.
    * What rests is written only after a block's arithmetic is done, and a write that failed is repeated, not computed
      again, however many blocks were computed meanwhile. So an update can be resumed after any error, and nothing is
      applied twice.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.io_buffers import IOBuffer, IOBufferPool, buffer_pool_bytes
from offload.optim.io_requests import Copy, Read, Write
from offload.optim.param_block import OptimizerFactory, ParamBlock, UpdateJob
from offload.optim.update_block import StateSlice, UpdateBlock
from offload.planning.partition import aligned
from offload.storage import Block, Tier
from offload.storage.buffer import PAGE_BYTES, whole_pages
from offload.storage.contract import bytes_of
from offload.streaming.shard import Shard, Slice

__all__ = ["BITE_BYTES", "DiskParamBlock", "cut", "update_block_bytes"]

#: Bytes of weights that are updated at once, at the most.
BITE_BYTES = 8 << 20
#: And where the largest shard is small: such a part of it, so that the I/O buffers, which holds several blocks with
#: their gradients and moments, does not outgrow the slots. In whole MiB, since a disk takes whole pages.
BITES_OF_A_SHARD, BITE_UNIT = 6, 1 << 20

#: Classes whose update of one element depends on no other element, and whose states have the parameter's shape.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


def update_block_bytes(shards: Sequence[Shard], most_bytes: float = math.inf) -> int:
    """Bytes of weights that are updated at once, in a model of such shards.

    Args:
        shards: of the model.
        most_bytes: for the buffers of the I/O buffers.

    Raises:
        ValueError: if no I/O buffers is as small as that.
    """
    largest = max((sum(s.nbytes for s in shard.own) for shard in shards), default=0)
    update_block = min(BITE_BYTES, max(1, largest // BITES_OF_A_SHARD // BITE_UNIT) * BITE_UNIT)
    while buffer_pool_bytes(update_block) > most_bytes and update_block > PAGE_BYTES:
        update_block = max(PAGE_BYTES, update_block // 2 // PAGE_BYTES * PAGE_BYTES)
    if buffer_pool_bytes(update_block) > most_bytes:
        raise ValueError(
            f"optimizer states are on disk: their buffers take at least {buffer_pool_bytes(update_block):,} "
            f"bytes, but memory_budget leaves {max(0, int(most_bytes)):,} besides slots, gradients and "
            f"boundaries; use a larger budget, or more shards"
        )
    return update_block


def cut(slices: Sequence[Slice], most: int) -> Iterator[list[Slice]]:
    """Groups parameters into pieces of at most ``most`` bytes; a larger parameter is one of its own.

    The smallest first: norms and biases, which stand between matrices, are then updated together, and not each for
    itself for want of room beside a matrix.
    """
    param_block: list[Slice] = []
    for s in sorted(slices, key=lambda s: s.nbytes):
        if param_block and sum(member.nbytes for member in param_block) + s.nbytes > most:
            yield param_block
            param_block = []
        param_block.append(s)
    if param_block:
        yield param_block


class DiskParamBlock(ParamBlock):
    """In files.

    ``tier`` is where states rest; ``buffer_pool`` is shared by all param_blocks of an optimizer; ``most`` bytes of
    weights are updated at once.
    """

    def __init__(
        self,
        shard: Shard,
        slices: Sequence[Slice],
        group: int,
        factory: OptimizerFactory,
        tier: Tier,
        buffer_pool: IOBufferPool,
        most: int,
    ) -> None:
        super().__init__(shard, slices, group, factory)
        self._most = most
        self._tier = tier
        self._buffer_pool = buffer_pool
        self._rest: dict[tuple[int, str], StateSlice] = {}

    def adopt(self, states: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
        """Replaces all states; they go to rest at once, straight from where they are given."""
        kept, self._rest = self._rest, {}
        try:
            super().adopt(states, options)
            self._put_to_rest()
        except BaseException:
            self._rest = kept
            raise

    @staticmethod
    def _taken(value: Any) -> Any:
        return value if _rests(value) else ParamBlock._taken(value)

    def prepare(self, options: Sequence[Mapping[str, Any]], *, sparse: bool = False) -> Optimizer:
        """The optimizer, with these hyperparameters. States that it makes at once go to rest at once."""
        new = self.optimizer is None
        optimizer = super().prepare(options, sparse=sparse)
        if new:
            self._put_to_rest()
        return optimizer

    def run(self, job: UpdateJob, slot: Tensor | None, coming: Callable[[], Iterable[UpdateJob]] = tuple) -> None:
        """Updates block by block, from where an earlier attempt failed; at the end what is ``coming`` is being read."""
        self.prepare(job.options, sparse=job.sparse)
        self._note(job)
        update_blocks = self._update_blocks(job)
        while job.blocks_done < len(update_blocks):
            self._run_update_block(job, update_blocks, slot, coming)
        job.group_changes = self.group_changes()

    def prefetch(self, job: UpdateJob) -> bool:
        """Begins to read what is still to be done, as far as the I/O buffers have room; says whether it has more."""
        self._note(job)
        return self._look_ahead_from(job.blocks_done, job, self._update_blocks(job))

    def flush(self, job: UpdateJob) -> None:
        """Returns when all that is computed is where it rests; what could not be written is written again."""
        self._buffer_pool.wait_idle()
        if job.unwritten:
            self._buffer_pool.send(job.unwritten, job.arrived)
            self._buffer_pool.wait_idle()

    def cancel_prefetch(self) -> None:
        """Returns when nothing is on its way any more, whatever became of it: each task knows what is left of it."""
        with contextlib.suppress(Exception):
            self._buffer_pool.wait_idle()

    # --- one block -----------------------------------------------------------------------------------------------

    def _note(self, job: UpdateJob) -> None:
        """Notes what the states were before the task, when it is first looked at."""
        if job.before is None:
            job.before = [self._small(state) if state else None for state in self.states()]

    def _update_blocks(self, job: UpdateJob) -> list[UpdateBlock]:
        s = self.slices[0]
        if len(self.slices) > 1 or s.nbytes <= self._most or job.sparse or self.factory.kind not in ELEMENTWISE:
            return [UpdateBlock()]
        step, count = self._most // s.dtype.itemsize, s.parameter.numel()
        return [UpdateBlock(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def _wanted(
        self, job: UpdateJob, update_blocks: Sequence[UpdateBlock], index: int
    ) -> tuple[Hashable, list[Read], int]:
        """What a block of a task is called, what of it rests in files, and bytes of room for the rest of it."""
        update_block, before, reads, spare_bytes = update_blocks[index], job.before, [], 0
        assert before is not None
        for k, gradient in enumerate(job.gradients):
            if gradient is None:
                continue
            s = self.slices[k]
            offset, nbytes = update_block.span(s.nbytes, s.dtype.itemsize)
            spare_bytes += 2 * (
                nbytes + PAGE_BYTES
            )  # weights, where no slot has them, and a gradient that is in memory
            if (place := self._in_file(s, gradient)) is not None:
                reads.append(Read((k, None), place[0], place[1] + offset, nbytes))
            if before[k] is None:
                continue  # the optimizer starts from nothing, for each block anew
            for (owner, key), rest in self._rest.items():
                if owner == k:
                    offset, nbytes = update_block.span(rest.nbytes, rest.dtype.itemsize)
                    reads.append(Read((k, key), rest.block, rest.offset + offset, nbytes))
        return (job, index), reads, spare_bytes

    def _in_file(self, s: Slice, gradient: Tensor) -> tuple[Block, int] | None:
        """Block and offset where a gradient rests, if it does in the file of the shard's gradients."""
        block, place = self.shard.gradients, self.shard.gradient_offsets.get(s)
        if gradient.is_sparse or block is None or place is None:
            return None
        return (block, place) if gradient.data_ptr() == block.tensor.data_ptr() + place else None

    def _run_update_block(
        self,
        job: UpdateJob,
        update_blocks: Sequence[UpdateBlock],
        slot: Tensor | None,
        coming: Callable[[], Iterable[UpdateJob]],
    ) -> None:
        optimizer, before = self.optimizer, job.before
        assert optimizer is not None
        assert before is not None
        update_block = update_blocks[job.blocks_done]
        io_buffer = self._buffer_pool.prepare(*self._wanted(job, update_blocks, job.blocks_done))
        chosen = [k for k, gradient in enumerate(job.gradients) if gradient is not None]
        writes: list[Write | Copy] = []
        resting = dict(self._rest)
        try:
            for k in chosen:
                writes.extend(self._lay_out(job, k, update_block, io_buffer, slot, before[k]))
            job.bytes_read += io_buffer.bytes_read
            self._look_past(job.blocks_done + 1, job, update_blocks, coming)
            optimizer.step()
            self._leave_room(chosen, update_block)
            self._make_room(chosen, update_block)
            for k in chosen:
                writes.extend(self._state_writes(k, update_block))
        except BaseException:
            # Nothing that rests has been written yet.
            self._rest = resting
            for k in chosen:
                self._come_to_rest(k)
                optimizer.state[self.proxies[k]].update(self._small(before[k] or {}))
            raise
        for k in chosen:
            self._come_to_rest(k)
        job.unwritten += writes
        job.blocks_done += 1
        self._buffer_pool.send(writes, job.arrived)
        self._look_past(job.blocks_done, job, update_blocks, coming)

    def _look_past(
        self,
        first: int,
        job: UpdateJob,
        update_blocks: Sequence[UpdateBlock],
        coming: Callable[[], Iterable[UpdateJob]],
    ) -> None:
        """Begins to read blocks, from the ``first`` of this task and then of those that come."""
        if self._look_ahead_from(first, job, update_blocks):
            for other in coming():
                if not other.param_block.prefetch(other):
                    return

    def _look_ahead_from(self, first: int, job: UpdateJob, update_blocks: Sequence[UpdateBlock]) -> bool:
        for index in range(first, len(update_blocks)):
            if self._buffer_pool.expects((job, index)):
                continue
            if not self._buffer_pool.make_room():
                return False
            self._buffer_pool.prefetch(*self._wanted(job, update_blocks, index))
        return self._buffer_pool.make_room()

    def _lay_out(
        self,
        job: UpdateJob,
        k: int,
        update_block: UpdateBlock,
        io_buffer: IOBuffer,
        slot: Tensor | None,
        before: Mapping[str, Any] | None,
    ) -> Iterator[Write | Copy]:
        """Has one parameter, its gradient and its states in memory; yields what must be written afterwards."""
        s, proxy, home = self.slices[k], self.proxies[k], self.shard.home
        assert self.optimizer is not None
        assert home is not None
        offset, nbytes = update_block.span(s.nbytes, s.dtype.itemsize)
        offset += s.offset
        weights = io_buffer.read(Read(k, home, offset, nbytes)) if slot is None else slot[offset : offset + nbytes]
        proxy.data = update_block.shape(weights, s.dtype, s.parameter.shape, s.stride)
        yield Write(weights, home, offset)
        proxy.grad, writes = self._gradient(job, k, update_block, io_buffer)
        yield from writes
        state = self.optimizer.state[proxy]
        state.clear()
        if before is None:
            return
        state.update(self._small(before))
        for (owner, key), rest in self._rest.items():
            if owner == k:
                state[key] = update_block.shape(io_buffer.part((k, key)), rest.dtype, rest.shape, rest.stride)

    def _gradient(
        self, job: UpdateJob, k: int, update_block: UpdateBlock, io_buffer: IOBuffer
    ) -> tuple[Tensor, list[Write | Copy]]:
        s, gradient, coefficient = self.slices[k], job.gradients[k], job.coefficient
        assert gradient is not None
        if gradient.is_sparse:
            return (gradient if coefficient is None else gradient * coefficient), []
        offset, nbytes = update_block.span(s.nbytes, s.dtype.itemsize)
        back: Write | Copy
        if (place := self._in_file(s, gradient)) is not None:
            part = io_buffer.part((k, None))
            back = Write(part, place[0], place[1] + offset)
        else:
            if gradient.stride() != s.stride or gradient.device.type != "cpu":
                dense = torch.empty_strided(s.parameter.shape, s.stride, dtype=s.dtype)
                gradient = job.gradients[k] = dense.copy_(gradient)
            resting = bytes_of(gradient)[offset : offset + nbytes]
            part = resting if coefficient is None else io_buffer.take(nbytes).copy_(resting)
            back = Copy(part, resting)
        if coefficient is None:
            return update_block.shape(part, s.dtype, s.parameter.shape, s.stride), []
        part.view(s.dtype).mul_(coefficient)
        # A gradient that is not zeroed after a clipped step goes on clipped.
        writes = [back] if s.parameter.grad is gradient else []
        return update_block.shape(part, s.dtype, s.parameter.shape, s.stride), writes

    # --- states at rest -----------------------------------------------------------------------------------------

    @staticmethod
    def _small(state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of what does not rest in a file: counts of steps, and the like."""
        return {
            key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in state.items()
            if not _rests(value)
        }

    def _leave_room(self, chosen: Sequence[int], update_block: UpdateBlock) -> None:
        """Takes the room from states that are gone, or are of another type or shape than before the step.

        Raises:
            TypeError: if a state cannot rest in a file.
        """
        states = self.states()
        for k in chosen:
            for key, value in states[k].items():
                if _rests(value) and type(value) not in (Tensor, torch.nn.Parameter):
                    raise TypeError(
                        f"{self.factory.kind.__name__} keeps state {key!r} of parameter {self.slices[k].name} as "
                        f"{type(value).__name__}, which cannot rest in a file; use homes in host memory "
                        f"(offload_device='cpu'), or a class whose states are plain tensors"
                    )
        for k, key in [place for place in self._rest if place[0] in chosen]:
            rest, value = self._rest[k, key], states[k].get(key)
            if (
                value is None
                or not _rests(value)
                or value.dtype != rest.dtype
                or (update_block.end is None and value.shape != rest.shape)
            ):
                del self._rest[k, key]

    def _make_room(self, chosen: Sequence[int], update_block: UpdateBlock) -> None:
        """One block, of exactly the size of the states that have no place yet."""
        states, found, end = self.states(), [], 0
        for k in chosen:
            s = self.slices[k]
            for key, value in states[k].items():
                if not _rests(value) or (k, key) in self._rest:
                    continue
                whole = update_block.end is None
                shape = value.shape if whole else s.parameter.shape
                stride = torch.empty_like(value, device="meta").stride() if whole else s.stride
                nbytes = shape.numel() * value.element_size()
                if nbytes > PAGE_BYTES:
                    end = whole_pages(end)  # a large one has its pages to itself, so that a disk can move them whole
                found.append((k, key, end, nbytes, value.dtype, shape, stride))
                end += aligned(nbytes)
        if found:
            block = self._tier.allocate(end, f"shard{self.shard.index}-states", cyclic=True)
            for k, key, offset, nbytes, dtype, shape, stride in found:
                self._rest[k, key] = StateSlice(block, offset, nbytes, dtype, shape, stride)

    def _state_writes(self, k: int, update_block: UpdateBlock) -> Iterator[Write]:
        for key, value in self.states()[k].items():
            if _rests(value):
                rest = self._rest[k, key]
                dense = value
                if update_block.end is None and value.stride() != rest.stride:
                    dense = torch.empty_strided(rest.shape, rest.stride, dtype=rest.dtype).copy_(value)
                offset = update_block.span(rest.nbytes, rest.dtype.itemsize)[0]
                yield Write(bytes_of(dense), rest.block, rest.offset + offset)

    def _come_to_rest(self, k: int) -> None:
        """Parameter and states are views of their files again; states that only the I/O buffers holds are dropped."""
        assert self.optimizer is not None
        proxy, state = self.proxies[k], self.optimizer.state[self.proxies[k]]
        proxy.grad = None
        proxy.data = self.shard.home_view(self.slices[k])
        for key in [key for key, value in state.items() if _rests(value)]:
            rest = self._rest.get((k, key))
            if rest is None:
                del state[key]
            else:
                state[key] = rest.view()

    def _put_to_rest(self) -> None:
        """Writes all states to files."""
        everyone = range(len(self.slices))
        self._make_room(everyone, UpdateBlock())
        for k in everyone:
            for write in self._state_writes(k, UpdateBlock()):
                write.go()
            if self.states()[k]:
                self._come_to_rest(k)


def _rests(value: Any) -> bool:
    """Whether a state rests in a file. Numbers do not, nor do sparse tensors, such as momentum of sparse gradients."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.layout is torch.strided
