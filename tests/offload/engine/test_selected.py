"""Recomputed cells keep the results of chosen operations: the same numbers, fewer operations, counted memory."""

from __future__ import annotations

from collections import Counter
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SelectiveCheckpointContext

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from tests.offload.device_count import counted_and_predicted
from tests.offload.side_by_side import offloaded
from tests.offload.zoo import Attention

pytestmark = pytest.mark.skipif(
    "op_output" not in signature(SelectiveCheckpointContext).parameters,
    reason="needs a torch that tells what selective checkpointing keeps",
)

MM = torch.ops.aten.addmm.default
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def stack(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(16, 2, 0.2) for _ in range(depth)))


def backward(model: nn.Module, x: Tensor) -> tuple[list[Tensor], Counter[Any]]:
    torch.manual_seed(1)
    model.zero_grad()
    with Counting() as counted:
        model(x).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients, counted.calls


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("keep", "kept"), [("attention", KERNEL), ([MM], MM), ((), None)])
def test_what_is_kept_is_not_computed_again(keep: Any, kept: Any, microbatches: int, home: str) -> None:
    bare, x = stack(), torch.randn(4, 6, 16)
    model = offloaded(bare, home, 3, num_microbatches=microbatches, memory=MemoryPolicy.fixed(keep=keep))
    plain = OffloadModel(bare, "cpu", home, 3, False, microbatches)
    expected, _ = backward(plain, x)
    for _ in range(4):
        gradients, calls = backward(model, x)
        assert all(map(torch.equal, gradients, expected))
        for operation, cells in ((KERNEL, 3 * microbatches), (MM, 6 * microbatches)):
            assert calls[operation] == (1 if operation is kept else 2) * cells


@pytest.mark.usefixtures("own_memory")
def test_what_is_kept_counts(tmp_path: Any) -> None:
    """Five layers' results of a product take more than the least plan leaves."""
    x = torch.randn(8, 32, 16)

    def counted(keep: Any) -> tuple[int, int]:
        policy = MemoryPolicy({"device": "1GiB", "host": "1GiB"}, keep=keep, graph_bytes=0, resident_bytes=0, slots=2)
        model = OffloadModel(stack(depth=5), "cpu", tmp_path / "home", num_slices=5, memory=policy)
        ours = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
        return counted_and_predicted(model, ours, x)

    (least, least_predicted), (most, most_predicted) = counted(()), counted([MM])
    products = 5 * 4 * 8 * 32 * (48 + 16)
    assert most <= most_predicted
    assert least <= least_predicted
    assert most_predicted - least_predicted == pytest.approx(products, rel=0.25)
