"""What follows the life of its object alone, whatever a garbage collection takes the object for."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

from pipe.freed import Life, Living, WhenFreed
from tests.programs import run_program


class Owner:
    """Has a life, and may be a part of a cycle."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.itself: Owner | None = None


def ends(make: Callable[[], Owner]) -> None:
    """Frees owners by their last reference, and by a collection."""
    owner = make()
    gc.collect()
    del owner
    owner = make()
    owner.itself = owner
    del owner
    gc.collect()


def test_a_function_is_called_once_at_the_end_of_each_owner_or_before() -> None:
    called: list[str] = []
    ends(lambda: Owner(WhenFreed(lambda: called.append("freed"))))
    assert called == ["freed", "freed"]
    life = WhenFreed(lambda: called.append("before"))
    gc.collect()
    assert called == ["freed", "freed"]
    life()
    del life
    assert called == ["freed", "freed", "before"]


def test_an_interrupt_while_an_owner_is_freed_leaves_no_value() -> None:
    living: Living[str] = Living()
    owner = Owner(Life())
    living.add(owner.life, "value")
    lines: list[int] = []
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: lines.append(frame.f_lineno))
    try:
        del owner  # runs no Python code, in which an interrupt could be raised
    finally:
        sys.settrace(before)
    assert not lines
    assert [*living] == []


def test_no_collection_looks_at_a_life() -> None:
    assert not gc.is_tracked(Life())
    assert not gc.is_tracked(WhenFreed(lambda: None))


def test_a_function_is_called_quietly_when_python_ends() -> None:
    code = "from pipe.freed import WhenFreed; import builtins; builtins.kept = WhenFreed(lambda: print('freed'))"
    assert run_program(code) == (0, "freed\n", "")


INTERRUPTED = """
import signal, threading
from pipe.freed import WhenFreed

signal.signal(signal.SIGINT, signal.default_int_handler)  # one in the background may ignore interrupts

def interrupted():
    raise KeyboardInterrupt

try:
    freed = WhenFreed(interrupted)
    del freed
    threading.Event().wait(30)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    """Python drops what a finalizer raises."""
    assert run_program(INTERRUPTED) == (0, "interrupted\n", "")
