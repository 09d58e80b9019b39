"""What is wrong in the train pipelines we come from (torchrec 0.3.2, its accumulating variants), one test each."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn

from pipe import Pipe
from pipe.train import TrainPipelineBase, TrainPipelineSparseDist
from pipe.train.batch import pageable_bytes

BOTH = pytest.mark.parametrize("make", [TrainPipelineBase, TrainPipelineSparseDist])


class Counting(nn.Module):
    """Its gradient names the batches that it is made of: batch k adds 10**k."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.ran = []

    def forward(self, batch: Any) -> Any:
        self.ran.append(int(batch))
        return self.weight * 10.0 ** int(batch), batch


class Recording(torch.optim.SGD):
    """Notes the gradient of each step."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), lr=1.0)
        self.seen = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append(next(p.grad.item() for group in self.param_groups for p in group["params"]))
        return super().step(closure)


def numbers(count: Any) -> Any:
    return [torch.tensor(k) for k in range(count)]


# 1 ------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("grad_accum", [1, 2, 3, 4, 5])
def test_every_step_holds_the_gradients_of_all_the_batches_of_its_window(lab: Any, make: Any, grad_accum: Any) -> None:
    model = Counting()
    optimizer = Recording(model)
    pipeline = make(model, optimizer, "cpu", grad_accum=grad_accum)
    lab.run(pipeline, iter(numbers(11)))
    lab.run(pipeline, iter(numbers(2)))  # the last window of a loader is stepped in its epoch, with its own mean
    windows = [range(n)[k : k + grad_accum] for n in (11, 2) for k in range(0, n, grad_accum)]
    expected = [sum(10.0**k for k in window) / len(window) for window in windows]
    assert optimizer.seen == pytest.approx(expected, rel=1e-12)


@BOTH
@pytest.mark.parametrize("grad_accum", [None, 3])
def test_gradients_from_before_the_first_window_do_not_leak_in(lab: Any, make: Any, grad_accum: Any) -> None:
    model = Counting()
    model.weight.grad = torch.tensor(0.5, dtype=torch.float64)
    optimizer = Recording(model)
    lab.run(make(model, optimizer, "cpu", grad_accum=grad_accum), iter(numbers(1)))
    assert optimizer.seen == [1.0]


# 2 ------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_batches_in_flight_of_an_iterator_that_was_left_early_run_before_those_of_the_next(
    lab: Any, make: Any, count: Any
) -> None:
    model = Counting()
    pipeline = make(model, Recording(model), "cpu")
    first = iter(numbers(count))
    pipeline.progress(first)
    lab.run(pipeline, iter(numbers(2)))
    in_flight = list(range(min(count, 3)))
    assert model.ran == [*in_flight, 0, 1]
    assert [int(batch) for batch in first] == list(range(count))[3:]


@BOTH
def test_a_loader_that_has_ended_is_not_touched_again_before_the_caller_knows(make: Any) -> None:
    class Rewinding:
        """Starts again after its end, as some endless loaders do: what is read too far belongs to the next epoch."""

        def __init__(self) -> None:
            self.reads = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self.reads += 1
            if self.reads % 3 == 0:
                raise StopIteration
            return torch.tensor(self.reads % 3)

    model, loader = Counting(), Rewinding()
    pipeline = make(model, Recording(model), "cpu", ahead={"load": 4})
    for epoch in range(3):
        assert [int(pipeline.progress(loader)) for _ in range(2)] == [1, 2]
        with pytest.raises(StopIteration):
            pipeline.progress(loader)
        assert loader.reads == 3 * (epoch + 1)


@BOTH
def test_a_loader_exception_is_raised_after_earlier_batches_and_the_loader_may_continue(lab: Any, make: Any) -> None:
    class Loader:
        """Fails at its third batch, and can go on."""

        def __init__(self) -> None:
            self.calls = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self.calls += 1
            if self.calls == 3:
                raise OSError("unreadable file")
            if self.calls == 6:
                raise StopIteration
            return torch.tensor(self.calls)

    model, loader = Counting(), Loader()
    pipeline = make(model, Recording(model), "cpu")
    assert [int(pipeline.progress(loader)) for _ in range(2)] == [1, 2]
    with pytest.raises(OSError, match="unreadable file"):
        pipeline.progress(loader)
    assert loader.calls == 3, "the loader was touched again before its failure was raised"
    assert [int(output) for output in lab.run(pipeline, loader)] == [4, 5]
    assert model.ran == [1, 2, 4, 5]


# 3 ------------------------------------------------------------------------------------------------------------


@BOTH
def test_a_partial_window_of_sparse_gradients_is_scaled_too(lab: Any, make: Any) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.bag = nn.EmbeddingBag(7, 3, mode="sum", sparse=True)

        def forward(self, batch: Any) -> Any:
            output = self.bag(batch)
            return output.pow(2).sum(), output

    reference, model = Bag(), Bag()
    batches = [torch.randint(7, (4, 2), generator=torch.Generator().manual_seed(k)) for k in range(5)]
    lab.plain_loop(reference, [batches], 3, torch.optim.SGD(reference.parameters(), 0.1))
    lab.run(make(model, torch.optim.SGD(model.parameters(), 0.1), "cpu", grad_accum=3), iter(batches))
    lab.assert_same(model, reference)


# 4 ------------------------------------------------------------------------------------------------------------


@BOTH
def test_waiting_for_a_loader_that_fails_does_not_destroy_the_accumulated_gradient(lab: Any, make: Any) -> None:
    def loader() -> Any:
        yield from numbers(2)
        raise OSError("connection lost")

    model = Counting()
    optimizer = Recording(model)
    pipeline = make(model, optimizer, "cpu", grad_accum=3)
    batches = loader()
    pipeline.progress(batches)
    pipeline.progress(batches)
    with pytest.raises(OSError, match="connection lost"):
        pipeline.progress(batches)
    assert model.weight.grad.item() == pytest.approx(11 / 3)
    lab.run(pipeline, iter([torch.tensor(2)]))
    assert optimizer.seen == pytest.approx([111 / 3])


# 5 ------------------------------------------------------------------------------------------------------------


class Replica(nn.Module):
    """Notes, for each forward and backward, whether replicas would communicate."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.silent = False
        self.log = []

    @contextlib.contextmanager
    def no_sync(self) -> Any:
        self.silent = True
        yield
        self.silent = False

    def forward(self, batch: Any) -> Any:
        losses, output = self.module(batch)
        self.log.append(("forward", int(batch), self.silent))
        losses.register_hook(lambda grad: self.log.append(("backward", int(batch), self.silent)))
        return losses, output


