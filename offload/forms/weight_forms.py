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
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.storage.buffer import PIECE, thread_memory

__all__ = ["WeightForm", "noise", "pieces", "weight_form_of"]


def pieces(count: int) -> Iterator[slice]:
    """Parts of so many elements that are converted, updated and stored at a time."""
    for begin in range(0, count, PIECE):
        yield slice(begin, min(begin + PIECE, count))


def _hashed(words: Tensor, key: int) -> Tensor:
    """Mixes 32-bit words in place with a multiplicative hash (Wellons' lowbias32); ``key`` enters in the middle."""
    shifted = thread_memory("shifted", words.numel(), torch.int32)
    for shift, factor, more in ((16, 0x7FEB352D, key), (15, 0x846CA68B, 0)):
        # Shifts of int32 copy the sign, which the mask removes.
        words.bitwise_xor_(torch.bitwise_right_shift(words, shift, out=shifted).bitwise_and_((1 << 32 - shift) - 1))
        words.mul_(_signed(factor))
        if more:
            words.bitwise_xor_(_signed(more))
    return words.bitwise_xor_(torch.bitwise_right_shift(words, 16, out=shifted).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def noise(step: int, name: str, begin: int, count: int, out: Tensor | None = None) -> Tensor:
    """Random bits of the ``count`` elements of a parameter from ``begin`` (even) on in one step; int32, 0 to 65,535."""
    assert begin % 2 == 0
    # One hash for two elements.
    words = thread_memory("words", (begin + count + 1) // 2 - begin // 2, torch.int32)
    torch.arange(begin // 2, (begin + count + 1) // 2, dtype=torch.int32, out=words)
    first = zlib.crc32(name.encode())
    words = _hashed(words.bitwise_xor_(_signed(first)), zlib.crc32(b"%d %d" % (step, first)))
    found = torch.empty(count, dtype=torch.int32) if out is None else out
    return found.copy_(words.view(torch.uint16)[:count])


@dataclass(frozen=True)
class WeightForm:
    """How float32 parameters are stored. Values are flat, contiguous tensors on the host."""

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
        bits = values.view(torch.int32)
        for part in pieces(values.numel()):
            count = part.stop - part.start
            out = thread_memory("noise", count, torch.int32)
            bits[part].add_(noise(step, name, begin + part.start, count, out))
        upper.view(torch.int16).copy_(bits.bitwise_right_shift_(16))

    def decode(self, upper: Tensor, lower: Tensor | None, values: Tensor) -> None:
        """Restores ``values``: the exact ones, or those of the bfloat16."""
        if not self.exact:
            values.copy_(upper)
            return
        assert lower is not None
        bits = values.view(torch.int32)
        for part in pieces(values.numel()):
            # Where the lower half is negative, the upper one was rounded up: it is added with its sign.
            low = thread_memory("noise", part.stop - part.start, torch.int32).copy_(lower[part])
            bits[part].copy_(upper[part].view(torch.int16)).bitwise_left_shift_(16).add_(low)

    @staticmethod
    def _split(values: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Overwrites ``values``, which has no NaN but one."""
        bits = values.view(torch.int32)
        lower.copy_(bits)  # its lower bits
        upper.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))


def _quiet(values: Tensor) -> Tensor:
    """Gives every NaN the same bits, because rounding could make numbers of others."""
    return values.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)


#: By ``store_dtype``.
_FORMS = {"split": WeightForm(exact=True), torch.bfloat16: WeightForm(exact=False)}


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
