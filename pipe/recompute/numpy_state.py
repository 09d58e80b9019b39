"""NumPy's global generator, read cheaply.

Every cell of a pipeline asks twice whether NumPy's generator has moved, and nearly always it has not. Its whole state
takes NumPy tens of microseconds to hand out: more than all other generators together. But it lies in memory as it is,
and comparing bytes takes one: the words of the Mersenne Twister at an address that NumPy publishes, and the normal
number that may be kept for the next draw inside the object itself. Where in there is found out by trying, once, on an
object of our own; where that or anything else is not as expected, the whole state is read each time.

Invariant: :func:`read` and :func:`moved` answer as if the whole state had been read each time.
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
    """As ``numpy.random.get_state(legacy=False)`` gives it."""
    mark: Any
    """Equal for two states exactly if they are the same; None if only the whole state tells."""


_latest: NumpyState | None = None


def read() -> NumpyState:
    """The state now; one that was read before, if the generator is still in it."""
    global _latest
    mark, latest = _mark(), _latest
    if latest is not None and mark is not None and latest.mark == mark:
        return latest
    # The mark first: if another thread draws in between, it equals none that follows, instead of a wrong one.
    whole = sys.modules["numpy"].random.get_state(legacy=False)
    _latest = latest = NumpyState(whole, mark)
    return latest


def moved(state: NumpyState) -> bool:
    """Whether the generator is no longer in this state."""
    mark = _mark()
    if mark is not None and state.mark is not None:
        return bool(mark != state.mark)
    return not same(state.whole, sys.modules["numpy"].random.get_state(legacy=False))


def write(state: NumpyState) -> None:
    """Puts the generator into this state."""
    sys.modules["numpy"].random.set_state(state.whole)


def _mark() -> Any:
    """The bytes of a Mersenne Twister and of the kept number; None for any other generator."""
    random = sys.modules["numpy"].random
    offset = _kept_offset(random)
    if offset is None:
        return None
    # What the functions of the module are bound to.
    owner, generator = getattr(random.random_sample, "__self__", None), random.get_bit_generator()
    if type(owner) is not random.RandomState or type(generator) is not random.MT19937:
        return None
    words = ctypes.string_at(generator.ctypes.state_address, _WORDS_BYTES)
    return id(generator), words, ctypes.string_at(id(owner) + offset, _KEPT_BYTES)


@functools.cache
def _kept_offset(random: Any) -> int | None:
    """Where in a ``RandomState`` its kept normal number lies; None if that cannot be told for certain."""
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
    """Whether two states, as NumPy hands them out, are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