@BOTH
def test_replicas_communicate_once_per_window_the_partial_one_included(lab: Any, make: Any) -> None:
    model = Replica(Counting())
    lab.run(make(model, Recording(model), "cpu", grad_accum=3), iter(numbers(5)))
    closing = {2, 4}
    assert model.log == [(phase, k, k not in closing) for k in range(5) for phase in ("forward", "backward")]


@pytest.mark.parametrize("size", [1, 2])
def test_hooks_that_step_inside_backward_are_refused_where_they_would_step_on_a_part(size: Any) -> None:
    model = Counting()
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    context = pytest.raises(ValueError, match=r"'weight' \(register_post_accumulate_grad_hook\)")
    with context if size > 1 else contextlib.nullcontext():
        TrainPipelineBase(model, Recording(model), "cpu", grad_accum=size)


def test_fused_optimizers_are_refused_under_accumulation_and_under_gradient_scaling() -> None:
    class Fused(Counting):
        class fused_optimizer:
            params = {"table": None}  # noqa: RUF012

    model = Fused()
    with pytest.raises(ValueError, match=r"accumulates 2 batches.*fused optimizer"):
        TrainPipelineSparseDist(model, Recording(model), "cpu", grad_accum=2)
    with pytest.raises(ValueError, match=r"scales its loss.*fused optimizer"):
        TrainPipelineSparseDist(model, Recording(model), "cpu", enable_amp=True, amp_dtype=torch.float16)
    TrainPipelineSparseDist(model, Recording(model), "cpu", enable_amp=True)


def test_an_optimizer_that_says_that_it_updates_inside_backward_is_refused_under_accumulation() -> None:
    model = Counting()
    optimizer = Recording(model)
    optimizer.update_in_backward = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"Recording\(update_in_backward=True\)"):
        TrainPipelineBase(model, optimizer, "cpu", grad_accum=2)
    TrainPipelineBase(model, optimizer, "cpu")


