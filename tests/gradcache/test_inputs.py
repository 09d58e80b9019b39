"""What users pass: mappings of a tokenizer, callables as models, sizes of NumPy, outputs that a loss reads in part."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradcache import GradCache
from gradcache.functional import cached
from gradcache.loss import SimpleContrastiveLoss
from offload import MemoryPolicy
from tests.gradcache.towers import WAYS, Calls, Output, assert_same_gradients, energy, in_chunks, offloaded


class Overwriting(nn.Module):
    """Masks its input in place, as some tokenizing wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x.mul_(mask)
        x.add_(1)
        return self.linear(x)


def cut(model_input: Mapping[str, Tensor], size: int) -> list[UserDict[str, Tensor]]:
    rows = len(model_input["x"])
    return [UserDict({k: v[i : i + size] for k, v in model_input.items()}) for i in range(0, rows, size)]


def test_a_model_that_writes_over_a_tokenizer_s_mapping_meets_a_copy_in_both_passes() -> None:
    """The mapping is opaque to torch: the second pass ran on what the first had written, and so did the user."""
    bare, model = Overwriting(), Overwriting()
    inputs = [UserDict({"x": torch.randn(7, 8), "mask": torch.ones(7, 8)}) for _ in range(2)]
    before = [each["x"].clone() for each in inputs]
    reps = [bare(each["x"].clone(), each["mask"]) for each in inputs]
    SimpleContrastiveLoss()(*reps).backward()
    GradCache([model, model], 3, SimpleContrastiveLoss(), split_input_fn=cut)(*inputs)
    assert_same_gradients([bare], [model])
    assert all(torch.equal(each["x"], old) for each, old in zip(inputs, before, strict=True))


class Clip(nn.Module):
    """Two encoders as methods of one module, with a buffer that each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(8, 6), nn.Linear(5, 6)
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.3)

    def encode_image(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.image(x)))

    def encode_text(self, x: Tensor) -> Tensor:
        return self.norm(self.text(x).tanh())


def test_bound_methods_are_towers() -> None:
    bare, clip = Clip(), Clip()
    x, y = torch.randn(8, 8), torch.randn(8, 5)
    torch.manual_seed(1)
    expected = in_chunks([bare.encode_image, bare.encode_text], 4, SimpleContrastiveLoss(), x, y)
    torch.manual_seed(1)
    loss = GradCache([clip.encode_image, clip.encode_text], 4, SimpleContrastiveLoss())(x, y)
    torch.testing.assert_close(loss, expected)
    assert_same_gradients([bare], [clip])
    for mine, theirs in zip(clip.buffers(), bare.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_callable_keeps_gradients_of_before_after_an_exception_and_can_be_evaluated() -> None:
    clip, calls = Clip(), []
    clip.image.weight.grad = before = torch.ones(6, 8)

    def fails_in_the_second_pass(reps: Tensor) -> Tensor:
        calls.append(len(reps))
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return reps

    cache = GradCache([lambda x: clip.encode_image(x)], 4, energy, None, fails_in_the_second_pass)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache(torch.randn(8, 8))
    assert clip.image.weight.grad is before
    assert torch.equal(before, torch.ones(6, 8))
    assert clip.image.bias.grad is None
    with torch.no_grad():
        assert not GradCache([clip.encode_image], 4, energy)(torch.randn(8, 8)).requires_grad


def test_an_argument_that_is_no_model_is_named() -> None:
    for models, error in (([3], "int among models"), ([nn.Linear], "type among models"), (Clip().encode_text, "list")):
        with pytest.raises(TypeError, match=error):
            GradCache(models, 2, SimpleContrastiveLoss())  # type: ignore[arg-type]


def test_integer_types_of_another_library_are_accepted_as_sizes() -> None:
    x = torch.randn(6, 8)
    for sizes in ([np.int64(3)], np.int32(2), np.array([4]), (torch.tensor(3),)):
        model = nn.Linear(8, 4)
        assert GradCache([model], sizes, lambda r: r.square().sum())(x) > 0  # type: ignore[arg-type]
    for wrong in ([2.0], [True], ["3"], [0], [np.float32(2)]):
        with pytest.raises(ValueError, match="at least 1 row"):
            GradCache([nn.Linear(8, 4)], wrong, lambda r: r.sum())  # type: ignore[arg-type]


class Fields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Output:
        return Output(hidden=x * 2, pooled=self.pooler(x), absent=None)


@pytest.mark.parametrize("ignored", ["hidden", "pooled"])
@pytest.mark.parametrize("way", ["step", "encode", "shards", "shards together", "wrapped"])
def test_an_output_with_a_field_that_the_loss_ignores(way: str, ignored: str) -> None:
    """It has no gradient, which is not that it is absent."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(8, 6), Fields())
    model: Any = copy.deepcopy(bare)
    used = {"hidden": "pooled", "pooled": "hidden"}[ignored]
    choose: Callable[[Any], Tensor] = lambda output: output[used]  # noqa: E731
    if way.startswith("shards") or way == "wrapped":
        memory = MemoryPolicy.fixed(activation_bytes="1MiB", join_chunks=True) if way == "shards together" else None
        model = offloaded(model, memory=memory)
    towers = [Calls(lambda self, x: choose(self.members[0](x)), model) if way == "wrapped" else model] * 2
    x, y = torch.randn(2, 6, 8)
    SimpleContrastiveLoss()(choose(bare(x)), choose(bare(y))).backward()

    def loss(*reps: Any) -> Tensor:
        return SimpleContrastiveLoss()(*(reps if way == "wrapped" else map(choose, reps)))

    for _ in range(2 if way == "shards together" else 1):  # once their memory is known
        model.zero_grad()
        WAYS["encode" if way == "encode" else "step"](towers, 2, loss, x, y)
    assert_same_gradients([bare], [model])


def test_a_cached_method_of_a_plain_object_counts_buffers_once() -> None:
    """The object is no module; the modules that it holds were not seen, and BatchNorm counted both passes."""

    class Trainer:
        def __init__(self) -> None:
            self.parts = {"model": nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))}

        @cached
        def encode(self, x: Tensor) -> Tensor:
            return self.parts["model"](x)

    trainer = Trainer()
    leaf, again = trainer.encode(torch.randn(4, 8))
    leaf.square().sum().backward()
    again(leaf)
    assert trainer.parts["model"][1].num_batches_tracked == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("given", ["plain", "inference"])
def test_inference_mode_returns_the_loss_as_no_grad_does(streamed: bool, given: str) -> None:
    x, y = torch.randn(2, 8, 8)
    losses, nets = [], []
    for mode in (torch.no_grad(), torch.inference_mode()):
        torch.manual_seed(0)
        net = nn.Sequential(InPlace(), nn.Linear(8, 8), nn.BatchNorm1d(8), InPlace(), nn.Dropout(0.2), nn.Linear(8, 4))
        tower = offloaded(net) if streamed else net
        cache = GradCache([tower, tower], 3, SimpleContrastiveLoss(), process_fn=None if streamed else lambda x: x * 1)
        torch.manual_seed(1)
        with mode:
            inputs = (x.clone(), y.clone()) if given == "inference" else (x, y)
            loss = cache(*inputs)
            reps = cache.encode(*inputs)
            assert torch.equal(inputs[0], x)
        assert not loss.requires_grad
        assert not any(rep.requires_grad for rep in reps)
        torch.manual_seed(2)
        cache(x, y)  # and a step after it trains
        losses.append(loss.item())
        nets.append(tower)
    assert losses[0] == losses[1]
    assert_same_gradients([nets[0]], [nets[1]])
    for a, b in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        assert torch.equal(a, b)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)
