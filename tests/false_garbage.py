"""What a garbage collection may take for garbage although a graph is in use; see :mod:`pipe.freed`.

The race itself depends on when two threads run. So this counts as the collection does, in the case that is worst for
it: all objects with which autograd functions remember their forwards have lost the reference that their output has.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.autograd.function import FunctionCtx

__all__ = ["contexts", "false_garbage", "harmed"]


def contexts() -> list[Any]:
    """The ``ctx`` objects of all graphs."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, FunctionCtx)]


def _reached(begin: Iterable[Any], within: Mapping[int, Any]) -> dict[int, Any]:
    """By identity: the objects ``begin``, and those ``within`` that they lead to."""
    left = list(begin)
    reached = {id(each): each for each in left}
    while left:
        for held in gc.get_referents(left.pop()):
            if id(held) in within and id(held) not in reached:
                reached[id(held)] = held
                left.append(held)
    return reached


def false_garbage(lost: Sequence[Any]) -> list[Any]:
    """``lost``, and what only they hold."""
    # Without what is frozen, of which collections know nothing.
    reached = _reached(lost, {id(each): each for each in gc.get_objects()})
    count = dict.fromkeys(reached, 0)
    for key in reached:
        for held in gc.get_referents(reached[key]):
            if id(held) in count:
                count[id(held)] += 1
    for each in lost:
        count[id(each)] = sys.maxsize
    # Two more are that of the dict and that of the call.
    elsewhere = [key for key in reached if sys.getrefcount(reached[key]) - 2 > count[key]]
    in_use = _reached((reached[key] for key in elsewhere), reached)
    return [each for key, each in reached.items() if key not in in_use]


def harmed(garbage: Sequence[Any]) -> list[str]:
    """What of it a collection would change before it finds that it is no garbage."""
    found = []
    for each in garbage:
        if isinstance(each, weakref.ref):
            found.append(f"a weak reference to {each()!r:.80} is cleared")
        elif weakref.getweakrefcount(each):
            found.append(f"weak references to {each!r:.80} are cleared")
        if hasattr(type(each), "__del__"):
            found.append(f"__del__ of {each!r:.80} is called")
    return found
