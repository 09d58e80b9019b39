"""A bare model and a copy of it that is offloaded: how they are made, trained and compared."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadModel


def offloaded(bare: Any, home: Any = "cpu", slices: int | None = None, **choices: Any) -> Any:
    """A copy of a model, offloaded; its layers are recomputed unless it is said otherwise."""
    choices = {"num_slices": slices, "checkpoint_activation": True, **choices}
    return OffloadModel(copy.deepcopy(bare), "cpu", home, **choices)


def drawn(seed: int, *shape: int) -> Tensor:
    """The batch of this number."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def advance(*optimizers: Any) -> None:
    """Steps, and takes the gradients away."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(model: nn.Module, optimizer: Any, batches: Iterable[Tensor], *, clip: float | None = None) -> list[float]:
    """The losses of a plain loop, whose random numbers are those of the step; it leaves the gradients of the last."""
    losses = []
    for k, batch in enumerate(batches):
        torch.manual_seed(k)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ only by the order of sums."""
    return bool((a - b).abs().max() <= 1e-5 * a.abs().max().clamp(min=1))


def assert_equal(bare: nn.Module, model: nn.Module, *, exact: bool = True) -> None:
    """Parameters, gradients and buffers, by name."""
    ours = dict(model.named_parameters())
    for name, p in bare.named_parameters():
        q = ours[name]
        assert (p.grad is None) == (q.grad is None), name
        for a, b in ((p, q), (p.grad, q.grad)):
            if a is None or b is None:
                continue
            assert torch.equal(a, b) if exact else close(a, b), name
    buffers = dict(model.named_buffers())
    for name, buffer in bare.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