@pytest.mark.parametrize("options", [{"grad_accum": 2}, {"amp_dtype": torch.float16}])
def test_a_hook_added_after_construction_is_refused_before_the_next_batch_runs(lab: Any, options: Any) -> None:
    model = Counting()
    pipeline = TrainPipelineBase(model, Recording(model), "cpu", **options)
    batches = iter(numbers(6))
    pipeline.progress(batches)
    before = model.weight.item()
    handle = model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match=r"'weight' \(register_post_accumulate_grad_hook\)"):
        pipeline.progress(batches)
    assert (model.ran, model.weight.item()) == ([0], before)
    handle.remove()
    assert [int(output) for output in lab.run(pipeline, batches)] == [2, 3, 4, 5]


def test_hooks_with_which_replicas_reduce_gradients_are_no_optimizers(lab: Any) -> None:
    def reduce(parameter: Any, more: Any = None) -> None:
        """As those of FullyShardedDataParallel."""

    reduce.__module__ = "torch.distributed.fsdp._runtime_utils"
    model = Counting()
    model.weight.register_post_accumulate_grad_hook(functools.partial(reduce, more=3))
    optimizer = Recording(model)
    lab.run(TrainPipelineBase(model, optimizer, "cpu", grad_accum=2), iter(numbers(2)))
    assert optimizer.seen == [(1 + 10) / 2]


