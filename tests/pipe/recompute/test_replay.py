"""A replay repeats the random numbers and settings of one forward, and costs the user no draw."""

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipe.recompute.replay import Layers, Replay
from pipe.recompute.thread_state import shared_generators

CPU = torch.device("cpu")
DRAWS = {
    "cpu": lambda: torch.rand(3).tolist(),
    "python": lambda: random.random(),
    "numpy": lambda: np.random.randn(1).tolist(),  # keeps another number for the next draw
}


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=6), st.lists(st.sampled_from(sorted(DRAWS)), max_size=3))
def test_draws_repeat_inside_and_continue_outside(inside: Any, between: Any) -> None:
    replay = Replay.capture([CPU])
    first = [DRAWS[name]() for name in inside]
    replay.record_changes()
    assert set(replay.drawn) == set(inside)
    for name in between:
        DRAWS[name]()
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    for _ in range(2):
        with replay.again():
            assert [DRAWS[name]() for name in inside] == first
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert str(np.random.get_state()) == states[2]


@pytest.mark.parametrize("draws", [True, False])
def test_only_a_replay_that_rewinds_a_shared_generator_makes_others_wait(draws: Any) -> None:
    replay = Replay.capture([CPU])
    if draws:
        torch.rand(1)
    replay.record_changes()
    free = []

    def try_to_enter() -> None:
        free.append(shared_generators.acquire(blocking=False))
        if free[-1]:
            shared_generators.release()

    with replay.again():
        thread = threading.Thread(target=try_to_enter)
        thread.start()
        thread.join()
    assert free == [not draws]


def test_a_cast_under_no_grad_is_not_left_for_a_forward_that_needs_its_gradient() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            Layers().run(lambda x: x @ weight, torch.ones(2, 2))
        assert torch.is_autocast_cache_enabled()
        assert (torch.ones(2, 2) @ weight).requires_grad


def test_another_generator_of_numpy_is_rewound() -> None:
    old = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        replay = Replay.capture([])
        first = np.random.rand(), np.random.randn()
        assert replay.record_changes().drawn == ("numpy",)
        with replay.again():
            assert (np.random.rand(), np.random.randn()) == first
    finally:
        np.random.set_bit_generator(old)  # type: ignore[attr-defined]
