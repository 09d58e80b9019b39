"""Bases quantised by torchao and bitsandbytes, with the results of the plain quantised model.

In an environment of their own (``pip install torchao bitsandbytes transformers peft``), where these are not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from tests.offload.quantised import assert_same, train

WIDTH = 256  # NF4Tensor needs a multiple of 256 blocks

pytestmark = pytest.mark.filterwarnings("ignore")


def torchao(config: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        quantization: Any = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install torchao")
        holder = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        quantization.quantize_(holder, config(quantization))
        return holder[0]

    return make


def nf4() -> nn.Module:
    api: Any = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor", reason="needs torchao")
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(api.to_nf4(layer.weight.data, 64, 256), requires_grad=False)
    return layer


def bitsandbytes(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        bnb: Any = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
        layer: nn.Module = getattr(bnb.nn, kind)(WIDTH, WIDTH, **options)
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        return layer.to("cpu")

    return make


MAKES = {
    "torchao int8": torchao(lambda q: q.Int8WeightOnlyConfig()),
    "torchao int4": torchao(lambda q: q.IntxWeightOnlyConfig(weight_dtype=vars(torch)["int4"])),
    "torchao float8": torchao(lambda q: q.Float8WeightOnlyConfig()),
    "torchao nf4": nf4,
    "bitsandbytes nf4": bitsandbytes("Linear4bit", quant_type="nf4", compress_statistics=False),
    "bitsandbytes nf4 twice": bitsandbytes("Linear4bit", quant_type="nf4", compress_statistics=True),
    "bitsandbytes fp4": bitsandbytes("Linear4bit", quant_type="fp4"),
    "bitsandbytes int8": bitsandbytes("Linear8bitLt", has_fp16_weights=False),
}
makes = pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))


class Block(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.base = make().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def layers(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(make) for _ in range(3)))


@makes
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_a_base_of_a_library_trains_adapters_as_the_plain_model(
    make: Callable[[], nn.Module], recompute: bool, home: str
) -> None:
    model = OffloadModel(layers(make), "cpu", home, 3, checkpoint_activation=recompute)
    held = sum(each.nbytes for shard in model._homes.shards for each in [shard.home] if each is not None)
    assert held < 3 * WIDTH * WIDTH * 1.2
    assert_same(train(model, width=WIDTH), train(layers(make), width=WIDTH))
