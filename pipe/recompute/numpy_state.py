"""Reads and compares the state of NumPy's global generator quickly, by comparing bytes in memory.

Every cell of a pipeline checks twice whether the state of NumPy's generator has changed, and nearly always it has not.
``get_state`` takes tens of microseconds: more than for all other generators together. Comparing the bytes of the state
takes one microsecond: the words of the Mersenne Twister at an address that NumPy publishes, and the normal number that
the ``RandomState`` object may cache for the next draw. The offset of that number is determined once, by experiment on a
separate object; if this or anything else is not as expected, ``get_state`` is used each time.

Invariant: :func:`read` and :func:`moved` return the same as with ``get_state``.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["NumpyState", "moved", "read", "same", "write"]

_WORDS_BYTES = 4 * 624 + 4  # uint32 key[624]; int pos
_KEPT_BYTES = 16  # int has_gauss, padding, double gauss


@dataclass(frozen=True)
class NumpyState:
    """The state of NumPy's global generator at one time."""

    whole: dict[str, Any]
    """The result of ``numpy.random.get_state(legacy=False)``."""
    mark: Any
    """Equal for two states exactly if they are the same; None if only whole states can be compared."""


_latest: NumpyState | None = None


def read() -> NumpyState:
    """The present state; the same object as before if the state has not changed."""
    global _latest
    mark, latest = _mark(), _latest
    if latest is not None and mark is not None and latest.mark == mark:
        return latest
    # The mark is read first: if another thread draws in between, the mark matches no later one, instead of a wrong one.
    whole = sys.modules["numpy"].random.get_state(legacy=False)
    _latest = latest = NumpyState(whole, mark)
    return latest


def moved(state: NumpyState) -> bool:
    """Whether the generator's state has changed since."""
    mark = _mark()
    if mark is not None and state.mark is not None:
        return bool(mark != state.mark)
    return not same(state.whole, sys.modules["numpy"].random.get_state(legacy=False))


def write(state: NumpyState) -> None:
    """Sets the generator's state."""
    sys.modules["numpy"].random.set_state(state.whole)


def _mark() -> Any:
    """The bytes of a Mersenne Twister and of the cached number; None for any other generator."""
    random = sys.modules["numpy"].random
    offset = _kept_offset(random)
    if offset is None:
        return None
    # The object that the functions of numpy.random are bound to.
    owner, generator = getattr(random.random_sample, "__self__", None), random.get_bit_generator()
    if type(owner) is not random.RandomState or type(generator) is not random.MT19937:
        return None
    words = ctypes.string_at(generator.ctypes.state_address, _WORDS_BYTES)
    return id(generator), words, ctypes.string_at(id(owner) + offset, _KEPT_BYTES)


@functools.cache
def _kept_offset(random: Any) -> int | None:
    """The offset of the cached normal number in a ``RandomState`` object; None if it cannot be determined."""
    if sys.implementation.name != "cpython" or not hasattr(random, "get_bit_generator"):
        return None
    trial = random.RandomState(0)
    state = trial.get_state(legacy=False)
    words = ctypes.string_at(trial._bit_generator.ctypes.state_address, _WORDS_BYTES)
    if words != state["state"]["key"].tobytes() + int(state["state"]["pos"]).to_bytes(4, sys.byteorder):
        return None
    number = ctypes.c_double(0.12345678901234)

    def memory(has_gauss: int, gauss: float) -> bytes:
        trial.set_state({**state, "has_gauss": has_gauss, "gauss": gauss})
        return ctypes.string_at(id(trial), type(trial).__basicsize__)

    with_number, without, zero = memory(1, number.value), memory(0, number.value), memory(1, 0.0)
    offset = with_number.find(bytes(number)) - 8
    differs = [k for k, (a, b) in enumerate(zip(with_number, without, strict=True)) if a != b]
    differs_by_number = [k for k, (a, b) in enumerate(zip(with_number, zero, strict=True)) if a != b]
    known = (
        offset >= 0
        and with_number.count(bytes(number)) == 1
        and len(differs) == 1
        and offset <= differs[0] < offset + 8
        and all(offset + 8 <= k < offset + 16 for k in differs_by_number)
    )
    return offset if known else None


def same(a: Any, b: Any) -> bool:
    """Whether two results of ``get_state`` are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
