"""A train pipeline is a plain loop: same outputs, parameters, buffers and generator state, whatever is combined."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipe.train import Lanes, TrainPipelineBase, TrainPipelineSparseDist
from tests.pipe.train.conftest import KINDS, PIPELINES


def check(lab: Any, make: Any, counts: Any, grad_accum: Any, kind: Any = "dict") -> None:
    """Epochs of so many batches: outputs, weights, buffers, draws and steps are those of a plain loop."""

    def epochs() -> Any:
        return [lab.batches(count, kind, seed=k) for k, count in enumerate(counts)]

    key = tuple(counts), grad_accum
    pipeline = lab.check_training(make, lambda: lab.model(kind), epochs, grad_accum, key)
    assert pipeline.statistics().batches == sum(counts)
    assert pipeline.statistics().steps == sum(-(-count // (grad_accum or 1)) for count in counts)


@pytest.mark.parametrize("grad_accum", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_final_weights_equal_a_plain_loop_for_every_kind_of_batch(lab: Any, kind: Any, grad_accum: Any) -> None:
    check(lab, TrainPipelineBase, [1, 7], grad_accum, kind)
    check(lab, TrainPipelineSparseDist, [2], grad_accum, kind)


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    grad_accum=st.sampled_from([None, 1, 2, 3, 4, 5]),
    kind=st.sampled_from(PIPELINES),
    depths=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)),
    serial=st.booleans(),
    behind=st.booleans(),
)
def test_any_depth_any_lanes_and_any_number_of_epochs_change_nothing(
    lab: Any, counts: Any, grad_accum: Any, kind: Any, depths: Any, serial: Any, behind: Any
) -> None:
    ahead = dict(zip(kind.default_ahead, depths, strict=False))
    lanes = Lanes.serial() if serial else None
    check(lab, partial(kind, ahead=ahead, lanes=lanes, enqueue_batch_after_forward=behind), counts, grad_accum)


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
        def __init__(self) -> None:
            super().__init__()
            self.net = lab.model()

        def forward(self, batch: Any) -> Any:
            losses, output = self.net(batch)
            return shape_losses(losses), output

    lab.check_training(TrainPipelineBase, Shaped, lambda: [lab.batches(5)], 2)
