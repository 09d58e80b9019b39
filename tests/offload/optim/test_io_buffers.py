"""The I/O buffers: what is read ahead is used once, by whom it was read for; nothing is lost when a disk fails."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
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
        self.fails = 0

    def _note(self, what: str) -> None:
        self.events.append(f"{what} {self.name}")
        if self.fails:
            self.fails -= 1
            raise OSError(5, "Input/output error")

    def read_into(self, destination: Tensor, offset: int = 0) -> None:
        self._note("read")
        destination.copy_(self.tensor[offset : offset + destination.numel()])

    def staged(self) -> Tensor:
        return self.tensor

    def part(self, offset: int, nbytes: int) -> Block:
        raise AssertionError("states and gradients are not cut")

    def write(self, source: Tensor, offset: int) -> None:
        self._note("write")
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


@pytest.fixture(params=["threads", "late", "prompt"])
def buffer_pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> IOBufferPool:
    if request.param != "threads":
        monkeypatch.setattr("offload.optim.io_buffers.Threads", Late if request.param == "late" else Prompt)
    return IOBufferPool()


def reads_of(*blocks: Recorded) -> list[Read]:
    return [Read(block.name, block, 0, block.nbytes) for block in blocks]


def test_prefetched_parts_are_not_read_again(buffer_pool: IOBufferPool) -> None:
    events: list[str] = []
    first, second = Recorded("first", [1, 2], events), Recorded("second", [3], events)
    io_buffer = buffer_pool.prepare("a", reads_of(first), 0)
    buffer_pool.prefetch("b", reads_of(second), 0)
    assert io_buffer.part("first").tolist() == [1, 2]
    other = buffer_pool.prepare("b", reads_of(second), 0)
    assert other is not io_buffer
    assert other.part("second").tolist() == [3]
    assert other.bytes_read == 1
    assert events == ["read first", "read second"]


def test_unused_prefetches_are_discarded(buffer_pool: IOBufferPool) -> None:
    events: list[str] = []
    blocks = [Recorded(name, [k], events) for k, name in enumerate(("a", "b", "c"))]
    buffer_pool.prepare("a", reads_of(blocks[0]), 0)
    buffer_pool.prefetch("b", reads_of(blocks[1]), 0)
    io_buffer = buffer_pool.prepare("c", reads_of(blocks[2]), 0)
    assert io_buffer.part("c").tolist() == [2]
    with pytest.raises(KeyError):
        io_buffer.part("b")


def test_discarded_prefetch_never_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    futures: list[Future[Any]] = []

    class Slow(Late):
        def offer(self, work: Callable[[], Any]) -> Future[Any]:
            futures.append(super().offer(work))
            return futures[-1]

    monkeypatch.setattr("offload.optim.io_buffers.Threads", Slow)
    buffer_pool, blocks = IOBufferPool(), [Recorded(name, [k], []) for k, name in enumerate(("a", "b", "c"))]
    buffer_pool.prepare("a", reads_of(blocks[0]), 0)
    buffer_pool.prefetch("b", reads_of(blocks[1]), 0)
    io_buffer = buffer_pool.prepare("c", reads_of(blocks[2]), 0)
    for future in futures:
        if not future.done:
            future.run()  # by a thread that comes late
    assert io_buffer.part("c").tolist() == [2]


def test_a_block_that_is_requested_again_is_read_again(buffer_pool: IOBufferPool) -> None:
    """What lies on the I/O buffer of a block that failed may be half computed."""
    block = Recorded("a", [7], [])
    for _ in range(3):
        io_buffer = buffer_pool.prepare("a", reads_of(block), 0)
        assert io_buffer.part("a").tolist() == [7]
        io_buffer.part("a").fill_(99)


def test_an_error_while_reading_ahead_is_raised_where_it_matters_and_once(buffer_pool: IOBufferPool) -> None:
    good, bad = Recorded("good", [1], []), Recorded("bad", [2], [])
    buffer_pool.prepare("a", reads_of(good), 0)
    bad.fails = 1
    buffer_pool.prefetch("b", reads_of(good, bad), 0)
    with pytest.raises(OSError, match="Input/output error"):
        buffer_pool.prepare("b", reads_of(good, bad), 0)
    assert buffer_pool.prepare("b", reads_of(good, bad), 0).part("bad").tolist() == [2]


def write(buffer_pool: IOBufferPool, moves: list[Write]) -> None:
    """Sends and settles; what has arrived goes out of the list."""

    def arrived(done: Sequence[Write]) -> None:
        moves[:] = [move for move in moves if move not in done]

    buffer_pool.write_back(list(moves), arrived)
    buffer_pool.wait_idle()


def test_a_failed_write_stays_queued_and_a_finished_one_is_released(buffer_pool: IOBufferPool) -> None:
    blocks = [Recorded(name, [0], []) for name in ("a", "b", "c")]
    blocks[1].fails = 1
    memory = torch.tensor([1, 2, 3], dtype=torch.uint8)
    writes: list[Write] = [Write(memory[k : k + 1], block, 0) for k, block in enumerate(blocks)]
    with pytest.raises(OSError, match="Input/output error"):
        write(buffer_pool, writes)
    assert blocks[0].tensor.tolist() == [1]
    assert blocks[1].tensor.tolist() == [0]
    memory.fill_(9)  # the I/O buffer is used again; what has yet to be written has memory of its own
    write(buffer_pool, writes)
    assert writes == []
    assert [block.tensor.tolist() for block in blocks] == [[1], [2], [3]]


def test_no_read_fills_a_tray_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when all I/O buffers are on their way: then the oldest arrives first, and only the oldest."""
    monkeypatch.setattr("offload.optim.io_buffers.Threads", Late)
    buffer_pool, home, rest = IOBufferPool(), Recorded("home", [5], []), Recorded("rest", [0] * 2 * IO_BUFFERS, [])
    arrived: list[int] = []
    for k in range(2 * IO_BUFFERS):
        io_buffer = buffer_pool.prepare(k, reads_of(home), 0)
        assert len(arrived) == max(0, k + 1 - IO_BUFFERS)
        part = io_buffer.part("home")
        part += k
        buffer_pool.write_back([Write(part, rest, k)], lambda _, k=k: arrived.append(k))  # type: ignore[misc]
    buffer_pool.wait_idle()
    assert arrived == [*range(2 * IO_BUFFERS)]
    assert rest.tensor.tolist() == [5 + k for k in range(2 * IO_BUFFERS)]


