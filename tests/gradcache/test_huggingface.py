"""The example with Hugging Face encoders, where that package is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradcache.loss import SimpleContrastiveLoss
from tests.examples import load_example


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("transformers", reason="needs the extra huggingface")
    return load_example("huggingface_encoders")


def test_every_chunk_size_gives_the_whole_batch_s_loss_and_gradient(example: Any) -> None:
    results = example.main(rows=12, length=8)
    losses = [loss for loss, _ in results.values()]
    assert max(losses) - min(losses) < 1e-5
    assert all(difference < 1e-6 for _, difference in results.values())


def test_the_second_pass_meets_the_dropout_masks_of_the_first(example: Any) -> None:
    models = [example.encoder(seed, 0.2) for seed in range(2)]
    inputs = [example.tokens(12, 8, seed) for seed in range(2)]
    torch.manual_seed(3)
    loss, gradients = example.step(models, inputs, 12)
    torch.manual_seed(3)
    reps = [example.first_position(model(**given)) for model, given in zip(models, inputs, strict=True)]
    expected = SimpleContrastiveLoss()(*reps)
    expected.backward()
    assert loss == pytest.approx(expected.item())
    parameters = [p for model in models for p in model.parameters() if p.grad is not None]
    for gradient, parameter in zip(gradients, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
