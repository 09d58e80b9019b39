"""The step is the whole batch's step: same loss, gradients, buffers and generator state, for every way to cut it."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradcache import GradCache, RandContext
from gradcache.loss import ContrastiveLossWithQueryClosure, SimpleContrastiveLoss
from pipe import is_recomputing
from tests.gradcache.towers import DRAWS, LAYERS, TABLES, WAYS, Calls, energy, in_chunks, kind_of, offloaded, tower
from tests.gradients import assert_same_step


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


class Projected(nn.Linear):
    """A loss with parameters."""

    def forward(self, x: Tensor, y: Tensor, **how: Any) -> Tensor:
        return SimpleContrastiveLoss(len(y) // len(x) - 1)(super().forward(x), y, **how)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 10), min_size=2, max_size=2),
    negatives=st.integers(0, 2),
    kind=st.sampled_from(["tied", "two", "one offloaded", "two offloaded", "tied and offloaded"]),
    slices=st.integers(1, 4),
    recompute=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_step_equals_the_whole_batch(
    rows: int, sizes: list[int], negatives: int, kind: str, slices: int, recompute: bool, reduction: str
) -> None:
    bare = [tower(1)] * 2 if "tied" in kind else [tower(1), tower(2)]
    ours = copy.deepcopy(bare)
    streamed = dict.fromkeys(ours[: {"one offloaded": 1}.get(kind, 2)]) if "offloaded" in kind else {}
    for model in streamed:
        offloaded(model, num_slices=slices, checkpoint_activation=recompute)
    x, y = torch.randn(rows, 8), torch.randn(rows * (1 + negatives), 8)
    loss_fn = Projected(6, 6)
    loss_of_ours = copy.deepcopy(loss_fn)
    expected = loss_fn(bare[0](x), bare[1](y), reduction=reduction)
    expected.backward()
    loss = GradCache(ours, sizes, loss_of_ours)(x, y, reduction=reduction)
    torch.testing.assert_close(loss, expected.detach())
    assert not loss.requires_grad
    assert_same_step([*bare, loss_fn], [*ours, loss_of_ours])


@pytest.mark.parametrize("way", [*WAYS, "shards"])
@pytest.mark.parametrize("kind", [*LAYERS, *TABLES])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_tower_of_any_kind_trains_as_all_of_its_chunks_in_one_graph(kind: str, way: str) -> None:
    """What a forward writes is met as it was by the second pass and written once; draws repeat, and go on behind."""
    if way == "shards" and kind in (*DRAWS, "sparse"):
        pytest.skip("draws layer by layer, or is refused")
    bare, x = kind_of(kind)
    ours, given = copy.deepcopy(bare), x.clone()
    if way == "shards":
        offloaded(ours)
    for step in range(2):
        seed()
        expected = in_chunks([bare], 3, energy, x)
        left = states()
        seed()
        loss = WAYS[way if way != "shards" else "step"]([ours], 3, energy, given)
        torch.testing.assert_close(loss, expected, msg=f"step {step}")
        assert states() == left
    assert torch.equal(given, x)
    assert_same_step([bare], [ours])


KINDS = ["tanh", "relu", "its input", "batch norm", "across rows", "frozen", "a function"]


@settings(max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    rows=st.integers(2, 12),
    size=st.integers(2, 5),
    input_gradient=st.booleans(),
    tied=st.booleans(),
    streamed=st.booleans(),
)
def test_a_step_equals_the_loss_of_all_chunks_for_every_combination_of_layers(
    kinds: list[str], rows: int, size: int, input_gradient: bool, tied: bool, streamed: bool
) -> None:
    # Plain torch refuses to write over what the layer before has saved for its backward.
    pairs = itertools.pairwise(kinds)
    assume(not any(before in ("tanh", "relu") and after in ("its input", "relu") for before, after in pairs))
    rows += rows % size == 1  # BatchNorm needs two rows in a chunk
    torch.manual_seed(0)
    own = {"tanh": nn.Tanh, "relu": lambda: nn.ReLU(inplace=True)}
    bare = nn.Sequential(*((LAYERS | own)[kind]() for kind in kinds), nn.Linear(8, 6))
    ours = copy.deepcopy(bare)
    if streamed:
        offloaded(ours)
    x = torch.randn(rows, 8)
    inputs = [x.clone().requires_grad_(input_gradient) for _ in range(2)]
    towers = 1 + tied
    expected = in_chunks([bare] * towers, size, energy, *[inputs[0]] * towers)
    torch.testing.assert_close(GradCache([ours] * towers, size, energy)(*[inputs[1]] * towers), expected)
    assert_same_step([bare], [ours])
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


# --- what changes between steps --------------------------------------------------------------------------------------


def test_models_and_layers_may_be_exchanged_frozen_and_thawed_between_steps() -> None:
    bare, ours, x = tower(), tower(), torch.randn(8, 8)
    step = GradCache([tower(1)], 2, energy)
    step(x)
    step.models = [ours]
    for change in (
        lambda model: model[0].requires_grad_(False),
        lambda model: model[0].requires_grad_(True),
        lambda model: model.__setitem__(1, nn.ReLU()),
    ):
        for model in (bare, ours):
            change(model)
        energy(bare(x)).backward()
        step(x)
    assert_same_step([bare], [ours])


@pytest.mark.parametrize("shards", [False, True])
def test_a_layer_that_counts_its_calls_counts_every_chunk_once(shards: bool) -> None:
    """In Python, as ``is_recomputing`` asks it to."""

    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += not is_recomputing()
            return super().forward(x).tanh()

    layers = nn.Sequential(Counts(8, 8), Counts(8, 8))
    counted = list(layers)
    GradCache([offloaded(layers) if shards else layers], 2, energy)(torch.randn(6, 8))
    assert [layer.calls for layer in counted] == [3, 3]


# --- what subclasses and losses of the peer do -----------------------------------------------------------------------


def test_subclass_hooks_of_the_peer_take_part_in_a_step() -> None:
    """A subclass written for the peer: its own two passes with its own random states, through the same signatures."""
    called: list[str] = []

    class Own(GradCache):
        def forward_no_grad(self, model: nn.Module, model_inputs: Any) -> Any:
            called.append("forward_no_grad")
            reps, random_states = [], []
            with torch.no_grad():
                for x in model_inputs:
                    random_states.append(RandContext(*self.get_input_tensors(x)))
                    reps.append(self.get_reps(self.model_call(model, x)))
            return torch.cat(reps), random_states

        def build_cache(self, *reps: Tensor, **loss_kwargs: Any) -> Any:
            called.append("build_cache")
            return super().build_cache(*reps, **loss_kwargs)

        def forward_backward(
            self, model: Any, inputs: Any, gradients: Any, random_states: Any, no_sync_except_last: Any = False
        ) -> None:
            called.append("forward_backward")
            for x, state, gradient in zip(inputs, random_states, gradients, strict=True):
                with state:
                    y = self.model_call(model, x)
                torch.dot(self.get_reps(y).flatten(), gradient.flatten()).backward()

    bare, ours, x = tower(), tower(), torch.randn(5, 8)
    energy(bare(x)).backward()
    Own([ours], 2, energy)(x)
    assert called == ["forward_no_grad", "build_cache", "forward_backward"]
    assert_same_step([bare], [ours])


def test_query_closure_may_stand_for_one_tower() -> None:
    bare, ours = [tower(1), tower(2)], [tower(1), tower(2)]
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    SimpleContrastiveLoss()(bare[0](x), bare[1](y)).backward()
    step = GradCache([ours[1]], 2, ContrastiveLossWithQueryClosure())
    step(y, query_closure=lambda: ours[0](x))
    assert_same_step(bare, ours)


def test_step_result_keeps_representations_and_what_the_loss_returned_besides() -> None:
    model, x = tower(), torch.randn(4, 8)
    step = GradCache([model], 3, lambda r: (r.sum(), r.mean(), {"rows": r.size(0)}))
    loss = step(x)
    result = step.step_result
    assert result is not None
    assert result.loss is loss
    torch.testing.assert_close(result.representations[0], model(x).detach())
    assert not result.auxiliary[0].requires_grad
    assert result.auxiliary[1] == {"rows": 4}


class LargeCopies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default and args[0].numel() == 4096 * 6
        return func(*args, **(kwargs or {}))


def test_a_large_buffer_that_chunks_only_read_costs_no_memory() -> None:
    """Where chunks write it: "a large buffer" of the layers above."""
    read = Calls(
        lambda self, x: self.members[0](x) + self.queue[:64].mean(0), nn.Linear(8, 6), queue=torch.randn(4096, 6)
    )
    with LargeCopies() as copies:
        GradCache([nn.Sequential(read)], 3, energy)(torch.randn(12, 8))
    assert copies.count == 1  # in its first forward, which shows that it is only read