def test_a_write_that_no_thread_accepted_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Late):
        def offer(self, work: Callable[[], Any]) -> Future[Any]:
            if not next(refusals):
                return super().offer(work)
            raise MemoryError

    refusals = iter([False, False, True, *[False] * 9])
    monkeypatch.setattr("offload.optim.io_buffers.Threads", Refusing)
    buffer_pool, home, rest = IOBufferPool(), Recorded("home", [5, 6], []), Recorded("rest", [0] * 256, [])
    part = buffer_pool.prepare("a", reads_of(home), 0).part("home")
    writes: list[Write] = [Write(part[:1], rest, 0), Write(part[1:], rest, 200)]
    with pytest.raises(MemoryError):
        write(buffer_pool, writes)
    buffer_pool.wait_idle()
    part.fill_(9)  # the I/O buffer is used again
    assert rest.tensor[0] == 5
    assert [move.source.tolist() for move in writes] == [[6]]
    write(buffer_pool, writes)
    assert writes == []
    assert rest.tensor[200] == 6


def test_finished_writes_free_trays_while_others_are_in_flight() -> None:
    buffer_pool = IOBufferPool()
    home, rest = Recorded("home", [5], []), Recorded("rest", [0], [])
    go_on = threading.Event()

    class Held(Recorded):
        def write(self, source: Tensor, offset: int) -> None:
            go_on.wait()
            super().write(source, offset)

    late = Held("late", [0], [])
    buffer_pool.prepare("a", reads_of(home), 0)
    buffer_pool.write_back([Write(torch.tensor([1], dtype=torch.uint8), rest, 0)], lambda done: None)
    buffer_pool.wait_idle()
    buffer_pool.prepare("b", reads_of(home), 0)
    buffer_pool.write_back([Write(torch.tensor([2], dtype=torch.uint8), late, 0)], lambda done: None)
    for k in range(IO_BUFFERS - 1):
        assert buffer_pool.has_idle_buffer()
        buffer_pool.prefetch(k, reads_of(home), 0)
    assert not buffer_pool.has_idle_buffer()
    go_on.set()
    buffer_pool.wait_idle()
    assert buffer_pool.has_idle_buffer()
    assert late.tensor.tolist() == [2]


def test_contiguous_ranges_are_read_in_one_call(buffer_pool: IOBufferPool) -> None:
    events: list[str] = []
    first, second = Recorded("first", [k % 251 for k in range(400)], events), Recorded("second", [7] * 64, events)
    # Padding up to the next multiple of 64 is unused; at 256 bytes of another state are in between.
    places = [(first, 64, 10), (second, 0, 64), (first, 0, 64), (first, 128, 3), (first, 256, 9)]
    io_buffer = buffer_pool.prepare("a", [Read(k, *place) for k, place in enumerate(places)], 0)
    for k, (block, offset, nbytes) in enumerate(places):
        assert io_buffer.part(k).tolist() == block.tensor[offset : offset + nbytes].tolist()
    assert sorted(events) == ["read first", "read first", "read second"]
    assert io_buffer.bytes_read == sum(nbytes for *_, nbytes in places)


