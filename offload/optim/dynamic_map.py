"""Eight-bit floating-point codes for optimizer states: the dynamic map, scaled by the largest value of each block.

256 neighbouring values share one float32 scale, their largest magnitude. Each value, divided by it, is rounded to the
nearest of 256 levels between -1 and 1 (or 0 and 1), which are dense near 1 and reach down to about 5e-7: the dynamic
tree quantisation of 8-bit Adam (Dettmers et al., 2022), as in bitsandbytes and torchao.

Two things differ from these libraries. A block without negative values takes the levels from 0 to 1, whatever the state
is called, and a negative scale says that a block takes those from -1 to 1: so any optimizer class can be used. And a
positive value of such a block is never rounded to 0: Adam divides by the root of its second moment, and a moment that
vanished while the first did not would make an update too large by orders of magnitude.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

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
def _both_levels() -> Tensor:
    return torch.cat([levels(False), levels(True)])


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """For both maps, one after the other: the code of the least value in each row, and the value at which it ends."""
    codes, ends = [], []
    patterns = torch.arange(_ROWS, dtype=torch.int32) << 16
    # Bits grow with the magnitude: the least value of a row of negative ones has all of the lower bits.
    least = torch.where(patterns < 0, patterns | 0xFFFF, patterns).view(torch.float32).nan_to_num()
    for signed in (False, True):
        known = levels(signed)
        middles = (known[:-1] + known[1:]) / 2
        if not signed:
            middles[0] = 0  # no positive value becomes 0
        codes.append(torch.bucketize(least, middles).to(torch.uint8))
        ends.append(torch.cat([middles, torch.tensor([torch.inf])]))
    return torch.cat(codes), torch.cat(ends)


def encode(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Writes the codes of ``values`` (flat, floating point), as many uint8, and a float32 scale for each block.

    The last block may be shorter. A block with a value that is not finite is decoded as NaN or infinite.
    """
    whole = values.numel() // BLOCK * BLOCK
    if whole:
        _encode(values[:whole].view(-1, BLOCK), codes[:whole].view(-1, BLOCK), scales[: whole // BLOCK])
    if whole < values.numel():
        _encode(values[whole:].view(1, -1), codes[whole:].view(1, -1), scales[whole // BLOCK :])


def _encode(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    values = values.float()
    # Twenty times as fast as aminmax(), which is half of all the rest.
    least, most = values.amin(dim=1), values.amax(dim=1)
    signed = least < 0
    largest = torch.maximum(least.abs(), most.abs())
    torch.where(signed, -largest, largest, out=scales)
    ratios = values / torch.where(largest > 0, largest, 1).unsqueeze(1)
    first, ends = _tables()
    rows = (ratios.view(torch.int32) >> 16).bitwise_and_(_ROWS - 1)
    rows += (signed.int() * _ROWS).unsqueeze(1)
    found = first.index_select(0, rows.view(-1)).view(ratios.shape)
    rows = (found.int() + (signed.int() * BLOCK).unsqueeze(1)).view(-1)
    torch.add(found, ratios > ends.index_select(0, rows).view(ratios.shape), out=codes)


def decode(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Writes what :func:`encode` stored to ``values``; all flat."""
    rows = codes.int()
    count = values.numel()
    whole = count // BLOCK
    for part, of in ((rows[: whole * BLOCK], scales[:whole]), (rows[whole * BLOCK :], scales[whole:])):
        if part.numel():
            part.view(of.numel(), -1).add_(((of < 0).int() * BLOCK).unsqueeze(1))
    found = _both_levels().index_select(0, rows)
    for begin, end, of in ((0, whole * BLOCK, scales[:whole]), (whole * BLOCK, count, scales[whole:])):
        if end > begin:
            found[begin:end].view(of.numel(), -1).mul_(of.abs().unsqueeze(1))
    values.copy_(found)
