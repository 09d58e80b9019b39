"""A train pipeline is a plain loop: same outputs, parameters, buffers and generator state, whatever is combined."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipe.train import Lanes, PrefetchTrainPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from tests.pipe.train.conftest import KINDS


def check_counts(lab: Any, counts: Any, kind: Any, grad_accum: Any) -> None:
    for count in counts:
        make = TrainPipelineBase if count % 2 else TrainPipelineSparseDist
        pipeline = lab.check_training(make, (count,), grad_accum, kind)
        assert pipeline.statistics().batches == count
        assert pipeline.statistics().steps == -(-count // (grad_accum or 1))


@pytest.mark.parametrize("grad_accum", [None, 1, 2, 3, 4, 5])
def test_final_weights_equal_a_plain_loop_for_1_to_20_batches(lab: Any, grad_accum: Any) -> None:
    check_counts(lab, range(1, 21), "dict", grad_accum)


@pytest.mark.parametrize("grad_accum", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_final_weights_equal_a_plain_loop_for_every_kind_of_batch(lab: Any, kind: Any, grad_accum: Any) -> None:
    check_counts(lab, [1, 2, 7], kind, grad_accum)


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    grad_accum=st.sampled_from([None, 1, 2, 3, 4, 5]),
    kind=st.sampled_from([TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist]),
    load=st.integers(0, 5),
    copy=st.integers(0, 5),
    distribute=st.integers(0, 3),
    prefetch=st.integers(0, 3),
    serial=st.booleans(),
    behind=st.booleans(),
)
def test_any_depth_any_lanes_and_any_number_of_epochs_change_nothing(
    lab: Any,
    counts: Any,
    grad_accum: Any,
    kind: Any,
    load: Any,
    copy: Any,
    distribute: Any,
    prefetch: Any,
    serial: Any,
    behind: Any,
) -> None:
    depths = {"load": load, "copy": copy, "distribute": distribute, "prefetch": prefetch}
    ahead = {name: depths[name] for name in kind.default_ahead}
    lanes = Lanes.serial() if serial else None
    make = partial(kind, ahead=ahead, lanes=lanes, enqueue_batch_after_forward=behind)
    lab.check_training(make, tuple(counts), grad_accum)


def test_a_pipeline_without_look_ahead_never_reads_beyond_the_batch_it_runs(lab: Any) -> None:
    read = []

    def loader() -> Any:
        for k, batch in enumerate(lab.batches(4)):
            read.append(k)
            yield batch

    model = lab.model()
    pipeline = TrainPipelineBase(model, lab.optimizer(model), "cpu", ahead={"load": 0, "copy": 0})
    batches = loader()
    for k in range(4):
        pipeline.progress(batches)
        assert read == list(range(k + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_accum", [None, 3])
def test_autocast_and_gradient_scaling_equal_a_plain_loop_with_them(lab: Any, dtype: Any, grad_accum: Any) -> None:
    reference, model = lab.model(), lab.model()
    batches = lab.batches(7)
    optimizer = lab.optimizer(reference)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    torch.manual_seed(2)
    size = grad_accum or 1
    for start in range(0, len(batches), size):
        window = batches[start : start + size]
        optimizer.zero_grad()
        for batch in window:
            with torch.autocast("cpu", dtype=dtype):
                losses, _ = reference(batch)
            scaler.scale(losses.sum() / len(window)).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.manual_seed(2)
    pipeline = TrainPipelineSparseDist(
        model, lab.optimizer(model), "cpu", enable_amp=True, grad_accum=grad_accum, amp_dtype=dtype
    )
    lab.run(pipeline, iter(batches))
    lab.assert_same(model, reference)


def test_a_model_in_eval_mode_only_runs_forward(lab: Any) -> None:
    model = lab.model().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pipeline = TrainPipelineBase(model, lab.optimizer(model), "cpu")
    outputs = lab.run(pipeline, iter(lab.batches(5)))
    torch.testing.assert_close(outputs, [model(batch)[1] for batch in lab.batches(5)])
    torch.testing.assert_close(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "shape_losses",
    [
        lambda losses: losses,
        lambda losses: losses.sum(),
        lambda losses: losses.reshape(2, 2, 1),
        lambda losses: (losses[:2], {"rest": losses[2:]}),
    ],
    ids=["vector", "scalar", "three_dimensions", "nested"],
)
def test_losses_may_have_any_shape(lab: Any, shape_losses: Any) -> None:
    class Shaped(nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: Any) -> Any:
            losses, output = self.net(batch)
            return shape_losses(losses), output

    reference, model = lab.model(), lab.model()
    torch.manual_seed(2)
    lab.plain_loop(reference, [lab.batches(5)], 2)
    torch.manual_seed(2)
    pipeline = TrainPipelineBase(Shaped(model), lab.optimizer(model), "cpu", grad_accum=2)
    lab.run(pipeline, iter(lab.batches(5)))
    lab.assert_same(model, reference)
