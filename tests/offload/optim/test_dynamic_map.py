"""The 8-bit map of optimizer states: its levels, the rounding to them, and values that are hard to scale."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("signed", [False, True])
def test_levels_are_those_of_the_libraries(signed: bool) -> None:
    """In an environment of their own (``pip install torchao bitsandbytes``), where these are not installed."""
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    utils: Any = pytest.importorskip("torchao.optim.quant_utils", reason="needs torchao: pip install torchao")
    assert torch.equal(levels(signed), functional.create_dynamic_map(signed=signed))
    torch.testing.assert_close(levels(signed), torch.tensor(utils.create_dynamic_map(signed=signed)), rtol=1e-6, atol=0)
