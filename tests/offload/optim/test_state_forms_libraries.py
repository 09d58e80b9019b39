"""8-bit states beside those of bitsandbytes and torchao, on the same gradients.

In an environment of their own (``pip install torchao bitsandbytes``), where these are not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from offload.optim.dynamic_map import BLOCK, levels
from offload.optim.state_forms import in_full

pytestmark = pytest.mark.filterwarnings("ignore")

Rounding = Callable[[Tensor, bool], Tensor]


def bitsandbytes() -> Rounding:
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")

    def rounded(value: Tensor, signed: bool) -> Tensor:
        code = functional.create_dynamic_map(signed=signed)
        codes, state = functional.quantize_blockwise(value.contiguous(), code=code, blocksize=BLOCK)
        found: Tensor = functional.dequantize_blockwise(codes, state)
        return found

    return rounded


def torchao() -> Rounding:
    utils: Any = pytest.importorskip("torchao.optim.quant_utils", reason="needs torchao: pip install torchao")

    def rounded(value: Tensor, signed: bool) -> Tensor:
        qmap = torch.tensor(utils.create_dynamic_map(signed=signed))
        scaled, scale = utils.scale_tensor(value.contiguous().view(-1), block_size=BLOCK)
        found: Tensor = utils.dequant_with_qmap(utils.quantize_8bit_with_qmap(scaled, qmap), qmap, scale)
        return found.view(value.shape)

    return rounded


@pytest.mark.parametrize("library", [bitsandbytes, torchao])
def test_moments_are_as_near_to_the_exact_ones_as_those_of_the_library(library: Callable[[], Rounding]) -> None:
    """20 steps of Adam, gradients of very different sizes; the error of each state, root of its mean square."""
    rounded = library()
    torch.manual_seed(0)
    layer = nn.Linear(64, 68, bias=False)
    exact, theirs = (nn.Parameter(layer.weight.detach().clone()) for _ in range(2))
    model = OffloadModel(nn.Sequential(layer), "cpu")
    plain, other = (torch.optim.Adam([p], fused=True) for p in (exact, theirs))
    ours = OffloadOptimizer(model, torch.optim.Adam, states="8bit")
    sizes = 10 ** -(4 * torch.rand(68, 64))
    for _ in range(20):
        gradient = torch.randn(68, 64) * sizes
        for p in (exact, theirs, *model.parameters()):
            p.grad = gradient.clone()
        for optimizer in (plain, other, ours):
            optimizer.step()
        state = other.state[theirs]
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            state[name].copy_(rounded(state[name], signed))
    (stored,) = ours.state_dict()["state"].values()
    found = in_full(stored, exact.detach())
    for name in ("exp_avg", "exp_avg_sq"):
        expected = plain.state[exact][name]
        mine, reference = (
            (value - expected).pow(2).mean().sqrt() for value in (found[name], other.state[theirs][name])
        )
        assert float(reference) > 0
        assert float(mine) <= 1.05 * float(reference), name


@pytest.mark.parametrize("signed", [False, True])
def test_levels_are_those_of_the_libraries(signed: bool) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    utils: Any = pytest.importorskip("torchao.optim.quant_utils", reason="needs torchao: pip install torchao")
    assert torch.equal(levels(signed), functional.create_dynamic_map(signed=signed))
    torch.testing.assert_close(levels(signed), torch.tensor(utils.create_dynamic_map(signed=signed)), rtol=1e-6, atol=0)
