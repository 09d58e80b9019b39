"""What is wrong in the train pipelines we come from (torchrec 0.3.2, its accumulating variants).

Windows, ends of loaders, failures and kinds of batches: test_transparency.py, test_failures.py and test_resets.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipe import Pipe
from pipe.train import TrainPipelineBase, TrainPipelineSparseDist
from pipe.train.batch import pageable_bytes
from tests.pipe.train.conftest import BOTH, Counting, numbers, pipeline_of


@BOTH
def test_a_partial_window_of_sparse_gradients_is_scaled_too(lab: Any, make: Any) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(7, 3, mode="sum", sparse=True)

        def forward(self, batch: Any) -> Any:
            output = self.bag(batch)
            return output.pow(2).sum(), output.detach()

    batches = [torch.randint(7, (4, 2), generator=torch.Generator().manual_seed(k)) for k in range(5)]
    lab.check_training(make, Bag, lambda: [batches], 3)


# --- replicas ---------------------------------------------------------------------------------------------------------


class Replica(nn.Module):
    """Replicas that communicate in a backward outside ``no_sync``, which is what a pipeline needs to know."""

    no_sync = contextlib.nullcontext

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        return self.module(batch)


def test_a_window_whose_last_batch_is_lost_waits_where_replicas_have_not_communicated(lab: Any) -> None:
    def lost(device: Any, **how: Any) -> None:
        raise OSError("link down")

    model, batches = Replica(Counting()), iter([torch.tensor(0), SimpleNamespace(to=lost)])
    pipeline = pipeline_of(TrainPipelineBase, model, grad_accum=3)
    pipeline.progress(batches)
    for error in (OSError, StopIteration):
        with pytest.raises(error):
            pipeline.progress(batches)
    lab.run(pipeline, numbers(1, 2))
    assert model.module.weight.item() == pytest.approx(-37)


# --- updates inside backward ------------------------------------------------------------------------------------------


class InBackward(torch.optim.SGD):
    """Steps inside backward, save under ``accumulate``."""

    update_in_backward = True
    waiting = False

    @contextlib.contextmanager
    def accumulate(self) -> Any:
        self.waiting = True
        yield
        self.waiting = False


def add_hook(model: Any, optimizer: Any) -> Any:
    return model.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def add_reducing_hook(model: Any, optimizer: Any) -> None:
    def reduce(parameter: Any, more: Any = None) -> None:
        """As those of FullyShardedDataParallel: no optimizer."""

    reduce.__module__ = "torch.distributed.fsdp._runtime_utils"
    model.weight.register_post_accumulate_grad_hook(functools.partial(reduce, more=3))


def add_fused_optimizer(model: Any, optimizer: Any) -> None:
    model.fused_optimizer = type("fused_optimizer", (), {"params": {"table": None}})


def say_so(model: Any, optimizer: Any) -> None:
    optimizer.update_in_backward = True


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (add_hook, r"'weight' \(register_post_accumulate_grad_hook\)"),
        (add_reducing_hook, None),
        (add_fused_optimizer, r"module '' \(fused optimizer\)"),
        (say_so, r"SGD\(update_in_backward=True\)"),
    ],
)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"enable_amp": True}, None),
        ({"grad_accum": 2}, "accumulates 2 batches"),
        ({"enable_amp": True, "amp_dtype": torch.float16}, "scales its loss"),
    ],
)
def test_updates_in_backward_that_step_on_a_part_are_refused(add: Any, message: Any, options: Any, reason: Any) -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    add(model, optimizer)
    refusal = pytest.raises(ValueError, match=f"{reason}.*{message}")
    with refusal if reason and message else contextlib.nullcontext():
        TrainPipelineSparseDist(model, optimizer, "cpu", **options)


@pytest.mark.parametrize("options", [{"grad_accum": 2}, {"amp_dtype": torch.float16}])
def test_a_hook_added_after_construction_is_refused_before_the_next_batch_runs(lab: Any, options: Any) -> None:
    model = Counting()
    pipeline, batches = pipeline_of(TrainPipelineBase, model, **options), numbers(*range(6))
    pipeline.progress(batches)
    before = model.weight.item()
    handle = add_hook(model, None)
    with pytest.raises(ValueError, match=r"'weight' \(register_post_accumulate_grad_hook\)"):
        pipeline.progress(batches)
    assert (model.ran, model.weight.item()) == ([0], before)
    handle.remove()
    assert lab.run(pipeline, batches) == [2, 3, 4, 5]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_updates_in_backward_are_refused_for_a_pipe_of_micro_batches(chunks: Any, where: Any, checkpoint: Any) -> None:
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
    model, waits = Counting(), []
    optimizer = InBackward(model.parameters(), 1.0)
    model.weight.register_hook(lambda grad: waits.append(optimizer.waiting))
    lab.run(TrainPipelineBase(model, optimizer, "cpu", grad_accum=3), numbers(*range(5)))
    assert waits == [True, True, False, True, False]
    with pytest.raises(ValueError, match="scales its loss"):
        TrainPipelineBase(model, optimizer, "cpu", amp_dtype=torch.float16)


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_gradients_are_scaled_for_fp16_and_never_for_bf16(lab: Any) -> None:
    model = lab.model()

    def scaled(**options: Any) -> bool:
        return TrainPipelineSparseDist(model, lab.optimizer(model), "cpu", **options)._window.scaler.is_enabled()

    assert not scaled()
    assert not scaled(enable_amp=True)
    assert not scaled(enable_amp=False, amp_dtype=torch.float16)
    assert not scaled(enable_amp=True, enable_grad_scaling=False, amp_dtype=torch.float16)
    assert scaled(enable_amp=True, amp_dtype=torch.float16)


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


def test_an_iterator_is_known_by_itself_and_not_by_an_id_that_is_used_again(lab: Any) -> None:
    model = Counting()
    pipeline = pipeline_of(TrainPipelineBase, model)
    for _ in range(50):  # each list iterator is garbage before the next is made, most likely at the same address
        lab.run(pipeline, numbers(0, 1))
        gc.collect(0)
    assert model.ran == [0, 1] * 50


def test_nothing_of_the_pipeline_stays_in_the_model_also_after_a_forward_that_fails(lab: Any) -> None:
    model, batches = lab.sparse_model(), lab.batches(6)
    del batches[3]["y"]
    untouched = {name: set(vars(module)) for name, module in model.named_modules()}
    pipeline, iterator = TrainPipelineSparseDist(model, lab.optimizer(model), "cpu"), iter(batches)
    for k in range(4):
        with pytest.raises(KeyError, match="y") if k == 3 else contextlib.nullcontext():
            pipeline.progress(iterator)
        assert {name: set(vars(module)) for name, module in model.named_modules()} == untouched
    assert pipeline.detach() is model
    copy.deepcopy(model)(batches[0])
    assert len(lab.run(pipeline, iterator)) == 2
