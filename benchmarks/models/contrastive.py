"""The loss of a contrastive batch, and the cached one of sentence-transformers as a peer."""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

TEMPERATURE = 0.05


def contrastive_loss(queries: Tensor, passages: Tensor) -> Tensor:
    """Cross entropy of each query's scores against all passages; both of shape (rows, channels)."""
    return functional.cross_entropy(queries @ passages.T / TEMPERATURE, torch.arange(len(queries)))


def sentence_transformers_gradient(
    encoder: nn.Module, represent: Callable[[Tensor], Tensor], chunk: int, device: str = "cpu"
) -> Callable[[Tensor, Tensor], Tensor]:
    """From tokens of both sides to the loss, with gradients: its cached ranking loss, in chunks of so many rows.

    ``represent`` gives the representations of rows by ``encoder``, whose parameters take the gradients.
    """
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    transformer = importlib.import_module("sentence_transformers").SentenceTransformer

    class Adapter(nn.Module):
        """The encoder with the interface of a module of sentence-transformers."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {**features, "sentence_embedding": represent(features["input_ids"])}

    model = transformer(modules=[Adapter()], device=device)
    loss_fn = losses.CachedMultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, mini_batch_size=chunk)

    def gradient(queries: Tensor, passages: Tensor) -> Tensor:
        loss: Tensor = loss_fn(
            [{"input_ids": queries}, {"input_ids": passages}], torch.zeros(len(queries), device=device)
        )
        loss.backward()
        return loss.detach()

    return gradient
