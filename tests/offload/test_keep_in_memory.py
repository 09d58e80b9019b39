"""Shards move between files and memory: all that were asked for or none, and nothing that other code views."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.storage.disk import DiskBlock, DiskTier
from offload.streaming.moves import HomeInUseError
from tests.offload.interrupts import first_lines, interrupted
from tests.offload.open_files import open_files
from tests.offload.pair import Pair
from tests.offload.test_faults import Faults


def in_memory(pair: Pair) -> list[bool]:
    return [not shard.blocking_io for shard in pair.model._homes.shards]


def trained(folder: Path, name: str = "momentum") -> Pair:
    """After a step, with gradients, and the first two of four shards in memory."""
    pair = Pair(name, f"{folder}/")
    pair.model._homes.keep_in_memory([0, 1])
    pair.do("backward", "step", "zero", "backward")
    pair.ours.synchronize()
    return pair


def step(pair: Pair) -> None:
    pair.do("zero", "backward", "step")
    pair.assert_equal()


@pytest.mark.parametrize(
    ("owner", "method"), [(DiskTier, "allocate"), (DiskBlock, "write"), (DiskBlock, "read_into")], ids=str
)
def test_a_disk_that_fails_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    pair = trained(tmp_path, "adamw")
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    faults = Faults(monkeypatch, owner, method, error)
    failed = 0
    for fatal in range(1, 100):
        files = len(open_files(tmp_path))
        faults.calls, faults.fatal = 0, fatal
        try:
            pair.model._homes.keep_in_memory([1, 2, 3])
        except OSError as raised:
            if raised.strerror != "moving shards between file and memory: No space left on device":
                raise
        else:
            break
        failed += 1
        error.with_traceback(None)  # its frames hold files that are about to be removed
        assert in_memory(pair) == [True, True, False, False]
        assert len(open_files(tmp_path)) == files
        pair.assert_equal()
    assert failed
    assert in_memory(pair) == [False, True, True, True]
    faults.fatal = -1
    step(pair)
    pair.assert_equal_states()


def test_an_interrupt_at_any_line_moves_all_or_nothing(tmp_path: Path) -> None:
    pair, there = trained(tmp_path), ([0, 1], [1, 2])
    keep = pair.model._homes.keep_in_memory
    some = first_lines(lambda: keep(there[1]))
    keep(there[0])
    raised = 0
    for line in some:
        before = in_memory(pair)
        wanted = there[before == [j in there[0] for j in range(4)]]
        raised += interrupted(lambda wanted=wanted: keep(wanted), line) == "raised"  # type: ignore[misc]
        assert in_memory(pair) in (before, [j in wanted for j in range(4)]), line
        step(pair)
    assert raised > 0.6 * len(some)
    pair.assert_equal_states()


HOLDERS: dict[str, Callable[[Pair], object]] = {
    "a state_dict": lambda pair: pair.model.state_dict(),
    "an array": lambda pair: next(pair.model[1].parameters()).detach().numpy(),
    "a view of a state": lambda pair: pair.ours.state[next(pair.model[1].parameters())]["exp_avg"][0],
}


@pytest.mark.parametrize("into_memory", [True, False])
@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_other_code_views_does_not_move(tmp_path: Path, holder: str, into_memory: bool) -> None:
    pair = Pair("adamw", f"{tmp_path}/", kinds=("linear", "linear"))
    keep = pair.model._homes.keep_in_memory
    keep([] if into_memory else [1])
    step(pair)
    pair.zero()
    held = HOLDERS[holder](pair)
    with pytest.raises(HomeInUseError, match="other code holds views of their weights or optimizer states") as raised:
        keep([1, 2] if into_memory else [])
    assert 1 in raised.value.shards
    assert in_memory(pair) == [False, not into_memory, False, False]
    del held
    keep([1, 2] if into_memory else [])
