"""The I/O buffers: what is read ahead is used once, by whom it was read for; nothing is lost when a disk fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import offload.optim.update_blocks
from offload.optim.io_buffers import IO_BUFFERS, MOST_STATES, IOBuffer, IOBufferPool, Read, Write
from offload.optim.update_blocks import StoredStates, states_kept, update_block_bytes_of
from offload.storage import Block
from offload.storage.buffer import PAGE_BYTES
from pipe.threads import Future, Threads
from tests.offload.pair import Pair


class Recorded(Block):
    """Bytes that tell who moves them."""

    def __init__(self, name: str, values: list[int], events: list[str]) -> None:
        self.tensor = torch.tensor(values, dtype=torch.uint8)
        self.name = name
        self.events = events

    def read_into(self, destination: Tensor, offset: int = 0) -> None:
        self.events.append(f"read {self.name}")
        destination.copy_(self.tensor[offset : offset + destination.numel()])

    def staged(self) -> Tensor:
        return self.tensor

    def part(self, offset: int, nbytes: int) -> Block:
        raise AssertionError("states and gradients are not cut")

    def write(self, source: Tensor, offset: int) -> None:
        self.events.append(f"write {self.name}")
        self.tensor[offset : offset + source.numel()] = source


class Late(Threads):
    """Threads that never start, so that only the waiter of a job runs it."""

    def offer(self, work: Callable[[], Any]) -> Future[Any]:
        return Future(work)


class Prompt(Threads):
    """Which are done with a job as soon as they have it."""

    def offer(self, work: Callable[[], Any]) -> Future[Any]:
        future = Future(work)
        future.run()
        return future


def test_no_read_fills_a_tray_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when all I/O buffers are on their way: then the oldest arrives first, and only the oldest."""
    monkeypatch.setattr("offload.optim.io_buffers.Threads", Late)
    buffer_pool, home, rest = IOBufferPool(), Recorded("home", [5], []), Recorded("rest", [0] * 2 * IO_BUFFERS, [])
    arrived: list[int] = []
    for k in range(2 * IO_BUFFERS):
        io_buffer = buffer_pool.prepare(k, [Read("home", home, 0, home.nbytes)], 0)
        assert len(arrived) == max(0, k + 1 - IO_BUFFERS)
        part = io_buffer.part("home")
        part += k
        buffer_pool.write_back([Write(part, rest, k)], lambda _, k=k: arrived.append(k))  # type: ignore[misc]
    buffer_pool.wait_idle()
    assert arrived == [*range(2 * IO_BUFFERS)]
    assert rest.tensor.tolist() == [5 + k for k in range(2 * IO_BUFFERS)]


def test_contiguous_ranges_are_read_in_one_call() -> None:
    events: list[str] = []
    first, second = Recorded("first", [k % 251 for k in range(400)], events), Recorded("second", [7] * 64, events)
    # Padding up to the next multiple of 64 is unused; at 256 bytes of another state are in between.
    places = [(first, 64, 10), (second, 0, 64), (first, 0, 64), (first, 128, 3), (first, 256, 9)]
    io_buffer = IOBufferPool().prepare("a", [Read(k, *place) for k, place in enumerate(places)], 0)
    for k, (block, offset, nbytes) in enumerate(places):
        assert io_buffer.part(k).tolist() == block.tensor[offset : offset + nbytes].tolist()
    assert sorted(events) == ["read first", "read first", "read second"]
    assert io_buffer.bytes_read == sum(nbytes for *_, nbytes in places)


