"""The example with Hugging Face encoders, where that package is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "huggingface_encoders.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("transformers", reason="needs the extra huggingface")
    spec = importlib.util.spec_from_file_location("huggingface_encoders", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_chunk_size_gives_the_whole_batch_s_loss_and_gradient(example: ModuleType) -> None:
    results = example.main(rows=12, length=8)
    losses = [loss for loss, _, _ in results.values()]
    assert max(losses) - min(losses) < 1e-5
    assert all(difference < 1e-6 for _, difference, _ in results.values())


def test_both_passes_meet_the_same_dropout_masks(example: ModuleType) -> None:
    assert all(between == 0.0 for _, _, between in example.main(rows=12, length=8, dropout=0.2).values())
