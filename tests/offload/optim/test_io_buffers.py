"""The desk: what is read ahead is used once, by whom it was read for; nothing is lost when a disk fails."""

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

import offload.optim.disk_update
from offload.optim.io_buffers import TRAYS, Desk, Tray
from offload.optim.io_requests import Copy, Read, Write
from offload.storage import Block
from offload.storage.buffer import PAGE_BYTES
from offload.storage.io_thread_pool import Crew, Job
from offload.storage.io_threads import Future
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

    def write(self, source: Tensor, offset: int) -> None:
        self._note("write")
        self.tensor[offset : offset + source.numel()] = source


class Late(Crew):
    """Whose threads never begin, so that a job is done by whoever waits for it and by nobody else."""

    def give(self, work: Callable[[], None]) -> Job:
        return Job([work], None)


class Prompt(Crew):
    """Whose threads are done with a job as soon as they have it."""

    def give(self, work: Callable[[], None]) -> Job:
        future = Future(work)
        future.run()
        return Job([], future)


@pytest.fixture(params=["threads", "late", "prompt"])
def desk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Desk:
    if request.param != "threads":
        monkeypatch.setattr("offload.optim.io_buffers.Crew", Late if request.param == "late" else Prompt)
    return Desk()


def reads_of(*blocks: Recorded) -> list[Read]:
    return [Read(block.name, block, 0, block.nbytes) for block in blocks]


def test_what_is_read_ahead_is_not_read_again(desk: Desk) -> None:
    events: list[str] = []
    first, second = Recorded("first", [1, 2], events), Recorded("second", [3], events)
    tray = desk.lay("a", reads_of(first), 0)
    desk.look_ahead("b", reads_of(second), 0)
    assert tray.part("first").tolist() == [1, 2]
    other = desk.lay("b", reads_of(second), 0)
    assert other is not tray
    assert other.part("second").tolist() == [3]
    assert other.bytes_read == 1
    assert events == ["read first", "read second"]


def test_what_was_read_ahead_for_nobody_is_thrown_away(desk: Desk) -> None:
    events: list[str] = []
    blocks = [Recorded(name, [k], events) for k, name in enumerate(("a", "b", "c"))]
    desk.lay("a", reads_of(blocks[0]), 0)
    desk.look_ahead("b", reads_of(blocks[1]), 0)
    tray = desk.lay("c", reads_of(blocks[2]), 0)
    assert tray.part("c").tolist() == [2]
    with pytest.raises(KeyError):
        tray.part("b")