def test_ranges_contiguous_in_memory_and_file_are_written_in_one_call() -> None:
    events: list[str] = []
    buffer_pool, block = IOBufferPool(), Recorded("block", [0] * 512, events)
    memory = torch.arange(512).remainder(251).to(torch.uint8)
    elsewhere = torch.full((64,), 9, dtype=torch.uint8)
    places = [(128, 64), (192, 20), (0, 3)]  # the third is not next to the others
    writes: list[Write] = [Write(memory[begin : begin + size], block, begin) for begin, size in places]
    writes.append(Write(memory[300:364], block, 256))  # next to the second in the file, and not in memory
    writes.append(Write(elsewhere, block, 320))  # next to the one before in the file, in other memory
    buffer_pool.prepare("a", [], 0)
    buffer_pool.write_back(writes, lambda done: None)
    buffer_pool.wait_idle()
    assert events == ["write block"] * 4
    for begin, size in places:
        assert block.tensor[begin : begin + size].equal(memory[begin : begin + size])
    assert block.tensor[256:320].equal(memory[300:364])
    assert block.tensor[320:384].equal(elsewhere)
    assert block.tensor[384:].sum() == 0


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(0, 1 << 20), (12 << 20, 4 << 20), (50 << 20, 8 << 20), (4 << 30, 8 << 20)],
)
def test_a_block_is_a_part_of_the_largest_shard(largest: int, expected: int) -> None:
    class Sized:
        def __init__(self, nbytes: int) -> None:
            self.full_nbytes = nbytes

    class Shards:
        own = (Sized(largest - largest // 3), Sized(largest // 3))

    shards: Any = [Shards(), Shards()]
    assert offload.optim.update_blocks.update_block_bytes(shards) == expected
    assert expected % PAGE_BYTES == 0  # else no block could be read directly


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_while_one_block_is_computed_the_next_ones_are_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_norm: float | None
) -> None:
    """Also across pieces and shards: only the first block of a step is read with nothing else to do."""
    monkeypatch.setattr(offload.optim.update_blocks, "MAX_BLOCK_BYTES", 128)
    monkeypatch.setattr("offload.optim.io_buffers.Threads", Prompt)
    pair = Pair("adamw", f"{tmp_path}/", max_norm=max_norm)
    for action in ("backward", "step", "zero", "eval", "backward", "step"):
        pair.do(action)
    laid: list[str] = []
    ahead: list[int] = []
    prepare, write_back = IOBufferPool.prepare, IOBufferPool.write_back

    def watched_prepare(self: IOBufferPool, update_block: object, reads: list[Read], spare_bytes: int) -> IOBuffer:
        laid.append("ahead" if self.is_prefetching(update_block) else "late")
        return prepare(self, update_block, reads, spare_bytes)  # type: ignore[arg-type]

    def watched_write_back(self: IOBufferPool, *given: Any) -> None:
        ahead.append(len(self._prefetched))
        write_back(self, *given)

    monkeypatch.setattr(IOBufferPool, "prepare", watched_prepare)
    monkeypatch.setattr(IOBufferPool, "write_back", watched_write_back)
    pair.ours.synchronize()
    assert len(laid) > len(pair.model._homes.shards)
    assert len(laid) > IO_BUFFERS
    assert laid == ["late"] + ["ahead"] * (len(laid) - 1)
    # All I/O buffers but that of the block; at the end there is nothing to come.
    assert ahead == [min(IO_BUFFERS - 1, len(laid) - 1 - k) for k in range(len(laid))]
    pair.assert_equal()
    pair.assert_equal_states()


@given(
    limit=st.integers(300_000, 1 << 30), largest=st.integers(1, 1 << 28), count=st.integers(0, 3), rounded=st.booleans()
)
def test_a_block_is_as_large_as_its_buffers_may_be(limit: int, largest: int, count: int, rounded: bool) -> None:
    stored = StoredStates(count=count, rounded=rounded)
    wanted = update_block_bytes_of(largest, stored=stored)
    found = update_block_bytes_of(largest, limit, stored)
    assert stored.buffer_bytes(found) <= limit
    assert found == wanted or stored.buffer_bytes(found + PAGE_BYTES) > limit


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
        (torch.optim.AdamW, {}, 2),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}, 3),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, 3),
        (torch.optim.Adafactor, {}, MOST_STATES),
    ],
)
def test_buffers_have_room_for_the_states_that_a_class_keeps(kind: Any, options: dict[str, Any], expected: int) -> None:
    assert states_kept(kind, [{"lr": 0.1, **options, "params": []}]) == expected
