"""Checkpoint and Recompute: the same function as without them, in less memory and in the right order."""

import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pipe.checkpoint import Checkpointing, checkpoint, is_checkpointing, is_recomputing
from pipe.dependency import fork, join


class Log(torch.autograd.Function):
    """Records its name when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, log: Any, name: Any, x: Any) -> Any:
        ctx.log, ctx.name = log, name
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.log.append(ctx.name)
        return None, None, gradient


def gradients(function: Any, inputs: Any, loss: Any, *, wrap: Any) -> Any:
    """Output and gradients of inputs, with generators reset before."""
    torch.manual_seed(3)
    random.seed(3)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    output = checkpoint(function, tuple(leaves)) if wrap else function(tuple(leaves))
    loss(output).backward()
    return output, [leaf.grad for leaf in leaves], torch.get_rng_state().tolist(), random.getstate()


def assert_transparent(function: Any, inputs: Any, loss: Any) -> None:
    bare = gradients(function, inputs, loss, wrap=False)
    ours = gradients(function, inputs, loss, wrap=True)
    for a, b in zip(torch.utils._pytree.tree_leaves(bare[0]), torch.utils._pytree.tree_leaves(ours[0]), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
            assert a.requires_grad == b.requires_grad
        else:
            assert a is b or a == b
    torch.testing.assert_close(bare[1], ours[1])  # the order of additions may differ
    assert bare[2:] == ours[2:]


# The outputs a layer may return, each made from (x, y): which of them the loss reaches is drawn.
OUTPUTS = {
    "float": lambda x, y: (x * y).sum(1),
    "dropout": lambda x, y: torch.dropout(x * 2, 0.5, True),
    "python random": lambda x, y: x * random.random(),
    "constant": lambda x, y: torch.ones(3),
    "integer": lambda x, y: (x > 0).sum(1),
    "bool": lambda x, y: y > 0,
    "complex": lambda x, y: torch.complex(x, y).exp(),
    "none": lambda x, y: None,
    "text": lambda x, y: "label",
    "detached": lambda x, y: x.detach() * 2,
    "identity": lambda x, y: x,
    "view": lambda x, y: y.t(),
    "nested": lambda x, y: {"a": [x.exp(), None], "b": (y.sin(), 3)},
}


def loss_over(output: Any, reached: Any) -> Any:
    total = torch.zeros((), dtype=torch.complex128)
    for k, part in enumerate(output):
        if k in reached:
            for leaf in torch.utils._pytree.tree_leaves(part):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    total = total + (leaf * (k + 1)).sum() ** 2
    return total.abs()


@settings(max_examples=60)
@given(
    names=st.lists(st.sampled_from(sorted(OUTPUTS)), min_size=1, max_size=5),
    reached=st.sets(st.integers(0, 4)),
    needs=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_any_outputs_and_any_loss_give_gradients_of_the_bare_function(names: Any, reached: Any, needs: Any) -> None:
    def function(inputs: Any) -> Any:
        x, y = inputs
        return tuple(OUTPUTS[name](x, y) for name in names)

    def loss(output: Any) -> Any:
        return loss_over(output, reached) + (anchor * 1.0).sum()

    anchor = torch.ones(1, requires_grad=True)
    torch.manual_seed(0)
    x, y = (torch.randn(3, 4, dtype=torch.float64).requires_grad_(need) for need in needs)
    assert_transparent(function, (x, y), loss)


def sum_(y: Any) -> Any:
    return y.sum()


def test_without_grad_mode_nothing_is_kept_and_nothing_claims_a_gradient() -> None:
    seen = []
    layer = nn.Linear(3, 3)

    def function(x: Any) -> Any:
        seen.append((is_checkpointing(), is_recomputing(), torch.is_grad_enabled()))
        return layer(x)

    with torch.no_grad():
        assert not checkpoint(function, torch.randn(2, 3)).requires_grad
    with torch.inference_mode():
        checkpoint(function, torch.randn(2, 3))
    assert seen == [(False, False, False)] * 2


def test_an_edge_without_a_loss_recomputes_nothing() -> None:
    runs = []
    a = checkpoint(lambda x: runs.append("a") or x * 2, torch.ones(1, requires_grad=True))
    a, phony = fork(a)
    b = join(checkpoint(lambda x: runs.append("b") or x * 3, torch.ones(1, requires_grad=True)), phony)
    b.sum().backward()
    assert runs == ["a", "b", "b"]


def test_activations_of_the_first_run_are_released_before_it_returns() -> None:
    kept = []

    def function(x: Any) -> Any:
        hidden = x.exp()
        kept.append(weakref.ref(hidden))
        return hidden.sin()

    x = torch.ones(8, requires_grad=True)
    output = checkpoint(function, x)
    assert kept[0]() is None
    output.sum().backward()
    gc.collect()
    assert kept[1]() is None


def test_the_graph_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        x = torch.ones(2, requires_grad=True) * 1
        boundary = weakref.ref(x)
        halves = Checkpointing(lambda x: x * 2, x)
        output = halves.recompute(halves.checkpoint())
        del halves, output, x
        assert boundary() is None
    finally:
        gc.enable()


def test_retained_graphs_recompute_again_and_freed_graphs_say_so() -> None:
    runs = []
    x = torch.ones(2, requires_grad=True)
    y = checkpoint(lambda t: runs.append(1) or torch.dropout(t * t, 0.5, True), x)
    y.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.sum().backward()
    assert torch.equal(first, x.grad)
    assert len(runs) == 3
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_autograd_grad_returns_what_was_asked_for_and_fills_no_gradient() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.ones(1, 2, requires_grad=True)
    for asked in ([x], [layer[0].weight], [x, layer[0].bias]):
        found = torch.autograd.grad(checkpoint(layer, x).sum(), asked)
        assert all(map(torch.equal, found, torch.autograd.grad(layer(x).sum(), asked)))
    assert x.grad is layer[0].weight.grad is None


def test_a_gradient_penalty_is_that_of_the_bare_function() -> None:
    layer, found = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 1)), []
    for run in (layer, lambda x: checkpoint(layer, x)):
        torch.manual_seed(0)
        x = torch.randn(4, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        (gradient.square().sum() + run(x).sum()).backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
    torch.testing.assert_close(*found)


class FailsTheSecondTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(2), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        y = torch.dropout(self.norm(x), 0.5, True)
        if is_recomputing():
            raise ValueError("second run")
        return y


def test_an_exception_in_the_recomputation_reaches_the_caller_and_restores_everything() -> None:
    model = FailsTheSecondTime()
    y = checkpoint(model, torch.randn(4, 2, requires_grad=True))
    before, mean = torch.get_rng_state(), model.norm.running_mean.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="second run"):
            y.sum().backward()
    assert model.calls == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.norm.running_mean, mean)
    assert not is_recomputing()


def test_an_input_changed_in_place_is_an_error_not_another_gradient() -> None:
    pair = torch.ones(2), torch.ones(2, requires_grad=True)
    output = checkpoint(lambda pair: pair[0].add_(1) * pair[1], pair)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("first", [True, False])
def test_a_recomputation_that_saves_something_else_is_an_error(first: bool) -> None:
    def function(x: Any) -> Any:
        return x.exp().sin() if is_recomputing() is first else x.exp()

    y = checkpoint(function, torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"expected the recomputation .* make it deterministic"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_defect_pipe_10_a_nested_torch_checkpoint_reads_recomputing_in_every_run_but_the_first(reentrant: Any) -> None:
    runs = []

    def inner(x: Any) -> Any:
        runs.append(is_recomputing())
        return x.exp()

    x = torch.ones(1, requires_grad=True)
    checkpoint(lambda t: torch_checkpoint(inner, t * 1, use_reentrant=reentrant), x).backward()
    assert runs == [False, True, True]
    assert torch.equal(x.grad, x.detach().exp())


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_torch_checkpoint_the_gradients_are_the_same(reentrant: Any) -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh())

    def outer(x: Any) -> Any:
        return checkpoint(layer, x * 2).sin()

    def run(wrap: Any) -> Any:
        torch.manual_seed(1)
        layer.zero_grad()
        x = torch.ones(2, 3, requires_grad=True)
        (torch_checkpoint(outer, x, use_reentrant=reentrant) if wrap else layer(x * 2).sin()).sum().backward()
        return [x.grad, layer[0].weight.grad.clone()]

    assert all(map(torch.equal, run(True), run(False)))


def test_a_nested_checkpoint_inside_ours_gives_the_same_gradients() -> None:
    inner, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), torch.randn(2, 3, requires_grad=True)
    assert_transparent(lambda t: checkpoint(inner, t[0]).exp(), (x,), sum_)
    assert_transparent(lambda t: checkpoint(lambda u: checkpoint(inner, u).exp(), t[0]), (x,), sum_)


def test_defect_pipe_6_each_input_is_saved_once() -> None:
    packed, unpacked = [], []
    hooks = (lambda t: packed.append(t.shape) or t, lambda t: unpacked.append(t.shape) or t)
    x, mask = torch.ones(3, requires_grad=True), torch.ones(4, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        y = checkpoint(lambda three: three[0] * three[2] + three[1].sum(), (x, mask, x))
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    assert packed == [x.shape, mask.shape]
    assert unpacked == [x.shape, mask.shape]


def test_defect_pipe_5_draws_after_the_step_are_not_repeated() -> None:
    torch.manual_seed(0)
    drop = nn.Dropout(0.5)
    x = torch.ones(64, requires_grad=True)
    outputs = [checkpoint(drop, x) for _ in range(4)]
    after = torch.get_rng_state()
    threads = [threading.Thread(target=lambda y=y: y.sum().backward()) for y in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(x.grad, sum(y.detach() for y in outputs))


@pytest.mark.parametrize("option", ["context_fn", "determinism_check", "debug", "early_stop"])
def test_other_options_of_torch_are_refused_by_name(option: str) -> None:
    with pytest.raises(TypeError, match=f"got {option} of torch.utils.checkpoint"):
        checkpoint(nn.Tanh(), torch.ones(1), **{option: None})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dropout_masks_of_a_cuda_device_are_drawn_again() -> None:
    x = torch.ones(512, device="cuda", requires_grad=True)
    before = torch.cuda.get_rng_state()
    y = checkpoint(nn.Dropout(0.5), x)
    after = torch.cuda.get_rng_state()
    assert not torch.equal(before, after)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(torch.cuda.get_rng_state(), after)
