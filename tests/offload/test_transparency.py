"""An OffloadModel computes what the bare model computes, bit for bit, whatever is combined."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn

from offload import OffloadModel
from tests.offload.zoo import WIDTH, build, reference


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def assert_same(bare: nn.Module, model: OffloadModel, *, exact: bool) -> None:
    """Parameters, gradients and buffers."""
    assert list(bare.state_dict()) == list(model.state_dict())
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for (name, p), (other, q) in zip(bare.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(q.detach(), p.detach(), **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, **tolerance, msg=lambda m, n=name: f"{n}.grad: {m}")
    for (name, b), (_, c) in zip(bare.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(c, b, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def batch(seed: int = 0, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_several_inputs_keywords_integers_and_bools_reach_the_first_layer(home: str) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, WIDTH)

        def forward(
            self, ids: torch.Tensor, mask: torch.Tensor, *, scale: float, extra: dict[str, torch.Tensor]
        ) -> torch.Tensor:
            return self.embedding(ids) * mask.unsqueeze(1) * scale + extra["offset"]

    class Call(nn.Module):
        """What a bare Sequential cannot do: pass several arguments to its first layer."""

        def __init__(self, layers: nn.Sequential) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
            first, *rest = self.layers
            value = first(*args, **kwargs)
            for layer in rest:
                value = layer(value)
            return value

    torch.manual_seed(0)
    layers = nn.Sequential(First(), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 1))
    bare = Call(layers)
    model = OffloadModel(
        copy.deepcopy(layers), "cpu", home, num_slices=3, checkpoint_activation=True, num_microbatches=2
    )
    ids = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)
    mask = torch.tensor([True, False, True, True, True])
    results = []
    for run in (bare, model):
        offset = torch.zeros(5, WIDTH, requires_grad=True)
        output = run(ids, mask, scale=2.0, extra={"offset": offset})
        output.sum().backward()
        results.append((output.detach(), offset.grad))
    assert results[1][0].shape == (5, 1)
    torch.testing.assert_close(results[1][0], results[0][0])
    torch.testing.assert_close(results[1][1], results[0][1])


def test_backward_runs_after_the_model_was_dropped(home: str) -> None:
    bare = build(["linear", "dropout"])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=3, checkpoint_activation=True)
    parameters = list(model.parameters())
    seed_everything(0)
    loss = model(batch()).sum()
    del model
    loss.backward()
    seed_everything(0)
    bare(batch()).sum().backward()
    for p, q in zip(bare.parameters(), parameters, strict=True):
        assert torch.equal(p.grad, q.grad)


# --- mixed precision, meta device, copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_slots_in_bfloat16_with_float32_masters(home: str, recompute: bool, microbatches: int) -> None:
    bare = build(["dropout", "linear", "inplace"], tied=True)
    model = OffloadModel(
        copy.deepcopy(bare),
        "cpu",
        home,
        num_slices=3,
        checkpoint_activation=recompute,
        num_microbatches=microbatches,
        param_dtype=torch.bfloat16,
    )
    cuts = [len(shard.layers) for shard in model._homes.shards]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = [p.detach().clone() for p in bare.parameters()]
    for step in range(3):
        # The reference: a bfloat16 model for each micro-batch, whose gradients are summed in float32.
        narrow = copy.deepcopy(bare).to(torch.bfloat16)
        with torch.no_grad():
            for p, master in zip(narrow.parameters(), masters, strict=True):
                p.copy_(master)
        seed_everything(step)
        x = batch(step, rows=8).requires_grad_()
        expected = reference(narrow, cuts, x.bfloat16(), microbatches)
        sums = [torch.zeros_like(master) for master in masters]
        pieces = expected.float().tensor_split(microbatches)
        for k, piece in enumerate(pieces):
            loss = piece.pow(2).sum()
            for total, g in zip(
                sums,
                torch.autograd.grad(loss, list(narrow.parameters()), retain_graph=k + 1 < len(pieces)),
                strict=True,
            ):
                total += g
        seed_everything(step)
        y = x.detach().clone().requires_grad_()
        output = model(y)
        assert output.dtype is torch.bfloat16
        assert torch.equal(output, expected)
        output.float().pow(2).sum().backward()
        assert y.grad.dtype is torch.float32
        for q, total in zip(model.parameters(), sums, strict=True):
            assert q.dtype is q.grad.dtype is torch.float32
            # A tied weight's two gradients are added in bfloat16 by torch, in float32 here.
            torch.testing.assert_close(q.grad, total, rtol=2e-2, atol=2e-2)
        optimizer.step()
        optimizer.zero_grad()
        masters = [q.detach().clone() for q in model.parameters()]


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
def test_many_microbatches_are_not_summed_in_bfloat16(masters: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = 1024
    layer = nn.Linear(4, 1, bias=False).to(masters)
    model = OffloadModel(
        nn.Sequential(layer, nn.Identity()),
        "cpu",
        num_slices=1,
        checkpoint_activation=True,
        num_microbatches=rows,
        param_dtype=torch.bfloat16,
    )
    x = torch.rand(rows, 4)
    model(x).float().sum().backward()
    exact = x.bfloat16().double().sum(0, keepdim=True)
    # in bfloat16 the sum would stand still at 256; at home it is rounded once
    assert ((layer.weight.grad.double() - exact).abs() / exact).max() < (1e-5 if masters is torch.float32 else 1e-2)


def test_meta_layers_initialise_themselves_as_the_whole_model_would(home: str) -> None:
    def make() -> nn.Sequential:
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        last.weight = first.weight
        return nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), last)

    with torch.device("meta"):
        bare, layers = make(), make()
    torch.manual_seed(3)
    bare = bare.to_empty(device="cpu")
    bare[3].weight = bare[0].weight  # to_empty unties
    for module in bare.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    torch.manual_seed(3)
    model = OffloadModel(layers, "cpu", home, num_slices=4, checkpoint_activation=True)
    assert layers[0].weight is layers[3].weight
    for run in (bare, model):
        run(batch()).sum().backward()
    assert_same(bare, model, exact=True)


def test_a_pickled_model_is_as_large_as_its_parameters(home: str) -> None:
    model = OffloadModel(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), "cpu", home, num_slices=2, checkpoint_activation=False
    )
    assert len(pickle.dumps(model)) < 1.2 * sum(p.numel() * 4 for p in model.parameters())
