"""Forms in which homes store float32 weights in fewer bytes for loads: bfloat16, alone or with the bits that it lacks.

::

    store_dtype      in the home                                 a load reads      an update reads and writes
    "split"          bfloat16, nearest  | the lower 16 bits      bfloat16          both: the exact float32
    torch.bfloat16   bfloat16                                    bfloat16          bfloat16

Layers compute with the bfloat16 values, in the type that they compute in anyway. An update reads float32 values (exact
ones, or those of the bfloat16), runs the optimizer's class on them, and stores the result: exactly, or rounded
stochastically.

Guarantees
    * ``"split"`` restores every float32 bit by bit (NaN as a NaN). Its bfloat16 is the nearest one; of two that are
      equally near the one of greater magnitude. With ties to even the lower half could not tell which way was rounded:
      65,537 values of float32 are rounded to an even bfloat16.
    * Stochastic rounding adds 16 random bits below those that are kept, and truncates: exact on average. The bits are a
      function of step, parameter and element only. So an update that is repeated, resumed, or cut otherwise has the
      same result.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["PIECE", "WeightForm", "noise", "pieces", "weight_form_of"]

#: Elements that are converted at a time: few enough for the processor's
#: cache, and so many that calls of torch count little: half as many take a fifth more time.
PIECE = 1 << 17

#: Which half of a float32, as two int16, has the lower bits.
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


def pieces(count: int) -> Iterator[slice]:
    """Parts of so many elements that are converted, updated and stored at a time."""
    for begin in range(0, count, PIECE):
        yield slice(begin, min(begin + PIECE, count))


def _hashed(words: Tensor, key: int) -> Tensor:
    """Mixes 32-bit words in place with a multiplicative hash (Wellons' lowbias32); ``key`` enters in the middle."""
    for shift, factor, more in ((16, 0x7FEB352D, key), (15, 0x846CA68B, 0)):
        # Shifts of int32 copy the sign, which the mask removes.
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << 32 - shift) - 1))
        words.mul_(_signed(factor))
        if more:
            words.bitwise_xor_(_signed(more))
    return words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def noise(step: int, name: str, begin: int, count: int) -> Tensor:
    """Random bits of the ``count`` elements of a parameter from ``begin`` (even) on in one step; int32, 0 to 65,535."""
    assert begin % 2 == 0
    # One hash for two elements.
    words = torch.arange(begin // 2, (begin + count + 1) // 2, dtype=torch.int32)
    first = zlib.crc32(name.encode())
    words = _hashed(words.bitwise_xor_(_signed(first)), zlib.crc32(b"%d %d" % (step, first)))
    return words.view(torch.int16)[:count].to(torch.int32).bitwise_and_(0xFFFF)


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and upper bits of float32 values (flat), as int16; no copy."""
    both = values.view(torch.int16).view(-1, 2)
    return both[:, _LOW], both[:, _HIGH]


@dataclass(frozen=True)
class WeightForm:
    """How float32 parameters are stored. Values are flat, contiguous tensors on the host."""

    #: As the user gives it.
    store_dtype: Any
    #: Whether the lower 16 bits are stored as well.
    exact: bool

    @staticmethod
    def stores(parameter: Tensor) -> bool:
        """Whether a parameter is stored in this form; others are stored as they are."""
        return parameter.dtype == torch.float32 and parameter.numel() > 0

    def encode(self, values: Tensor, upper: Tensor, lower: Tensor | None) -> None:
        """Stores float32 ``values`` as bfloat16 ``upper`` and int16 ``lower``, rounded to the nearest."""
        for part in pieces(values.numel()):
            if self.exact:
                assert lower is not None
                self._split(_quiet(values[part].clone()), upper[part], lower[part])
            else:
                upper[part] = values[part]

    def store(self, values: Tensor, upper: Tensor, lower: Tensor | None, *, step: int, name: str, begin: int) -> None:
        """Stores the result of an update, of the elements of a parameter from ``begin`` on; overwrites ``values``."""
        _quiet(values)
        if self.exact:
            assert lower is not None
            self._split(values, upper, lower)
            return
        values.view(torch.int32).add_(noise(step, name, begin, values.numel()))
        upper.view(torch.int16).copy_(_halves(values)[1])

    def decode(self, upper: Tensor, lower: Tensor | None, values: Tensor) -> None:
        """Restores ``values``: the exact ones, or those of the bfloat16."""
        if not self.exact:
            values.copy_(upper)
            return
        assert lower is not None
        for part in pieces(values.numel()):
            low, high = _halves(values[part])
            low.copy_(lower[part])
            # Where the lower half is negative, the upper one was rounded up.
            torch.add(upper[part].view(torch.int16), lower[part] >> 15, out=high)

    @staticmethod
    def _split(values: Tensor, upper: Tensor, lower: Tensor) -> None:
        low, high = _halves(values)
        lower.copy_(low)
        torch.sub(high, lower >> 15, out=upper.view(torch.int16))


def _quiet(values: Tensor) -> Tensor:
    """Gives every NaN the same bits, because rounding could make numbers of others."""
    return values.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)


_FORMS = {"split": WeightForm("split", exact=True), torch.bfloat16: WeightForm(torch.bfloat16, exact=False)}


def weight_form_of(store_dtype: Any) -> WeightForm | None:
    """The form that a user chose; None for parameters in their own type. Raises TypeError or ValueError for others."""
    if store_dtype is None:
        return None
    if not isinstance(store_dtype, (str, torch.dtype)):
        raise TypeError(
            f"expected None, torch.bfloat16 or 'split', got {type(store_dtype).__name__} (store_dtype={store_dtype!r})"
        )
    if store_dtype not in _FORMS:
        raise ValueError(
            f"expected None (parameters in their own type), torch.bfloat16 or 'split', got store_dtype={store_dtype!r}"
        )
    return _FORMS[store_dtype]
