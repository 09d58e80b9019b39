"""Cached calls: the training loop stays the user's, the gradient is the whole batch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradcache import RandContext
from gradcache.functional import cached, cat_input_tensor
from gradcache.loss import SimpleContrastiveLoss
from tests.gradcache.towers import assert_same_gradients, tower


@cat_input_tensor
def contrastive(x: Tensor, y: Tensor) -> Tensor:
    return SimpleContrastiveLoss()(x, y)


def test_loop_over_small_batches_gives_the_gradient_of_all_of_them_together() -> None:
    @cached
    def encode(model: nn.Module, *, batch: Tensor) -> Tensor:
        return model(batch)

    bare = [tower(1), tower(2)]
    ours = copy.deepcopy(bare)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    expected = contrastive(bare[0](x), bare[1](y))
    expected.backward()
    calls = [[encode(model, batch=part) for part in z.split(4)] for model, z in zip(ours, (x, y), strict=True)]
    loss = contrastive([leaf for leaf, _ in calls[0]], y=[leaf for leaf, _ in calls[1]])
    loss.backward()
    assert all(parameter.grad is None for model in ours for parameter in model.parameters())
    for leaf, again in calls[0] + calls[1]:
        again(leaf)
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(bare, ours)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_functions_of_several_representations(kind: str) -> None:
    def heads(model: nn.Module, x: Tensor) -> Any:
        out = model(x)
        return {"tuple": (out, out * 2), "list": [out, out * 2], "dict": {"a": out, "b": out * 2}}[kind]

    bare, ours = tower(), tower()
    x = torch.randn(4, 8)
    outputs = heads(bare, x)
    first, second = outputs.values() if kind == "dict" else outputs
    (first.sum() + second.square().sum()).backward()
    *leaves, again = cached(heads)(ours, x)
    a, b = leaves[0].values() if kind == "dict" else leaves
    (a.sum() + b.square().sum()).backward()
    again(*leaves) if kind == "dict" else again(tuple(leaves))
    assert_same_gradients([bare], [ours])


def test_autocast_around_the_first_pass_is_seen_by_the_second() -> None:
    seen: list[torch.dtype] = []
    model = tower()

    @cached
    def encode(x: Tensor) -> Tensor:
        out = model(x)
        seen.append(out.dtype)
        return out

    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaf, again = encode(torch.randn(4, 8))
    leaf.float().sum().backward()
    again(leaf)
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_closure_called_with_another_call_s_representations_says_so() -> None:
    encode = cached(lambda model, x: model(x))
    _, again = encode(tower(), torch.randn(4, 8))
    other, _ = encode(tower(), torch.randn(3, 8))
    with pytest.raises(ValueError, match="call each closure with the leaves of the same call"):
        again(other)


def test_representation_without_a_gradient_costs_no_second_forward() -> None:
    calls: list[int] = []
    model = tower()
    model.register_forward_hook(lambda *_: calls.append(1))
    leaf, again = cached(lambda x: model(x))(torch.randn(4, 8))
    again(leaf)
    assert len(calls) == 1


def test_rand_context_repeats_draws_and_can_be_entered_again() -> None:
    context = RandContext(torch.zeros(1))
    first = torch.rand(3)
    following = torch.get_rng_state()
    for _ in range(2):
        with context:
            assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.get_rng_state(), following)
    with pytest.raises(ZeroDivisionError), context:  # noqa: PT012
        torch.rand(1)
        1 / 0  # noqa: B018
    assert torch.equal(torch.get_rng_state(), following)
