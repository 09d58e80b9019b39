"""What a step holds: weights at home once, saved activations until their backward, and no graph after a failure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from offload import OffloadModel

WIDTH = 64
DEPTH = 4


class Block(nn.Module):
    """Half of a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(functional.gelu(self.widen(self.norm(x))))
        return x + y


def test_a_tied_weight_is_stored_once() -> None:
    first, second = Block(), Block()
    second.widen.weight = first.widen.weight
    model = OffloadModel(nn.Sequential(first, second), "cpu", num_slices=2, checkpoint_activation=True)
    model(torch.randn(2, WIDTH)).sum().backward()
    assert model.estimate(2).home_bytes == 2 * sum(p.numel() * 4 for p in model.parameters())


def test_backward_frees_saved_activations_one_by_one(home: str) -> None:
    """As plain autograd does: what is kept until the last gradient is home stands beside all gradients."""
    model = OffloadModel(
        nn.Sequential(*(Block() for _ in range(DEPTH))), "cpu", home, num_slices=DEPTH, checkpoint_activation=False
    )
    alive: list[int] = []
    kept: list[StorageWeakRef] = []

    def saved(widen: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        kept.append(StorageWeakRef(output.untyped_storage()))

    def seen(block: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        output.register_hook(lambda _: alive.append(sum(not storage.expired() for storage in kept)))

    for block in model.children():
        block.get_submodule("widen").register_forward_hook(saved)
        block.register_forward_hook(seen)
    model(torch.randn(3, WIDTH)).sum().backward()
    assert alive == list(range(DEPTH, 0, -1))


@pytest.mark.parametrize(("checkpoint", "retains"), [(True, False), (False, False), (True, True)])
def test_a_backward_that_failed_midway_is_refused_the_second_time_unless_its_graph_was_retained(
    home: str, checkpoint: bool, retains: bool
) -> None:
    blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
    model = OffloadModel(blocks, "cpu", home, num_slices=DEPTH, checkpoint_activation=checkpoint)
    x, failing = torch.randn(3, WIDTH), [True]

    def fails(gradient: Tensor) -> None:
        if failing:
            raise ValueError("on purpose")

    list(model.children())[1].register_forward_hook(lambda block, args, output: output.register_hook(fails) and None)
    loss = model(x).sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward(retain_graph=retains)
    failing.clear()
    if not retains:
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        loss = model(x).sum()
    model.zero_grad()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
