"""The example with Hugging Face encoders, where that package is installed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.examples import load_example


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("transformers", reason="needs the extra huggingface")
    return load_example("huggingface_encoders")


def test_every_chunk_size_gives_the_whole_batch_s_loss_and_gradient(example: Any) -> None:
    results = example.main(rows=12, length=8)
    losses = [loss for loss, _, _ in results.values()]
    assert max(losses) - min(losses) < 1e-5
    assert all(difference < 1e-6 for _, difference, _ in results.values())


def test_both_passes_meet_the_same_dropout_masks(example: Any) -> None:
    assert all(between == 0.0 for _, _, between in example.main(rows=12, length=8, dropout=0.2).values())
