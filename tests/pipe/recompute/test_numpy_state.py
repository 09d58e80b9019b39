"""NumPy's generator is read as if its whole state were read each time, but rarely is."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipe.recompute import numpy_state

DRAWS = {
    "none": lambda: None,
    "uniform": lambda: np.random.rand(),
    "normal": lambda: np.random.randn(),
    "many": lambda: np.random.rand(700),
    "seed": lambda: np.random.seed(3),
    "permutation": lambda: np.random.permutation(4),
    "again": lambda: np.random.set_state(np.random.get_state()),
}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts how often the whole state is read."""
    count = [0]
    get_state = np.random.get_state

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return get_state(*args, **kwargs)

    monkeypatch.setattr(np.random, "get_state", counted)
    return count


def whole() -> Any:
    return repr(np.random.get_state(legacy=False))


@settings(max_examples=100)
@given(draws=st.lists(st.sampled_from(sorted(DRAWS)), max_size=6), before=st.booleans())
def test_it_is_moved_exactly_if_the_whole_state_is_another(draws: Any, before: Any) -> None:
    if before:
        np.random.randn()
    with np.printoptions(threshold=10_000):
        states = [(whole(), numpy_state.read())]
        for draw in draws:
            DRAWS[draw]()
            states.append((whole(), numpy_state.read()))
            for text, state in states:
                assert numpy_state.moved(state) == (text != whole())
                assert repr(state.whole) == text
    numpy_state.write(states[0][1])
    assert not numpy_state.moved(states[0][1])


def test_an_unused_generator_is_read_once(reads: Any) -> None:
    np.random.seed(0)
    state = numpy_state.read()
    reads[0] = 0
    for _ in range(5):
        assert numpy_state.read() is state
        assert not numpy_state.moved(state)
    assert reads == [0]


def test_seeded_again_to_the_same_words_a_kept_number_makes_another_state() -> None:
    np.random.seed(3)
    np.random.randn(2)
    state = numpy_state.read()
    np.random.seed(3)
    np.random.randn()  # as many words, but a number is kept
    assert numpy_state.moved(state)
    assert numpy_state.read().whole["has_gauss"] == 1


def test_this_numpy_is_one_that_can_be_read_cheaply() -> None:
    assert numpy_state.read().mark is not None


@pytest.mark.parametrize("lacks", ["layout", "another generator"])
def test_a_numpy_that_is_built_differently_is_read_in_whole(
    lacks: Any, monkeypatch: pytest.MonkeyPatch, reads: Any
) -> None:
    old = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if lacks == "layout":
        monkeypatch.setattr(numpy_state, "_kept_offset", lambda random: None)
    else:
        np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        state = numpy_state.read()
        assert state.mark is None
        assert not numpy_state.moved(state)
        np.random.rand()
        assert numpy_state.moved(state)
        assert reads == [3]
        numpy_state.write(state)
        assert not numpy_state.moved(state)
    finally:
        np.random.set_bit_generator(old)  # type: ignore[attr-defined]
