"""A replay repeats the random numbers and settings of one forward, and costs the user no draw."""

import contextlib
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipe.recompute.replay import Layers, Replay, devices_of
from pipe.recompute.thread_state import shared_generators

CPU = torch.device("cpu")
DRAWS = {
    "cpu": lambda: torch.rand(3).tolist(),
    "python": lambda: random.random(),
    "numpy": lambda: np.random.rand(2).tolist(),
}


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=6), st.lists(st.sampled_from(sorted(DRAWS)), max_size=3))
def test_draws_repeat_inside_and_continue_outside(inside: Any, between: Any) -> None:
    replay = Replay.capture([CPU])
    first = [DRAWS[name]() for name in inside]
    replay.record_changes()
    assert set(replay.drawn) == set(inside)
    for name in between:
        DRAWS[name]()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for _ in range(2):
        with replay.again():
            assert [DRAWS[name]() for name in inside] == first
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert np.random.get_state()[1].tolist() == states[2]


NORMAL = {"uniform": np.random.rand, "normal": np.random.normal, "seed": lambda: np.random.seed(3)}


@given(
    st.lists(st.sampled_from(sorted(NORMAL)), max_size=4),
    st.lists(st.sampled_from(["uniform", "normal"]), max_size=3),
)
def test_a_kept_normal_number_of_numpy_is_part_of_its_state(before: Any, inside: Any) -> None:
    # The second normal number of a pair comes without moving the words of the generator.
    for name in before:
        NORMAL[name]()
    replay = Replay.capture([CPU])
    first = [NORMAL[name]() for name in inside]
    replay.record_changes()
    following = np.random.normal()
    with replay.again():
        assert [NORMAL[name]() for name in inside] == first
    again = Replay.capture([CPU])
    with again.again():
        pass
    assert np.random.normal() != following


def test_a_replay_inside_a_rewound_generator_notes_the_kept_normal_number() -> None:
    # The same words, with and without a kept number: rewinding brings the former back.
    np.random.seed(3)
    np.random.normal()
    outer = Replay.capture([CPU])
    kept = np.random.normal()
    Replay.capture([CPU])
    outer.record_changes()
    with outer.again():
        inner = Replay.capture([CPU])
        assert np.random.normal() == kept
        inner.record_changes()
        with inner.again():
            assert np.random.normal() == kept


def test_another_bit_generator_of_numpy_is_replayed() -> None:
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.Philox(3))  # type: ignore[attr-defined]
    try:
        replay = Replay.capture([CPU])
        first = np.random.rand(3).tolist()
        assert replay.record_changes().drawn == ("numpy",)
        with replay.again():
            assert np.random.rand(3).tolist() == first
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]


def test_a_forward_that_draws_nothing_touches_no_generator() -> None:
    replay = Replay.capture([CPU]).record_changes()
    with replay.again():
        a = torch.rand(1)
    assert not torch.equal(a, torch.rand(1))


def test_generators_are_restored_after_an_exception() -> None:
    replay = Replay.capture([CPU])
    torch.rand(1), random.random()
    replay.record_changes()
    before = torch.get_rng_state(), random.getstate()
    with contextlib.suppress(ValueError), replay.again():
        torch.rand(5), random.random()
        raise ValueError
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_replays_nest() -> None:
    outer = Replay.capture([CPU])
    a = torch.rand(2)
    inner = Replay.capture([CPU])
    b = torch.rand(2)
    outer.record_changes(), inner.record_changes()
    with outer.again():
        assert torch.equal(torch.rand(2), a)
        with inner.again():
            assert torch.equal(torch.rand(2), b)
        assert torch.equal(torch.rand(2), b)


def test_defect_pipe_5_replays_of_several_threads_take_turns_and_rewind_nothing() -> None:
    replays = []
    for _ in range(8):
        replay = Replay.capture([CPU])
        expected = torch.rand(100)
        replays.append((replay.record_changes(), expected))
    after = torch.get_rng_state()
    wrong = []

    def repeat(replay: Any, expected: Any) -> None:
        for _ in range(20):
            with replay.again():
                halves = torch.cat([torch.rand(50), torch.rand(50)])
            if not torch.equal(halves, expected):
                wrong.append(1)

    replays = [(r, torch.cat([e[:50], e[50:]])) for r, e in replays]
    threads = [threading.Thread(target=repeat, args=pair) for pair in replays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(torch.get_rng_state(), after)


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


def test_autocast_reads_as_at_capture_and_keeps_no_cast() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        replay = Replay.capture([CPU])
    assert not torch.is_autocast_enabled("cpu")
    with replay.again():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
        assert (torch.ones(2, 2) @ weight).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_a_replay_of_a_forward_without_autocast_turns_it_off() -> None:
    replay = Replay.capture([CPU])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with replay.again():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def test_a_cast_under_no_grad_is_not_left_for_a_forward_that_needs_its_gradient() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            Layers().run(lambda x: x @ weight, torch.ones(2, 2))
        assert torch.is_autocast_cache_enabled()
        assert (torch.ones(2, 2) @ weight).requires_grad


def test_grad_mode_is_left_to_the_caller() -> None:
    with torch.no_grad():
        replay = Replay.capture([CPU])
    with torch.enable_grad(), replay.again():
        assert torch.is_grad_enabled()


def test_devices_are_those_of_all_tensors() -> None:
    assert devices_of({"a": [torch.ones(1)], "b": torch.ones(1, device="meta")}, 3) == {CPU, torch.device("meta")}
    assert Replay.capture([torch.device("meta"), CPU]).record_changes().drawn == ()
