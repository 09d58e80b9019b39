"""The least bytes of a step: what the best choice of bytes to keep would move, found by trying every choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from offload.planning.least_bytes import StoredBytes

#: Kind -> what one unit saves if it is in memory at the end of forward, of backward, at both.
SAVES = {"weights": (1, 1, 3), "gradients": (0, 2, 2), "states": (0, 0, 2), "frozen": (1, 1, 2)}


def choices(units: int) -> Iterator[tuple[int, int, int]]:
    """How many units are kept at the end of forward only, of backward only, at both."""
    return (c for c in itertools.product(range(units + 1), repeat=3) if sum(c) <= units)


def tried(stored: StoredBytes, memory: int, *, clips: bool) -> float:
    """What the best of all choices moves, in units of one."""
    best = {(0, 0): 0}
    for kind, saves in SAVES.items():
        if kind == "gradients" and not clips:
            continue
        found: dict[tuple[int, int], int] = {}
        for (forward, backward), saved in best.items():
            for first, last, both in choices(int(getattr(stored, kind))):
                there = forward + first + both, backward + last + both
                if max(there) <= memory:
                    value = saved + sum(n * each for n, each in zip((first, last, both), saves, strict=True))
                    found[there] = max(found.get(there, 0), value)
        best = found
    return stored.moved(clips=clips) - max(best.values())


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("frozen", [0, 3])
def test_no_choice_moves_less_and_one_moves_as_much(clips: bool, frozen: int) -> None:
    for weights, gradients, states in itertools.product((0, 2), (0, 1, 2), (0, 1, 4)):
        stored = StoredBytes(weights, gradients, states, frozen)
        for memory in range(0, 11, 2):
            assert stored.least(memory, clips=clips) == tried(stored, memory, clips=clips), (stored, memory)


def test_a_step_of_adam_moves_36_bytes_a_parameter_less_3_for_each_byte_of_memory() -> None:
    stored = StoredBytes(weights=4, gradients=4, states=8)
    assert stored.moved(clips=True) == 36
    assert stored.moved(clips=False) == 28
    assert [stored.least(memory, clips=True) for memory in (0, 1, 4, 5, 16)] == [36, 33, 24, 22, 0]
    assert [stored.least(memory, clips=False) for memory in (0, 4, 12)] == [28, 16, 0]