class InBackward(torch.optim.SGD):
    update_in_backward = True

    @contextlib.contextmanager
    def accumulate(self) -> Any:
        yield


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_updates_inside_backward_are_refused_for_a_pipe_of_several_micro_batches(
    chunks: Any, where: Any, checkpoint: Any
) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"], chunks=chunks, checkpoint=checkpoint)
    model = nn.ModuleDict({"pipe": pipe, "head": nn.Linear(2, 2)})
    part = model["pipe" if where == "inside" else "head"]
    refused = pytest.raises(ValueError, match=r"runs micro-batches inside each backward \(Pipe\(chunks=2\)\)")
    with refused if chunks > 1 and where == "inside" else contextlib.nullcontext():
        TrainPipelineBase(model, InBackward(part.parameters(), 0.1), "cpu")
    next(part.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with refused if chunks > 1 and where == "inside" and checkpoint == "always" else contextlib.nullcontext():
        TrainPipelineBase(model, optimizer, "cpu")


def test_an_optimizer_that_can_be_told_to_wait_is_deferred_to_the_backward_that_closes(lab: Any) -> None:
    class Deferrable(Recording):
        """Steps inside backward, save under ``accumulate``."""

        update_in_backward = True
        waiting = False

        def __init__(self, model: Any) -> None:
            super().__init__(model)
            model.weight.register_hook(lambda grad: waits.append(self.waiting))

        @contextlib.contextmanager
        def accumulate(self) -> Any:
            self.waiting = True
            yield
            self.waiting = False

    waits = []
    model = Counting()
    lab.run(TrainPipelineBase(model, Deferrable(model), "cpu", grad_accum=3), iter(numbers(5)))
    assert waits == [True, True, False, True, False]
    with pytest.raises(ValueError, match="scales its loss"):
        TrainPipelineBase(model, Deferrable(model), "cpu", amp_dtype=torch.float16)


# 6 ------------------------------------------------------------------------------------------------------------


def test_gradients_are_scaled_for_fp16_and_never_for_bf16(lab: Any) -> None:
    model = lab.model()

    def scaled(**options: Any) -> bool:
        return TrainPipelineSparseDist(model, lab.optimizer(model), "cpu", **options)._window.scaler.is_enabled()

    assert not scaled()
    assert not scaled(enable_amp=True)
    assert not scaled(enable_amp=False, amp_dtype=torch.float16)
    assert not scaled(enable_amp=True, enable_grad_scaling=False, amp_dtype=torch.float16)
    assert scaled(enable_amp=True, amp_dtype=torch.float16)


# (the state of scaler, window and batches in flight: test_state.py)

# 7 ------------------------------------------------------------------------------------------------------------


def test_feature_processors_of_a_distributed_module_are_applied(lab: Any) -> None:
    class Processed(lab.FakeSparse):
        def __init__(self) -> None:
            super().__init__()
            self.processor = nn.Linear(3, 3)

        def compute_and_output_dist(self, ctx: Any, dist_input: Any) -> Any:
            features, twice = dist_input
            return super().compute_and_output_dist(ctx, (features, self.processor(twice)))

    reference = lab.sparse_model()
    reference.inner["sparse"] = Processed()
    model = copy.deepcopy(reference)
    torch.manual_seed(2)
    lab.plain_loop(reference, [lab.batches(6)])
    torch.manual_seed(2)
    lab.run(TrainPipelineSparseDist(model, lab.optimizer(model), "cpu"), iter(lab.batches(6)))
    lab.assert_same(model, reference)
    assert [event for event, _ in model.inner["sparse"].log].count("forward") == 1


# 8 ------------------------------------------------------------------------------------------------------------
# (kinds of batches and shapes of losses: test_transparency.py; streams of the pipeline's device: test_lane.py)


def test_batches_that_cannot_overlap_because_they_are_pageable_are_reported(lab: Any) -> None:
    class OnMeta(nn.Module):
        """A copy to the meta device is a copy from pageable memory like any other, and needs no accelerator."""

        def forward(self, batch: Any) -> Any:
            assert batch["x"].device.type == "meta"
            return torch.zeros(1, requires_grad=True), None

    batch = {"x": torch.zeros(4, 3), "more": [torch.zeros(2, dtype=torch.float64)]}
    assert pageable_bytes(batch, torch.device("cpu")) == 0
    parameters = [nn.Parameter(torch.zeros(1))]
    pipeline = TrainPipelineBase(OnMeta(), torch.optim.SGD(parameters), "meta")
    with pytest.warns(UserWarning, match="64 bytes of pageable memory"):
        lab.run(pipeline, iter([batch] * 3))
    assert pipeline.statistics().pageable_bytes == 3 * 64


# 9 ------------------------------------------------------------------------------------------------------------


def test_an_iterator_is_known_by_itself_and_not_by_an_id_that_is_used_again(lab: Any) -> None:
    model = Counting()
    pipeline = TrainPipelineBase(model, Recording(model), "cpu")
    for _ in range(50):  # each list iterator is garbage before the next is made, most likely at the same address
        lab.run(pipeline, iter(numbers(2)))
        gc.collect(0)
    assert model.ran == [0, 1] * 50


def test_detach_gives_the_model_back_and_nothing_of_the_pipeline_stays_in_it(lab: Any) -> None:
    model = lab.sparse_model()
    untouched = {name: set(vars(module)) for name, module in model.named_modules()}
    pipeline = TrainPipelineSparseDist(model, lab.optimizer(model), "cpu")
    batches = iter(lab.batches(6))
    for _ in range(3):
        pipeline.progress(batches)
        assert {name: set(vars(module)) for name, module in model.named_modules()} == untouched
    assert pipeline.detach() is model
    copy.deepcopy(model)(lab.batches(1)[0])
    assert len(lab.run(pipeline, batches)) == 3


def test_the_model_is_left_clean_by_a_forward_that_fails(lab: Any) -> None:
    model = lab.sparse_model()
    batches = lab.batches(5)
    del batches[2]["y"]
    pipeline = TrainPipelineSparseDist(model, lab.optimizer(model), "cpu")
    iterator = iter(batches)
    pipeline.progress(iterator)
    pipeline.progress(iterator)
    with pytest.raises(KeyError, match="y"):
        pipeline.progress(iterator)
    assert "forward" not in vars(model.inner["sparse"])
    assert len(lab.run(pipeline, iterator)) == 2


# 10 -----------------------------------------------------------------------------------------------------------
# (ranks of different lengths: test_ranks.py; several epochs: test_transparency.py)


@BOTH
def test_an_iterator_that_has_ended_ends_again(lab: Any, make: Any) -> None:
    model = Counting()
    pipeline = make(model, Recording(model), "cpu")
    batches = iter(numbers(2))
    assert len(lab.run(pipeline, batches)) == 2
    for _ in range(5):
        with pytest.raises(StopIteration):
            pipeline.progress(batches)
    assert len(lab.run(pipeline, iter(numbers(3)))) == 3
