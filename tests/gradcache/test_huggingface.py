"""The example with Hugging Face encoders, where that package is installed."""

from __future__ import annotations

import pytest

from tests.examples import load_example


def test_every_chunk_size_gives_the_whole_batch_s_loss_and_gradient() -> None:
    pytest.importorskip("transformers", reason="needs the extra huggingface")
    results = load_example("huggingface_encoders").main(rows=12, length=8)
    losses = [loss for loss, _ in results.values()]
    assert max(losses) - min(losses) < 1e-5
    assert all(difference < 1e-6 for _, difference in results.values())
