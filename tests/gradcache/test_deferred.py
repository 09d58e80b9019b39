"""Loops of the user: representations with a graph, whose backward is the second pass, and cached calls of functions."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradcache import GradCache, RandContext
from gradcache.functional import cached
from gradcache.loss import SimpleContrastiveLoss
from gradcache.sentence_transformers import CachedMultipleNegativesRankingLoss
from tests.gradcache.towers import Sentences, offloaded, tower
from tests.gradients import assert_same_step


def unused(*_: Any) -> Tensor:
    raise AssertionError("encode() leaves the loss to the caller")


@pytest.mark.parametrize("streamed", [False, True])
def test_caller_s_own_backward_gives_the_whole_batch_s_gradient(streamed: bool) -> None:
    bare = [tower(1), tower(2)]
    ours = copy.deepcopy(bare)
    called = [offloaded(model) if streamed else model for model in ours]
    scale = [nn.Parameter(torch.tensor(2.0)) for _ in range(2)]
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    before = [nn.Linear(8, 8), nn.Linear(8, 8)]
    before[1].load_state_dict(before[0].state_dict())
    loss = SimpleContrastiveLoss()
    expected = loss(bare[0](before[0](x)) * scale[0], bare[1](y)) / 4
    expected.backward()
    hidden = before[1](x)
    a, b = GradCache(called, 4, unused).encode(hidden, y)
    actual = loss(a * scale[1], b) / 4
    torch.testing.assert_close(actual, expected)
    assert all(parameter.grad is None for model in called for parameter in model.parameters())
    (actual + 0 * hidden.sum()).backward()
    assert_same_step([*bare, before[0]], [*called, before[1]])
    torch.testing.assert_close(scale[1].grad, scale[0].grad)


def test_a_tensor_that_is_the_input_of_two_models_gets_its_gradient_once() -> None:
    model, x = tower(), torch.randn(6, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(SimpleContrastiveLoss()(model(x), model(x).sin()), x)
    a, b = GradCache([model, model], 4, unused).encode(x, x)
    SimpleContrastiveLoss()(a, b.sin()).backward()
    torch.testing.assert_close(x.grad, expected)


def test_two_batches_may_be_encoded_before_the_first_backward() -> None:
    bare, ours = tower(), tower()
    batches = [torch.randn(5, 8), torch.randn(3, 8)]
    for batch in batches:
        bare(batch).square().sum().backward()
    step = GradCache([ours], 2, unused)
    encoded = [step.encode(batch)[0] for batch in batches]
    for reps in reversed(encoded):
        reps.square().sum().backward()
    assert_same_step([bare], [ours])


def test_backward_runs_once() -> None:
    (reps,) = GradCache([tower()], 2, unused).encode(torch.randn(4, 8))
    loss = reps.square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="encode the batch again"):
        loss.backward()


def test_frozen_tower_and_integer_outputs_need_no_gradient() -> None:
    frozen = tower(1).requires_grad_(False)
    step = GradCache([tower(), frozen], 2, unused, get_rep_fn=lambda r: (r, torch.arange(r.size(0))))
    (a, ids), (b, _) = step.encode(torch.randn(4, 8), torch.randn(4, 8))
    assert a.requires_grad
    assert not b.requires_grad
    assert ids.tolist() == [0, 1, 0, 1]
    (a * b).sum().backward()
    assert step.models[0][0].weight.grad is not None


@pytest.mark.parametrize("rows", [2, 8])
def test_representations_may_be_written_in_place_unless_they_share_memory(rows: int) -> None:
    bare, x = nn.Linear(4, 4), torch.randn(8, 4)
    ours = copy.deepcopy(bare)
    bare(x).mul_(2).square().sum().backward()
    (representation,) = GradCache([ours], rows, unused).encode(x)
    representation.mul_(2).square().sum().backward()
    assert_same_step([bare], [ours])
    two = GradCache([ours], 8, unused, get_rep_fn=lambda hidden: {"all": hidden, "two": hidden[:, :2]})
    with pytest.raises(RuntimeError, match="view"):
        two.encode(x)[0]["all"].mul_(2)


def by_encode(x: Tensor) -> Tensor:
    model = tower()
    return SimpleContrastiveLoss()(*GradCache([model, model], 2, unused).encode(x, x + 1))


def by_tiles(x: Tensor) -> Tensor:
    model = tower()
    return SimpleContrastiveLoss(tile_rows=2)(model(x), model(x + 1))


def by_ranking(x: Tensor) -> Tensor:
    loss = CachedMultipleNegativesRankingLoss(Sentences(), mini_batch_size=2)
    return loss([{"input_ids": x}, {"input_ids": x + 1}])


@pytest.mark.parametrize("way", [by_encode, by_tiles, by_ranking])
def test_a_loss_that_is_kept_after_its_backward_keeps_nothing_of_the_size_of_representations(way: Any) -> None:
    def held() -> int:
        gc.collect()
        return sum(type(each) is Tensor and each.shape == (11, 6) for each in gc.get_objects())

    loss = way(torch.randn(11, 8))
    before = held()
    loss.backward()
    assert before > 0
    assert held() == 0
    assert loss.requires_grad


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
    assert_same_step([bare], [ours])


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
