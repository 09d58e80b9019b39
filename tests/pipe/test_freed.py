"""A finalizer that follows its object alone, whatever a garbage collection takes the object for."""

from __future__ import annotations

import gc
import subprocess
import sys

from pipe.freed import WhenFreed


class Owner:
    """Has a finalizer, and may be a part of a cycle."""

    def __init__(self, called: list[str]) -> None:
        self.freed = WhenFreed(lambda: called.append("freed"))
        self.itself: Owner | None = None


def test_it_is_called_once_with_the_end_of_its_owner() -> None:
    called: list[str] = []
    owner = Owner(called)
    gc.collect()
    assert called == []
    del owner
    assert called == ["freed"]


def test_it_is_called_for_a_cycle_that_is_collected() -> None:
    called: list[str] = []
    owner = Owner(called)
    owner.itself = owner
    del owner
    gc.collect()
    assert called == ["freed"]


def test_it_can_be_called_before_and_is_not_called_again() -> None:
    called: list[str] = []
    owner = Owner(called)
    owner.freed()
    del owner
    assert called == ["freed"]


def test_no_collection_looks_at_it() -> None:
    assert not gc.is_tracked(WhenFreed(lambda: None))


def test_it_is_quiet_when_python_ends() -> None:
    code = "from pipe.freed import WhenFreed; import builtins; builtins.kept = WhenFreed(lambda: print('freed'))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("freed\n", "")
