"""An evaluation pipeline runs forward and touches neither gradients nor parameters nor the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipe.train import EvalPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist


@pytest.mark.parametrize(
    ("make", "mode", "grad"),
    [(TrainPipelineBase, "eval", True), (TrainPipelineSparseDist, "train", False)]
    + [(EvalPipelineSparseDist, mode, grad) for mode in ("train", "eval") for grad in (True, False)],
)
def test_outputs_are_those_of_the_model_and_nothing_is_trained(lab: Any, make: Any, mode: Any, grad: Any) -> None:
    reference, model = getattr(lab.sparse_model(), mode)(), getattr(lab.sparse_model(), mode)()
    optimizer = lab.optimizer(model)
    parameters = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    pipeline = make(model, optimizer, "cpu")
    with torch.set_grad_enabled(grad):
        torch.manual_seed(2)
        expected = [reference(batch)[1] for batch in lab.batches(6)]
        torch.manual_seed(2)
        outputs = lab.run(pipeline, iter(lab.batches(6)))
    torch.testing.assert_close(outputs, expected)
    lab.assert_same(model, reference)  # buffers as well: they count batches in train mode
    torch.testing.assert_close(dict(model.named_parameters()), parameters)
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
    assert not optimizer.state
    assert (pipeline.statistics().batches, pipeline.statistics().steps) == (6, 0)
    if make is not TrainPipelineBase:
        assert pipeline.statistics().undistributed == {}
        assert model.inner["sparse"].count("forward") == 1


def test_evaluation_in_the_middle_of_an_epoch_leaves_the_training_as_it_is(lab: Any) -> None:
    def run(training: Any, batches: Any) -> Any:
        model, outputs = training.detach(), []
        evaluation = EvalPipelineSparseDist(model, None, "cpu")
        for _ in range(6):
            outputs.append(training.progress(batches))
            model.eval()
            assert len(lab.run(evaluation, iter(lab.batches(2, seed=9)))) == 2
            model.train()
        return outputs

    lab.check_training(TrainPipelineSparseDist, lab.sparse_model, lambda: [lab.batches(6)], 3, run=run)


def test_autocast_and_a_forward_of_the_callers_own_are_used(lab: Any) -> None:
    seen = []

    def forward(batch: Any) -> Any:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return model(batch)

    model = lab.sparse_model().eval()
    options = {"enable_amp": True, "amp_dtype": torch.float16, "custom_model_fwd": forward}
    lab.run(EvalPipelineSparseDist(model, None, "cpu", **options), iter(lab.batches(2)))
    assert seen == [torch.float16] * 2
