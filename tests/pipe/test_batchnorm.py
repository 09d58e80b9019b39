"""DeferredBatchNorm over micro-batches keeps the running statistics of BatchNorm over the mini-batch."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipe import Pipe
from pipe.batchnorm import DeferredBatchNorm

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def assert_same_statistics(a: Any, b: Any, **tolerance: Any) -> None:
    for name in STATISTICS:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), **tolerance)


@settings(max_examples=50)
@given(
    cuts=st.sets(st.integers(1, 8)),
    shape=st.sampled_from([(), (3,), (2, 2), (2, 1, 2)]),
    momentum=st.sampled_from([0.1, 1.0, None]),
    offset=st.sampled_from([0.0, 1e3]),
    batches=st.integers(1, 3),
)
def test_statistics_are_of_the_mini_batch(cuts: Any, shape: Any, momentum: Any, offset: Any, batches: Any) -> None:
    # Rows in pairs: a micro-batch of one row and no further dimension has no variance.
    edges = [0, *(2 * cut for cut in sorted(cuts)), 18]
    norm = nn.BatchNorm1d(2, momentum=momentum).double()
    norm._check_input_dim = lambda input: None
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(norm), len(edges) - 1)
    assert isinstance(deferred, DeferredBatchNorm)
    torch.manual_seed(0)
    for _ in range(batches):
        x = torch.randn(18, 2, *shape, dtype=torch.float64) + offset
        norm(x)
        for a, b in pairwise(edges):
            deferred(x[a:b])
        assert_same_statistics(deferred, norm)
    deferred.eval(), norm.eval()
    torch.testing.assert_close(deferred(x), norm(x))
    assert_same_statistics(deferred, norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_defect_pipe_11_a_large_mean_does_not_cancel_the_variance_and_bfloat16_counts_in_float(dtype: Any) -> None:
    deferred = DeferredBatchNorm(1, momentum=1.0, chunks=4)
    torch.manual_seed(0)
    x = (0.1 * torch.randn(4096, 1) + (1000.0 if dtype is torch.float32 else 3.0)).to(dtype)
    for part in x.chunk(4):
        deferred(part)
    torch.testing.assert_close(deferred.running_mean, x.double().mean(0).float())
    torch.testing.assert_close(deferred.running_var, x.double().var(0).float(), rtol=1e-3, atol=0)


def test_statistics_are_those_of_the_previous_mini_batch_until_the_last_micro_batch() -> None:
    deferred = DeferredBatchNorm(2, chunks=2)
    deferred(torch.randn(4, 2))
    assert deferred.num_batches_tracked == 0
    assert torch.equal(deferred.running_mean, torch.zeros(2))
    deferred(torch.randn(4, 2))
    assert deferred.num_batches_tracked == 1


@pytest.mark.parametrize("mode", ["always", "except_last", "never", "evaluation"])
def test_defect_pipe_11_in_a_pipe_a_short_batch_is_a_mini_batch_and_recomputation_counts_nothing(mode: Any) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.BatchNorm1d(2), nn.Tanh(), nn.Sequential(nn.BatchNorm1d(2)))
    checkpoint = "always" if mode == "evaluation" else mode
    pipe = Pipe(copy.deepcopy(bare), [1, 2], chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    if mode == "evaluation":  # a layer in training inside a pipe in evaluation counts as well
        pipe.eval()
        pipe[0].train()
    # 4 rows are 4 micro-batches of one row: with a further dimension these have a variance.
    batches = [torch.randn(rows, 2, 3) for rows in (8, 4, 3, 8, 7)]
    for x in batches:
        pipe(x).sum().backward()
        bare[0](x)
        assert_same_statistics(pipe[0], bare[0])
    pipe.train_step(x, x, nn.MSELoss())
    bare[0](x)
    assert_same_statistics(pipe[0], bare[0])
    if mode != "evaluation":
        assert pipe[2][0].num_batches_tracked == 6


def test_defect_pipe_11_an_exception_leaves_nothing_for_the_next_mini_batch() -> None:
    fails = nn.Identity()
    norm = nn.BatchNorm1d(2)
    bare = copy.deepcopy(norm)
    pipe = Pipe(nn.Sequential(norm, fails), [1, 1], chunks=3, deferred_batch_norm=True)
    x = torch.randn(6, 2)
    fails.forward = lambda x: (_ for _ in ()).throw(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        pipe(x)
    fails.forward = lambda x: x
    pipe(x)
    bare(x)
    assert_same_statistics(pipe[0], bare)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Any) -> Any:
        return self.norm(x) + self.norm(10 + 3 * x)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["always", "never", "1f1b", "fill_drain"])
def test_each_call_of_a_layer_that_runs_twice_is_one_over_the_mini_batch(mode: str, chunks: int) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(2, 2), _Twice())
    checkpoint = mode if mode in ("always", "never") else "except_last"
    pipe = Pipe(copy.deepcopy(bare), [1, 1], ["cpu"] * 2, chunks, checkpoint, deferred_batch_norm=True)
    for _ in range(2):
        x = torch.randn(12, 2)
        bare(x)
        if mode in ("1f1b", "fill_drain"):
            pipe.train_step(x, x, nn.MSELoss(), schedule=mode)
        else:
            pipe(x).sum().backward()
        assert_same_statistics(pipe[1].norm, bare[1].norm)


def test_conversion_shares_parameters_and_leaves_the_given_module_alone() -> None:
    bare = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()), nn.BatchNorm1d(2, affine=False))
    bare[1][0].weight.requires_grad_(False)
    bare[1].eval()
    converted = DeferredBatchNorm.convert_deferred_batch_norm(bare, 4)
    assert type(bare[1][0]) is nn.BatchNorm1d
    assert type(converted[1][0]) is DeferredBatchNorm
    assert converted[1][0].chunks == 4
    assert converted[1][0].weight is bare[1][0].weight
    assert converted[1][0].running_mean is bare[1][0].running_mean
    assert not converted[1][0].training
    assert converted[2].weight is None
    assert converted[0] is bare[0]
    assert list(converted.state_dict()) == list(bare.state_dict())


def test_what_has_no_running_statistics_or_is_converted_stays() -> None:
    plain = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2))
    assert DeferredBatchNorm.convert_deferred_batch_norm(plain, 2) is plain
    deferred = DeferredBatchNorm(2, chunks=2)
    assert DeferredBatchNorm.convert_deferred_batch_norm(deferred, 2) is deferred


def test_converted_again_for_another_number_of_micro_batches_it_counts_those() -> None:
    norm = nn.BatchNorm1d(2)
    of_four = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(nn.Sequential(norm)), 4)
    of_eight = DeferredBatchNorm.convert_deferred_batch_norm(of_four, 8)
    assert of_eight is not of_four
    assert of_eight[0].weight is of_four[0].weight
    assert (of_four[0].chunks, of_eight[0].chunks) == (4, 8)
    x = torch.randn(16, 2) * 3 + 5
    norm(x)
    for part in x.chunk(8):
        of_eight(part)
    assert_same_statistics(of_eight[0], norm)


class _Activated(nn.BatchNorm1d):
    def forward(self, input: Any) -> Any:
        return super().forward(input).relu()


def test_a_batch_norm_keeps_its_hooks_and_one_with_a_forward_of_its_own_is_refused() -> None:
    norm, x = nn.BatchNorm1d(2), torch.randn(8, 2)
    norm.register_forward_hook(lambda module, args, output: output * 2)
    norm.register_forward_pre_hook(lambda module, args: args[0] + 1)
    plain = nn.Sequential(nn.Linear(2, 2), norm)
    pipe = Pipe(copy.deepcopy(plain), [1, 1], chunks=1, deferred_batch_norm=True)
    torch.testing.assert_close(pipe(x), plain(x))
    torch.testing.assert_close(pipe.eval()(x), plain.eval()(x))
    patched = nn.BatchNorm1d(2)
    patched.forward = _Activated.forward.__get__(patched)  # type: ignore[method-assign]
    for each in (_Activated(2), nn.SyncBatchNorm(2), patched):
        with pytest.raises(ValueError, match=f"got a {type(each).__name__} with one of its own"):
            Pipe(nn.Sequential(nn.Linear(2, 2), nn.Sequential(each)), [1, 1], chunks=1, deferred_batch_norm=True)
    kept = nn.Sequential(_Activated(2, track_running_stats=False))
    assert DeferredBatchNorm.convert_deferred_batch_norm(kept, 2) is kept


def test_an_input_without_channels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 2 dimensions.*\(3,\)"):
        DeferredBatchNorm(3)(torch.ones(3))
