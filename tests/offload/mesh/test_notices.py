"""Notices of three ranks in one process, over a store in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from offload.mesh import notices
from offload.mesh.notices import Notices

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(notices, "GRACE_SECONDS", 0.5)


@pytest.fixture
def three() -> Iterator[list[Notices]]:
    store = HashStore()
    made = [Notices(rank, store) for rank in range(3)]
    yield made
    for each in made:
        each._answers.stop.set()
        each._answers.thread.join()


def cause(of: Notices) -> str:
    with pytest.raises(RuntimeError, match="gathering failed") as raised:
        of.fail("gathering", range(3), OSError("connection closed"))
    assert "This rank saw: OSError: connection closed" in str(raised.value)
    return str(raised.value)


def ends(of: Notices) -> None:
    of._answers.stop.set()
    of._answers.thread.join()


def test_rank_whose_collective_failed_is_not_told_to_have_raised(three: list[Notices]) -> None:
    ends(three[1])
    cause(three[0])
    three[0].raised(RuntimeError("gathering failed"), "in a forward")
    assert three[2].told(range(3)) == ""


def test_store_that_is_gone_is_told(three: list[Notices]) -> None:
    class Gone:
        def __getattr__(self, name: str) -> object:
            raise ConnectionError("broken pipe")

    three[0]._store = Gone()
    assert "the store of the process group does not answer" in cause(three[0])


def test_rank_answers_no_longer_when_its_process_group_is_destroyed() -> None:
    is_open = True
    made = Notices(0, HashStore(), lambda: is_open)
    assert made._answers.thread.is_alive()
    is_open = False
    made._answers.thread.join(timeout=10)
    assert not made._answers.thread.is_alive()


@pytest.mark.parametrize("dead", [False, True])
def test_exception_that_ends_a_process_is_told_unless_another_rank_is_the_cause(
    three: list[Notices], dead: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(sys, "last_value", KeyError("rows"), raising=False)
    if dead:
        ends(three[1])
    three[0].doing("in or after a forward")
    three[0].at_exit()
    told = three[2].told(range(3))
    if dead:
        assert told == ""
        assert "rank 0 ends, since no answer from rank 1 within 0.5 s" in capsys.readouterr().err
    else:
        assert told == "rank 0 raised KeyError: 'rows' (in or after a forward, and its process ended)"
