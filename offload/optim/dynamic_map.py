"""Eight-bit floating-point codes for optimizer states: the dynamic map, scaled by the largest value of each block.

256 neighbouring values share one float32 scale, their largest magnitude. Each value, divided by it, is rounded to the
nearest of 256 levels between -1 and 1 (or 0 and 1), which are dense near 1 and reach down to about 5e-7: the dynamic
tree quantisation of 8-bit Adam (Dettmers et al., 2022), as in bitsandbytes and torchao.

Two things differ from these libraries. A block without negative values takes the levels from 0 to 1, whatever the state
is called, and a negative scale says that a block takes those from -1 to 1: so any optimizer class can be used. And a
positive value of such a block is never rounded to 0: Adam divides by the root of its second moment, and a moment that
vanished while the first did not would make an update too large by orders of magnitude.

A value is coded by one look-up of its upper 16 bits, whose entry says at which lower bits the code grows. Each pass is
over memory that the processor's cache holds: an update codes every state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from offload.storage.buffer import PIECE, thread_memory

__all__ = ["BLOCK", "decode", "encode", "levels"]

#: Values that share a scale.
BLOCK = 256

#: Decades of the levels. In each one towards 1 their number doubles.
_DECADES = 7
#: The upper 16 bits of a float32 choose a row of the table of codes.
_ROWS = 1 << 16


@cache
def levels(signed: bool) -> Tensor:
    """The 256 levels in ascending order: from -1 to 1 (of which -1 itself is none), or from 0 to 1."""
    positive: list[Tensor] = []
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, (1 << decade) * (1 if signed else 2) + 1)
        positive.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES))
    found = torch.cat(positive)
    ends = torch.tensor([0.0, 1.0])
    return torch.cat([found, -found, ends] if signed else [found, ends]).sort().values


@cache
def _levels() -> Tensor:
    """Those of both maps, one after the other."""
    return torch.cat([levels(signed) for signed in (False, True)])


@cache
def _entries() -> Tensor:
    """For both maps, one after the other, and each row: ``(entry + low) >> 16`` is the code of a ratio in it.

    ``low`` is the lower 16 bits of the ratio, complemented if its sign is set, so that it grows with the ratio. The
    upper bits of an entry are the code of the least value of the row; its lower ones overflow into them where the
    ratio is above the middle that ends this code. No row has two middles.
    """
    found = []
    rows = torch.arange(_ROWS, dtype=torch.int32)
    patterns = rows << 16
    # Bits grow with the magnitude: the least value of a row of negative ones has all of the lower bits.
    least = torch.where(patterns < 0, patterns | 0xFFFF, patterns).view(torch.float32).nan_to_num()
    for signed in (False, True):
        known = levels(signed)
        middles = (known[:-1] + known[1:]) / 2
        if not signed:
            middles[0] = 0  # no positive value becomes 0
        codes = torch.bucketize(least, middles)
        ends = torch.cat([middles, torch.tensor([torch.inf])])[codes].view(torch.int32)
        low = torch.where(patterns < 0, ends, 0xFFFF - (ends & 0xFFFF)) & 0xFFFF
        found.append((codes.int() << 16) + torch.where(ends >> 16 == patterns >> 16, low, 0))
    return torch.cat(found)


def encode(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Writes the codes of ``values`` (flat, floating point), as many uint8, and a float32 scale for each block.

    The last block may be shorter. A block with a value that is not finite is decoded as NaN or infinite.
    """
    for part, blocks in _parts(values.numel()):
        _encode(values[part], codes[part], scales[blocks])


def decode(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Writes what :func:`encode` stored to ``values``; all flat."""
    for part, blocks in _parts(values.numel()):
        _decode(codes[part], scales[blocks], values[part])


def _parts(count: int) -> Iterator[tuple[slice, slice]]:
    """Elements that are coded together, and their scales: whole blocks, then the one that is shorter."""
    whole = count // BLOCK
    for begin, end in pairwise([*range(0, whole, PIECE // BLOCK), whole, -(-count // BLOCK)]):
        if begin < end:
            yield slice(begin * BLOCK, end * BLOCK), slice(begin, end)


def _encode(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    count, blocks = values.numel(), scales.numel()
    values = values.float().view(blocks, -1)
    # Twenty times as fast as aminmax(), which is half of all the rest.
    least, most = values.amin(dim=1), values.amax(dim=1)
    signed = least < 0
    largest = torch.maximum(least.abs(), most.abs())
    torch.where(signed, -largest, largest, out=scales)
    ratios, rows, found = (thread_memory(("8bit", k), count, torch.int32) for k in range(3))
    divisors = torch.where(largest > 0, largest, 1).unsqueeze(1)
    torch.div(values, divisors, out=ratios.view(torch.float32).view(blocks, -1))
    torch.bitwise_right_shift(ratios, 16, out=rows).bitwise_and_(_ROWS - 1)
    torch.index_select(_of_map(_entries(), signed, rows), 0, rows, out=found)
    if bool(signed.any()):
        # Complements the negative ones. In blocks without any, all values below 0 have one code: -0.0, and NaN.
        ratios.bitwise_xor_(torch.bitwise_right_shift(ratios, 31, out=rows))
    found.add_(ratios.bitwise_and_(_ROWS - 1)).bitwise_right_shift_(16)
    codes.copy_(found)


def _of_map(table: Tensor, signed: Tensor, rows: Tensor) -> Tensor:
    """The part of a table of both maps that ``rows`` are in; where blocks have different maps, all, and other rows."""
    number, half = int(signed.sum()), len(table) // 2
    if number in (0, signed.numel()):
        return table[half:] if number else table[:half]
    rows.view(signed.numel(), -1).add_((signed.int() * half).unsqueeze(1))
    return table


def _decode(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    count = values.numel()
    found = values if values.dtype == torch.float32 else thread_memory(("8bit", 0), count, torch.float32)
    rows = thread_memory(("8bit", 1), count, torch.int32).copy_(codes)
    torch.index_select(_of_map(_levels(), scales < 0, rows), 0, rows, out=found)
    found.view(scales.numel(), -1).mul_(scales.abs().unsqueeze(1))
    if found is not values:
        values.copy_(found)