def test_ranges_contiguous_in_memory_and_file_are_written_in_one_call(buffer_pool: IOBufferPool) -> None:
    events: list[str] = []
    block = Recorded("block", [0] * 512, events)
    memory = torch.arange(512).remainder(251).to(torch.uint8)
    elsewhere = torch.full((64,), 9, dtype=torch.uint8)
    places = [(128, 64), (192, 20), (0, 3)]  # the third is not next to the others
    writes: list[Write] = [Write(memory[begin : begin + size], block, begin) for begin, size in places]
    writes.append(Write(memory[300:364], block, 256))  # next to the second in the file, and not in memory
    writes.append(Write(elsewhere, block, 320))  # next to the one before in the file, in other memory
    write(buffer_pool, writes)
    assert writes == []
    assert events == ["write block"] * 4
    for begin, size in places:
        assert block.tensor[begin : begin + size].equal(memory[begin : begin + size])
    assert block.tensor[256:320].equal(memory[300:364])
    assert block.tensor[320:384].equal(elsewhere)
    assert block.tensor[384:].sum() == 0


def test_adjacent_memory_of_two_tensors_is_not_one_source(buffer_pool: IOBufferPool) -> None:
    events: list[str] = []
    block, owned = Recorded("block", [0] * 128, events), bytearray([3] * 64 + [4] * 64)
    halves = [torch.frombuffer(owned, dtype=torch.uint8, offset=begin, count=64) for begin in (0, 64)]
    writes: list[Write] = [Write(half, block, begin) for half, begin in zip(halves, (0, 64), strict=True)]
    write(buffer_pool, writes)
    assert bytes(block.tensor.tolist()) == bytes(owned)
    assert len(events) == 2


def test_a_group_that_cannot_be_written_stays_queued_whole(buffer_pool: IOBufferPool) -> None:
    block = Recorded("block", [0] * 128, [])
    block.fails = 1
    memory = torch.ones(128, dtype=torch.uint8)
    writes: list[Write] = [Write(memory[:64], block, 0), Write(memory[64:], block, 64)]
    with pytest.raises(OSError, match="Input/output error"):
        write(buffer_pool, writes)
    assert len(writes) == 2
    write(buffer_pool, writes)
    assert writes == []
    assert block.tensor.tolist() == [1] * 128


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), max_size=5), st.integers(0, 5000))
def test_parts_have_the_order_of_their_bytes_in_the_file_and_do_not_overlap(
    places: list[tuple[int, int]], room: int
) -> None:
    block = Recorded("block", [0] * 18_000, [])
    io_buffer = IOBuffer()
    io_buffer.prepare(
        "update_block", [Read(k, block, *place) for k, place in enumerate(places)], room + PAGE_BYTES, Late(1, "late")
    )
    parts = [io_buffer.part(k) for k in range(len(places))]
    spans = sorted((part.data_ptr(), part.data_ptr() + part.numel()) for part in [*parts, io_buffer.take(room)])
    for (offset, _), part in zip(places, parts, strict=True):
        assert not part.numel() or part.data_ptr() % PAGE_BYTES == offset % PAGE_BYTES
    for (_, end), (begin, _) in itertools.pairwise(spans):
        assert end <= begin


def test_upcoming_blocks_are_prefetched_in_order_into_free_buffers(buffer_pool: IOBufferPool) -> None:
    events: list[str] = []
    blocks = [Recorded(str(k), [k], events) for k in range(IO_BUFFERS + 1)]
    buffer_pool.prepare(0, reads_of(blocks[0]), 0)
    for k in range(1, IO_BUFFERS):
        assert buffer_pool.has_idle_buffer()
        buffer_pool.prefetch(k, reads_of(blocks[k]), 0)
    assert not buffer_pool.has_idle_buffer()
    assert [buffer_pool.is_prefetching(k) for k in range(IO_BUFFERS + 1)] == [False, *(IO_BUFFERS - 1) * [True], False]
    for k in range(1, IO_BUFFERS):
        assert buffer_pool.prepare(k, reads_of(blocks[k]), 0).part(str(k)).tolist() == [k]
        assert buffer_pool.has_idle_buffer()
    assert sorted(events) == [f"read {k}" for k in range(IO_BUFFERS)]


def test_no_tray_is_lost_when_reading_or_writing_fails(buffer_pool: IOBufferPool) -> None:
    good, bad = Recorded("good", [1], []), Recorded("bad", [2], [])
    for k in range(2 * IO_BUFFERS):
        bad.fails = 1
        buffer_pool.prefetch(k, reads_of(bad), 0)
        with pytest.raises(OSError, match="Input/output error"):
            buffer_pool.prepare(k, reads_of(bad), 0)
        io_buffer = buffer_pool.prepare(k, reads_of(good), 0)
        bad.fails = 1
        buffer_pool.write_back([Write(io_buffer.part("good"), bad, 0)], lambda done: None)
        with pytest.raises(OSError, match="Input/output error"):
            buffer_pool.wait_idle()
    for k in range(IO_BUFFERS):
        assert buffer_pool.has_idle_buffer()
        buffer_pool.prefetch(k, reads_of(good), 0)


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