def test_what_was_read_ahead_for_nobody_does_not_arrive_later(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[list[Callable[[], None]]] = []

    class Slow(Late):
        def give(self, work: Callable[[], None]) -> Job:
            given_up.append([work])
            return Job(given_up[-1], None)

    monkeypatch.setattr("offload.optim.io_buffers.Crew", Slow)
    desk, blocks = Desk(), [Recorded(name, [k], []) for k, name in enumerate(("a", "b", "c"))]
    desk.lay("a", reads_of(blocks[0]), 0)
    desk.look_ahead("b", reads_of(blocks[1]), 0)
    tray = desk.lay("c", reads_of(blocks[2]), 0)
    for todo in given_up:
        for work in todo:  # a thread that takes what nobody has taken back
            work()
    assert tray.part("c").tolist() == [2]


def test_a_bite_that_is_laid_again_is_read_again(desk: Desk) -> None:
    """What lies on the tray of a bite that failed may be half computed."""
    block = Recorded("a", [7], [])
    for _ in range(3):
        tray = desk.lay("a", reads_of(block), 0)
        assert tray.part("a").tolist() == [7]
        tray.part("a").fill_(99)


def test_an_error_while_reading_ahead_is_raised_where_it_matters_and_once(desk: Desk) -> None:
    good, bad = Recorded("good", [1], []), Recorded("bad", [2], [])
    desk.lay("a", reads_of(good), 0)
    bad.fails = 1
    desk.look_ahead("b", reads_of(good, bad), 0)
    with pytest.raises(OSError, match="Input/output error"):
        desk.lay("b", reads_of(good, bad), 0)
    assert desk.lay("b", reads_of(good, bad), 0).part("bad").tolist() == [2]


def write(desk: Desk, moves: list[Write | Copy]) -> None:
    """Sends and settles; what has arrived goes out of the list."""

    def arrived(done: Sequence[Write | Copy]) -> None:
        moves[:] = [move for move in moves if move not in done]

    desk.send(list(moves), arrived)
    desk.settle()


def test_a_write_that_fails_stays_and_what_is_written_goes(desk: Desk) -> None:
    blocks = [Recorded(name, [0], []) for name in ("a", "b", "c")]
    blocks[1].fails = 1
    memory = torch.tensor([1, 2, 3], dtype=torch.uint8)
    writes: list[Write | Copy] = [Write(memory[k : k + 1], block, 0) for k, block in enumerate(blocks)]
    with pytest.raises(OSError, match="Input/output error"):
        write(desk, writes)
    assert blocks[0].tensor.tolist() == [1]
    assert blocks[1].tensor.tolist() == [0]
    memory.fill_(9)  # the tray is used again; what has yet to be written has memory of its own
    write(desk, writes)
    assert writes == []
    assert [block.tensor.tolist() for block in blocks] == [[1], [2], [3]]


def test_while_a_tray_is_being_written_nobody_reads_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when all trays are on their way: then the oldest arrives first, and only the oldest."""
    monkeypatch.setattr("offload.optim.io_buffers.Crew", Late)
    desk, home, rest = Desk(), Recorded("home", [5], []), Recorded("rest", [0] * 2 * TRAYS, [])
    arrived: list[int] = []
    for k in range(2 * TRAYS):
        tray = desk.lay(k, reads_of(home), 0)
        assert len(arrived) == max(0, k + 1 - TRAYS)
        part = tray.part("home")
        part += k
        desk.send([Write(part, rest, k)], lambda _, k=k: arrived.append(k))  # type: ignore[misc]
    desk.settle()
    assert arrived == [*range(2 * TRAYS)]
    assert rest.tensor.tolist() == [5 + k for k in range(2 * TRAYS)]


def test_what_no_thread_could_be_given_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Late):
        def give(self, work: Callable[[], None]) -> Job:
            if not next(refusals):
                return super().give(work)
            raise MemoryError

    refusals = iter([False, False, True, *[False] * 9])
    monkeypatch.setattr("offload.optim.io_buffers.Crew", Refusing)
    desk, home, rest = Desk(), Recorded("home", [5, 6], []), Recorded("rest", [0] * 256, [])
    part = desk.lay("a", reads_of(home), 0).part("home")
    writes: list[Write | Copy] = [Write(part[:1], rest, 0), Write(part[1:], rest, 200)]
    with pytest.raises(MemoryError):
        write(desk, writes)
    desk.settle()
    part.fill_(9)  # the tray is used again
    assert rest.tensor[0] == 5
    assert [move.source.tolist() for move in writes] == [[6]]
    write(desk, writes)
    assert writes == []
    assert rest.tensor[200] == 6


def test_what_has_arrived_makes_room_while_others_are_on_their_way() -> None:
    desk = Desk()
    home, rest = Recorded("home", [5], []), Recorded("rest", [0], [])
    go_on = threading.Event()

    class Held(Recorded):
        def write(self, source: Tensor, offset: int) -> None:
            go_on.wait()
            super().write(source, offset)

    late = Held("late", [0], [])
    desk.lay("a", reads_of(home), 0)
    desk.send([Write(torch.tensor([1], dtype=torch.uint8), rest, 0)], lambda done: None)
    desk.settle()
    desk.lay("b", reads_of(home), 0)
    desk.send([Write(torch.tensor([2], dtype=torch.uint8), late, 0)], lambda done: None)
    for k in range(TRAYS - 1):
        assert desk.make_room()
        desk.look_ahead(k, reads_of(home), 0)
    assert not desk.make_room()
    go_on.set()
    desk.settle()
    assert desk.make_room()
    assert late.tensor.tolist() == [2]


def test_what_lies_side_by_side_is_read_in_one_call(desk: Desk) -> None:
    events: list[str] = []
    first, second = Recorded("first", [k % 251 for k in range(400)], events), Recorded("second", [7] * 64, events)
    # Padding up to the next multiple of 64 belongs to nobody; at 256 somebody else's bytes are in between.
    places = [(first, 64, 10), (second, 0, 64), (first, 0, 64), (first, 128, 3), (first, 256, 9)]
    tray = desk.lay("a", [Read(k, *place) for k, place in enumerate(places)], 0)
    for k, (block, offset, nbytes) in enumerate(places):
        assert tray.part(k).tolist() == block.tensor[offset : offset + nbytes].tolist()
    assert sorted(events) == ["read first", "read first", "read second"]
    assert tray.bytes_read == sum(nbytes for *_, nbytes in places)


def test_what_lies_side_by_side_in_memory_and_in_the_file_is_written_in_one_call(desk: Desk) -> None:
    events: list[str] = []
    block = Recorded("block", [0] * 512, events)
    memory = torch.arange(512).remainder(251).to(torch.uint8)
    elsewhere = torch.full((64,), 9, dtype=torch.uint8)
    rest = torch.zeros(3, dtype=torch.uint8)
    places = [(128, 64), (192, 20), (0, 3)]  # the third is not next to the others
    writes: list[Write | Copy] = [Write(memory[begin : begin + size], block, begin) for begin, size in places]
    writes.append(Write(memory[300:364], block, 256))  # next to the second in the file, and not in memory
    writes.append(Write(elsewhere, block, 320))  # next to the one before in the file, in other memory
    writes.append(Copy(elsewhere[:3], rest))
    write(desk, writes)
    assert writes == []
    assert events == ["write block"] * 4
    for begin, size in places:
        assert block.tensor[begin : begin + size].equal(memory[begin : begin + size])
    assert block.tensor[256:320].equal(memory[300:364])
    assert block.tensor[320:384].equal(elsewhere)
    assert block.tensor[384:].sum() == 0
    assert rest.tolist() == [9, 9, 9]


def test_memory_that_two_tensors_own_side_by_side_is_not_one_source(desk: Desk) -> None:
    events: list[str] = []
    block, owned = Recorded("block", [0] * 128, events), bytearray([3] * 64 + [4] * 64)
    halves = [torch.frombuffer(owned, dtype=torch.uint8, offset=begin, count=64) for begin in (0, 64)]
    writes: list[Write | Copy] = [Write(half, block, begin) for half, begin in zip(halves, (0, 64), strict=True)]
    write(desk, writes)
    assert bytes(block.tensor.tolist()) == bytes(owned)
    assert len(events) == 2


def test_of_a_group_that_cannot_be_written_all_stays(desk: Desk) -> None:
    block = Recorded("block", [0] * 128, [])
    block.fails = 1
    memory = torch.ones(128, dtype=torch.uint8)
    writes: list[Write | Copy] = [Write(memory[:64], block, 0), Write(memory[64:], block, 64)]
    with pytest.raises(OSError, match="Input/output error"):
        write(desk, writes)
    assert len(writes) == 2
    write(desk, writes)
    assert writes == []
    assert block.tensor.tolist() == [1] * 128


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), max_size=5), st.integers(0, 5000))
def test_parts_lie_as_their_bytes_do_in_the_file_and_do_not_overlap(places: list[tuple[int, int]], room: int) -> None:
    block = Recorded("block", [0] * 18_000, [])
    tray = Tray()
    tray.lay("bite", [Read(k, block, *place) for k, place in enumerate(places)], room + PAGE_BYTES, Late(1))
    parts = [tray.part(k) for k in range(len(places))]
    spans = sorted((part.data_ptr(), part.data_ptr() + part.numel()) for part in [*parts, tray.take(room)])
    for (offset, _), part in zip(places, parts, strict=True):
        assert not part.numel() or part.data_ptr() % PAGE_BYTES == offset % PAGE_BYTES
    for (_, end), (begin, _) in itertools.pairwise(spans):
        assert end <= begin


def test_bites_to_come_are_read_as_far_as_there_are_trays_and_laid_in_their_order(desk: Desk) -> None:
    events: list[str] = []
    blocks = [Recorded(str(k), [k], events) for k in range(TRAYS + 1)]
    desk.lay(0, reads_of(blocks[0]), 0)
    for k in range(1, TRAYS):
        assert desk.make_room()
        desk.look_ahead(k, reads_of(blocks[k]), 0)
    assert not desk.make_room()
    assert [desk.expects(k) for k in range(TRAYS + 1)] == [False, *(TRAYS - 1) * [True], False]
    for k in range(1, TRAYS):
        assert desk.lay(k, reads_of(blocks[k]), 0).part(str(k)).tolist() == [k]
        assert desk.make_room()
    assert sorted(events) == [f"read {k}" for k in range(TRAYS)]


def test_no_tray_is_lost_when_reading_or_writing_fails(desk: Desk) -> None:
    good, bad = Recorded("good", [1], []), Recorded("bad", [2], [])
    for k in range(2 * TRAYS):
        bad.fails = 1
        desk.look_ahead(k, reads_of(bad), 0)
        with pytest.raises(OSError, match="Input/output error"):
            desk.lay(k, reads_of(bad), 0)
        tray = desk.lay(k, reads_of(good), 0)
        bad.fails = 1
        desk.send([Write(tray.part("good"), bad, 0)], lambda done: None)
        with pytest.raises(OSError, match="Input/output error"):
            desk.settle()
    for k in range(TRAYS):
        assert desk.make_room()
        desk.look_ahead(k, reads_of(good), 0)


@pytest.mark.parametrize(
    ("largest", "expected"), [(0, 1 << 20), (13 << 20, 2 << 20), (50 << 20, 8 << 20), (4 << 30, 8 << 20)]
)
def test_a_bite_is_a_part_of_the_largest_shard(largest: int, expected: int) -> None:
    class Sized:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

    class Shards:
        own = (Sized(largest - largest // 3), Sized(largest // 3))

    shards: Any = [Shards(), Shards()]
    assert offload.optim.disk_update.bite_bytes(shards) == expected
    assert expected % PAGE_BYTES == 0  # else no bite could be read directly


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_while_one_bite_is_computed_the_next_ones_are_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_norm: float | None
) -> None:
    """Also across pieces and shards: only the first bite of a step is read with nothing else to do."""
    monkeypatch.setattr(offload.optim.disk_update, "BITE_BYTES", 128)
    monkeypatch.setattr("offload.optim.io_buffers.Crew", Prompt)
    pair = Pair("adamw", f"{tmp_path}/", max_norm=max_norm)
    for action in ("backward", "step", "zero", "eval", "backward", "step"):
        pair.do(action)
    laid: list[str] = []
    ahead: list[int] = []
    lay, send = Desk.lay, Desk.send

    def watched_lay(self: Desk, bite: object, reads: list[Read], room_bytes: int) -> Tray:
        laid.append("ahead" if self.expects(bite) else "late")
        return lay(self, bite, reads, room_bytes)  # type: ignore[arg-type]

    def watched_send(self: Desk, *given: Any) -> None:
        ahead.append(len(self._ahead))
        send(self, *given)

    monkeypatch.setattr(Desk, "lay", watched_lay)
    monkeypatch.setattr(Desk, "send", watched_send)
    pair.ours.synchronize()
    assert len(laid) > len(pair.model._walk.shards)
    assert len(laid) > TRAYS
    assert laid == ["late"] + ["ahead"] * (len(laid) - 1)
    # All trays but that of the bite; at the end there is nothing to come.
    assert ahead == [min(TRAYS - 1, len(laid) - 1 - k) for k in range(len(laid))]
    pair.compare()
    pair.compare_states()
