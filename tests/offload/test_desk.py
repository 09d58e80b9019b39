"""The desk: what is read ahead is used once, by whom it was read for; nothing is lost when a disk fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import offload.optim.staged
from offload.optim.desk import Desk, Read, Tray, Write
from offload.tier import Block
from offload.tier.buffer import PAGE_BYTES
from offload.tier.crew import Crew, Job
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


@pytest.fixture(params=["threads", "late"])
def desk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Desk:
    if request.param == "late":
        monkeypatch.setattr("offload.optim.desk.Crew", Late)
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

    monkeypatch.setattr("offload.optim.desk.Crew", Slow)
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


def test_a_write_that_fails_stays_and_what_is_written_goes(desk: Desk) -> None:
    blocks = [Recorded(name, [0], []) for name in ("a", "b", "c")]
    blocks[1].fails = 1
    writes = [
        Write(torch.tensor([k + 1], dtype=torch.uint8), lambda source, block=block: block.write(source, 0))  # type: ignore[misc]
        for k, block in enumerate(blocks)
    ]
    with pytest.raises(OSError, match="Input/output error"):
        desk.write(writes)
    assert blocks[0].tensor.tolist() == [1]
    assert any(block.tensor.tolist() == [0] for block in blocks)
    desk.write(writes)
    assert writes == []
    assert [block.tensor.tolist() for block in blocks] == [[1], [2], [3]]


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


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_while_one_bite_is_computed_the_next_is_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_norm: float | None
) -> None:
    """Also across pieces and shards: only the first bite of a step is read with nothing else to do."""
    monkeypatch.setattr(offload.optim.staged, "BITE_BYTES", 128)
    monkeypatch.setattr("offload.optim.desk.Crew", Late)
    pair = Pair("adamw", f"{tmp_path}/", max_norm=max_norm)
    for action in ("backward", "step", "zero", "eval", "backward", "step"):
        pair.do(action)
    events: list[str] = []
    lay, look_ahead = Desk.lay, Desk.look_ahead

    def laid(self: Desk, bite: object, reads: list[Read], room_bytes: int) -> Tray:
        events.append("ahead" if self._next.bite == bite else "late")
        return lay(self, bite, reads, room_bytes)  # type: ignore[arg-type]

    def looked(self: Desk, bite: object, reads: list[Read], room_bytes: int) -> None:
        look_ahead(self, bite, reads, room_bytes)  # type: ignore[arg-type]
        assert self._next.bite == bite

    monkeypatch.setattr(Desk, "lay", laid)
    monkeypatch.setattr(Desk, "look_ahead", looked)
    pair.ours.synchronize()
    assert len(events) > len(pair.model._walk.shards)
    assert events == ["late"] + ["ahead"] * (len(events) - 1)
    pair.compare()
    pair.compare_states()
