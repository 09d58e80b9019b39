"""Table on disk, streamed encoder, chunks and train pipeline at once: the numbers are those of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer, RowWiseAdagrad
from pipe.train import TrainPipelineBase
from tests.examples import load_example


@pytest.fixture
def example() -> Any:
    return load_example("retrieval_from_disk")


def test_all_of_them_together_train_what_plain_torch_trains(
    lab: Any, example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = example.encoder_layers

    def without_dropout(seed: Any = 0) -> Any:
        """Chunks draw in an order of their own."""
        built = layers(seed)
        for module in built.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return built

    monkeypatch.setattr(example, "encoder_layers", without_dropout)
    torch.manual_seed(1)
    words = nn.EmbeddingBag(example.WORDS, example.DIM, mode="mean", sparse=True)
    encoder = without_dropout()

    def model(pairs: Any) -> Any:
        losses = example.contrastive_losses(encoder(words(pairs.queries)), encoder(words(pairs.passages))).mean()
        return losses, losses.item()

    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    rows = RowWiseAdagrad(words.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *_: (rows.step(), rows.zero_grad()))
    expected = lab.plain_loop(model, [list(example.pairs_of_words(7))], 3, optimizer)
    trained, losses = example.train(tmp_path, batches=7, grad_accum=3)
    assert losses == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(trained.words.weight, words.weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dict(trained.encoder.state_dict()), dict(encoder.state_dict()), atol=1e-4, rtol=1e-4)


def test_the_example_learns_with_dropout_on(example: Any, tmp_path: Path) -> None:
    _, losses = example.train(tmp_path, batches=60)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("update_in_backward", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("ahead", [None, {"load": 0, "copy": 0}], ids=["ahead", "nothing_ahead"])
def test_an_offloaded_model_and_its_optimizer_accumulate_windows_in_a_pipeline(
    lab: Any, tmp_path: Path, update_in_backward: Any, on_disk: Any, ahead: Any
) -> None:
    class Whole(nn.Module):
        def __init__(self, layers: Any) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, batch: Any) -> Any:
            output = self.layers(batch["x"])
            return (output - batch["y"]).square().mean(), output.detach()

    def layers() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    reference = Whole(layers())
    lab.plain_loop(reference, [lab.batches(8)], 3, torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9))
    home = tmp_path if on_disk else "cpu"
    offloaded = OffloadModel(layers(), "cpu", offload_device=home, checkpoint_activation=True, num_slices=3)
    optimizer = OffloadOptimizer(
        offloaded, torch.optim.SGD, update_in_backward=update_in_backward, lr=0.1, momentum=0.9
    )
    pipeline = TrainPipelineBase(Whole(offloaded), optimizer, "cpu", grad_accum=3, ahead=ahead)
    assert len(lab.run(pipeline, iter(lab.batches(8)))) == 8
    lab.assert_same(offloaded, reference.layers)
