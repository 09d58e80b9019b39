"""A recomputation has the state of NumPy's generator of its forward, whichever generator that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pipe.recompute.replay import Replay

DRAWS: dict[str, Callable[[], object]] = {
    "uniform": lambda: np.random.rand(),
    "normal": lambda: np.random.randn(),
    "many": lambda: np.random.rand(700),
    "permutation": lambda: np.random.permutation(4),
}


@pytest.fixture(params=[np.random.MT19937, np.random.PCG64])
def generator(request: pytest.FixtureRequest) -> Iterator[None]:
    old = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(request.param(1))  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(old)  # type: ignore[attr-defined]


@pytest.mark.parametrize("draw", list(DRAWS))
@pytest.mark.parametrize("before", [False, True], ids=["", "after a normal number"])
def test_draws_are_repeated(draw: str, before: bool, generator: None) -> None:
    if before:
        np.random.randn()
    replay = Replay.capture([])
    first = DRAWS[draw](), np.random.randn()
    assert replay.record_changes().drawn == ("numpy",)
    with replay.again():
        assert str((DRAWS[draw](), np.random.randn())) == str(first)


def test_a_generator_that_nothing_draws_from_is_left_alone(generator: None) -> None:
    replay = Replay.capture([])
    np.random.set_state(np.random.get_state(legacy=False))
    assert replay.record_changes().drawn == ()


def test_seeded_again_to_the_same_words_a_kept_number_makes_another_state() -> None:
    np.random.seed(3)
    np.random.randn(2)
    replay = Replay.capture([])
    np.random.seed(3)
    np.random.randn()  # as many words, but a number is kept
    assert replay.record_changes().drawn == ("numpy",)
