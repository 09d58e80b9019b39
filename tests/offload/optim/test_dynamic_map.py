"""The 8-bit map of optimizer states: its levels, the rounding to them, and values that are hard to scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.optim.dynamic_map import BLOCK, decode, encode, levels


def stored(values: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.full_like(values, 77, dtype=torch.uint8)
    scales = torch.full((-(-values.numel() // BLOCK),), torch.nan)
    encode(values, codes, scales)
    return codes, scales


def back(values: Tensor) -> Tensor:
    found = torch.full_like(values, torch.nan)
    decode(*stored(values), found)
    return found


def drawn(count: int, *, signed: bool) -> Tensor:
    """Values over ten decades, blocks of other sizes, exact levels and the middles between them."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator) * 10 ** -(10 * torch.rand(count, generator=generator))
    known = levels(signed)
    some = torch.cat([known, (known[1:] + known[:-1]) / 2])[:count]
    values[: some.numel()] = some
    values *= 10 ** torch.randn(-(-count // BLOCK), generator=generator).repeat_interleave(BLOCK)[:count]
    return values if signed else values.abs()


@pytest.mark.parametrize("count", [1, 255, 256, 1000, 4096])
@pytest.mark.parametrize("signed", [False, True])
def test_each_value_becomes_the_nearest_level_of_its_block(count: int, signed: bool) -> None:
    values = drawn(count, signed=signed)
    found = back(values)
    for block, result in zip(values.split(BLOCK), found.split(BLOCK), strict=True):
        largest = block.abs().max()
        known = levels(bool((block < 0).any())) * largest
        distance = (block.unsqueeze(1).double() - known.double()).abs().min(dim=1).values
        error = (block.double() - result.double()).abs()
        # Positive values below the least level are not rounded to 0: the error is at most this level.
        least = float(known[1]) if not (block < 0).any() else 0.0
        near = error <= distance + 1e-7 * float(largest)
        raised = (block > 0) & (result.double() == least) & (least > 0)
        assert bool((near | raised).all())


def test_a_second_moment_that_is_not_zero_never_becomes_zero() -> None:
    values = torch.logspace(-30, 0, 4 * BLOCK)
    values[10] = 0
    assert torch.equal(back(values) > 0, values > 0)


def test_zeros_stay_zeros_and_a_block_that_is_not_finite_says_so() -> None:
    values = torch.ones(4 * BLOCK)
    values[:BLOCK] = 0
    values[BLOCK + 3] = torch.nan
    values[2 * BLOCK + 3] = -torch.inf
    found = back(values)
    assert torch.equal(found[:BLOCK], torch.zeros(BLOCK))
    assert not found[BLOCK : 2 * BLOCK].isfinite().any()
    assert not found[2 * BLOCK : 3 * BLOCK].isfinite().any()
    assert torch.equal(found[3 * BLOCK :], torch.ones(BLOCK))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_are_coded_as_the_same_values_of_float32(dtype: torch.dtype) -> None:
    values = drawn(1000, signed=True).to(dtype)
    for mine, expected in zip(stored(values), stored(values.float()), strict=True):
        assert torch.equal(mine, expected)
    assert torch.equal(back(values), back(values.float()).to(dtype))


def scaled(ratios: Tensor, *, signed: bool) -> Tensor:
    """Blocks of these ratios, whose largest magnitude is 1."""
    ratios = ratios[: ratios.numel() // (BLOCK - 1) * (BLOCK - 1)].view(-1, BLOCK - 1)
    end = torch.full((len(ratios), 1), -1.0 if signed else 1.0)
    return torch.cat([ratios, end], dim=1).flatten()


@pytest.mark.parametrize("signed", [False, True])
def test_the_table_finds_the_code_that_a_search_of_the_levels_finds(signed: bool) -> None:
    known = levels(signed)
    middles = (known[1:] + known[:-1]) / 2
    if not signed:
        middles[0] = 0
    low = torch.cat([torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF]), torch.arange(0, 1 << 16, 4099)])
    every_row = (torch.arange(1 << 16, dtype=torch.int32).unsqueeze(1) << 16 | low.int()).view(torch.float32).flatten()
    about = [
        torch.nextafter(known_or_middle, to) for known_or_middle in (known, middles) for to in torch.tensor([-2, 2])
    ]
    ratios = torch.cat([known, middles, *about, every_row])
    values = scaled(ratios[(ratios.abs() <= 1) & (ratios >= (-1 if signed else 0))], signed=signed)
    assert torch.equal(stored(values)[0].int(), torch.bucketize(values, middles).int())


def test_blocks_of_both_maps_side_by_side_have_the_codes_that_they_have_alone() -> None:
    values = drawn(16 * BLOCK + 100, signed=True)
    for k, block in enumerate(values.split(BLOCK)):
        if k % 3:
            block.abs_()
    alone = [stored(block) for block in values.split(BLOCK)]
    codes, scales = stored(values)
    assert torch.equal(codes, torch.cat([each for each, _ in alone]))
    assert torch.equal(scales, torch.cat([each for _, each in alone]))
    assert torch.equal(back(values), torch.cat([back(block) for block in values.split(BLOCK)]))


def test_codes_and_values_at_odd_places_are_decoded() -> None:
    values = drawn(4 * BLOCK, signed=True)
    codes, scales = stored(values)
    odd, found = torch.cat([codes[:1], codes])[1:], torch.zeros(1 + values.numel())[1:]
    decode(odd, scales, found)
    assert torch.equal(found, back(values))
