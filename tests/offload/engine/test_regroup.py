"""Chunks that run together give what they give apart, and no result shows it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload import MemoryPolicy, OffloadModel
from tests.offload.side_by_side import offloaded
from tests.offload.zoo import WIDTH, build


def step(model: OffloadModel, chunks: list[torch.Tensor], skip: int | None = None) -> list[torch.Tensor]:
    outputs = model.forward_chunks(chunks)
    assert [y.shape for y in outputs] == [(len(chunk), WIDTH) for chunk in chunks]
    used = [y for i, y in enumerate(outputs) if i != skip]
    torch.autograd.backward(used, [y.detach().cos() for y in used])
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("skip", [None, 1])
def test_gradients_are_those_of_the_chunks_apart(home: str, skip: int | None) -> None:
    bare = build(["linear", "inplace", "linear"])
    chunks = list(torch.randn(22, WIDTH).split(3))
    gradients = {}
    for budget in (None, 1, "1MiB"):
        model = offloaded(bare, home, 3, memory=MemoryPolicy.fixed(activation_bytes=budget))
        forwards = []
        model.get_submodule("0").register_forward_pre_hook(lambda _m, x, f=forwards: f.append(len(x[0])))
        trial = [] if budget is None else [3]
        for measured in (trial, []):  # of each kind of chunks one is measured, once
            model.zero_grad()
            forwards.clear()
            gradients[budget] = step(model, chunks, skip)
            # Backward runs the last chunk first, and none without a gradient.
            again = [1, *(7 if skip is None else 6) * [3]]
            assert forwards == [*measured, *(2 * [22] if budget == "1MiB" else [*7 * [3], 1, *again])]
    for a, b, c in zip(*gradients.values(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("drawn", ["from the start", "after a step without"])
def test_chunks_of_layers_that_draw_stay_apart_unless_the_policy_joins_them(drawn: str) -> None:
    chunks = list(torch.randn(8, WIDTH).split(2))
    seen = {}
    for join in (None, True, False):
        policy = MemoryPolicy.fixed(activation_bytes="1MiB", join_chunks=join)
        model = OffloadModel(build(["dropout"]), "cpu", num_slices=3, memory=policy)
        sizes: list[int] = []
        model.get_submodule("1").register_forward_pre_hook(lambda _m, x, s=sizes: s.append(len(x[0])))
        if drawn == "after a step without":
            model.eval()
            step(model, chunks)
            assert sizes[-1] == (2 if join is False else 8)
            model.train()
        step(model, chunks)
        assert sizes[-1] == (8 if join else 2)
        sizes.clear()
        step(model, chunks)
        seen[join] = set(sizes)
    assert seen == {None: {2}, True: {8}, False: {2}}


def test_an_output_that_has_no_row_for_each_row_is_refused() -> None:
    class Pool(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(0, keepdim=True)

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Pool())
    model = offloaded(layers, slices=2, memory=MemoryPolicy.fixed(activation_bytes=10**6))
    chunks = list(torch.randn(6, WIDTH).split(2))
    with pytest.raises(ValueError, match="one row for each of the 6 rows of 3 chunks"):
        model.forward_chunks(chunks)
