"""The step is the whole batch's step: same loss, gradients, buffers and generator state, for every way to cut it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradcache import GradCache
from gradcache.loss import ContrastiveLossWithQueryClosure, SimpleContrastiveLoss


def tower(width: int = 8, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 6))


def whole_batch(models: list[nn.Module], inputs: list[Tensor], loss_fn: Callable[..., Tensor]) -> Tensor:
    loss = loss_fn(*(model(x) for model, x in zip(models, inputs, strict=True)))
    loss.backward()
    return loss.detach()


@settings(max_examples=25)
@given(
    rows=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 10), min_size=2, max_size=2),
    negatives=st.integers(0, 2),
    tied=st.booleans(),
    stream=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_step_equals_the_whole_batch(
    streamed: Any,
    assert_same_gradients: Any,
    rows: int,
    sizes: list[int],
    negatives: int,
    tied: bool,
    stream: bool,
    reduction: str,
) -> None:
    bare = [tower(seed=1)] * 2 if tied else [tower(seed=1), tower(seed=2)]
    ours: list[nn.Module] = copy.deepcopy(bare)
    torch.manual_seed(3)
    x, y = torch.randn(rows, 8), torch.randn(rows * (1 + negatives), 8)
    loss_fn = SimpleContrastiveLoss(negatives)
    if stream:
        wrapped = {id(model): streamed(model) for model in ours}
        ours_called = [wrapped[id(model)] for model in ours]
    else:
        ours_called = ours
    expected = whole_batch(bare, [x, y], lambda a, b: loss_fn(a, b, reduction=reduction))
    loss = GradCache(ours_called, sizes, loss_fn)(x, y, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    assert not loss.requires_grad
    assert_same_gradients(bare, ours)


def test_a_step_leaves_the_generator_in_the_state_of_the_whole_batch_in_the_same_chunks() -> None:
    model = tower(dropout=0.3)
    x = torch.randn(6, 8)
    torch.manual_seed(5)
    with torch.no_grad():
        for part in x.split(2):
            model(part)
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    GradCache([model], 2, lambda r: r.square().sum())(x)
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("entry", ["cache_step", "encode"])
def test_a_step_that_is_interrupted_at_the_end_of_a_context_leaves_grad_mode_on(
    monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    step = GradCache([tower()], 2, lambda a: a.sum())
    monkeypatch.setattr(torch.set_grad_enabled, "__exit__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        getattr(step, entry)(torch.randn(4, 8))
    assert torch.is_grad_enabled()


def test_subclass_hooks_of_the_peer_take_part_in_a_step(assert_same_gradients: Any) -> None:
    """A subclass written for the peer: its own two passes with its own random states, through the same signatures."""
    called: list[str] = []

    class Own(GradCache):
        def forward_no_grad(self, model: nn.Module, model_inputs: Any) -> Any:
            called.append("forward_no_grad")
            from gradcache import RandContext

            reps, states = [], []
            with torch.no_grad():
                for x in model_inputs:
                    states.append(RandContext(*self.get_input_tensors(x)))
                    reps.append(self.get_reps(self.model_call(model, x)))
            return torch.cat(reps), states

        def build_cache(self, *reps: Tensor, **loss_kwargs: Any) -> Any:
            called.append("build_cache")
            return super().build_cache(*reps, **loss_kwargs)

        def forward_backward(
            self,
            model: Any,
            model_inputs: Any,
            cached_gradients: Any,
            random_states: Any,
            no_sync_except_last: Any = False,
        ) -> None:
            called.append("forward_backward")
            for x, state, gradient in zip(model_inputs, random_states, cached_gradients, strict=True):
                with state:
                    y = self.model_call(model, x)
                torch.dot(self.get_reps(y).flatten(), gradient.flatten()).backward()

    bare, ours = tower(), tower()
    x = torch.randn(5, 8)
    whole_batch([bare], [x], lambda r: r.square().sum())
    Own([ours], 2, lambda r: r.square().sum())(x)
    assert called == ["forward_no_grad", "build_cache", "forward_backward"]
    assert_same_gradients([bare], [ours])


def test_models_can_be_reassigned_between_steps(assert_same_gradients: Any) -> None:
    step = GradCache([tower()], 2, lambda *reps: sum(r.square().sum() for r in reps))
    x = torch.randn(4, 8)
    step(x)
    bare, ours = [tower(seed=1), tower(seed=2)], [tower(seed=1), tower(seed=2)]
    whole_batch(bare, [x, x], step.loss_fn)
    step.models = ours
    step(x, x)
    assert_same_gradients(bare, ours)


def test_query_closure_may_stand_for_one_tower(assert_same_gradients: Any) -> None:
    bare, ours = [tower(seed=1), tower(seed=2)], [tower(seed=1), tower(seed=2)]
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    whole_batch(bare, [x, y], SimpleContrastiveLoss())
    step = GradCache([ours[1]], 2, ContrastiveLossWithQueryClosure())
    step(y, query_closure=lambda: ours[0](x))
    assert_same_gradients(bare, ours)


def test_step_result_keeps_representations_and_what_the_loss_returned_besides() -> None:
    model = tower()
    x = torch.randn(4, 8)
    step = GradCache([model], 3, lambda r: (r.sum(), r.mean(), {"rows": r.size(0)}))
    loss = step(x)
    result = step.step_result
    assert result is not None
    assert result.loss is loss
    torch.testing.assert_close(result.representations[0], model(x).detach())
    assert not result.auxiliary[0].requires_grad
    assert result.auxiliary[1] == {"rows": 4}


class Queue(nn.Module):
    """Adds the mean of a large buffer, and puts rows into it in every other forward."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.writes, self.calls = nn.Linear(8, 6), writes, 0
        self.register_buffer("queue", torch.randn(4096, 6))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) + self.queue[:64].mean(0)
        with torch.no_grad():
            if self.writes and x.sum() > 0:
                self.queue[: len(out)] = out
        return out * self.queue[1]


class LargeCopies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default and args[0].numel() == 4096 * 6
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("writes", [False, True])
def test_a_large_buffer_is_copied_only_where_a_chunk_writes_it(writes: bool) -> None:
    """Each chunk's second pass meets what its first one met; what is only read costs no memory."""
    bare, model = Queue(writes), Queue(writes)
    x = torch.randn(12, 8)
    x[:3], x[3:6], x[6:9] = x[:3].abs(), -x[3:6].abs(), x[6:9].abs()  # written by the first, read by the second
    plain = [bare(chunk) for chunk in x.split(3)]  # a graph saves what it read: writes would be refused
    weights = torch.randn(12, 6)
    cache = GradCache([nn.Sequential(model)], 3, lambda r: (r * weights).sum())
    with LargeCopies() as copies:
        loss = cache(x)
    torch.testing.assert_close(loss, (torch.cat(plain) * weights).sum().detach())
    assert torch.equal(model.queue, bare.queue)
    if writes:
        # d(out)/d(weight) = queue[1], as the chunk itself left it.
        twin = Queue(True)
        gradient = torch.zeros(6, 8)
        for chunk, weight in zip(x.split(3), weights.split(3), strict=True):
            twin(chunk)
            gradient += (weight * twin.queue[1]).T @ chunk
        torch.testing.assert_close(model.linear.weight.grad, gradient)
    else:
        assert copies.count == 1  # in its first forward, which shows that it is only read
