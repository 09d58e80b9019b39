"""A streamed model without an engine: the contract of ``forward_chunks`` over a plain Sequential, counting its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pipe.nested import tensors_in


class FakeStreamed(nn.Module):
    """Each layer is a shard. ``events`` tells the order of visits; ``loads`` counts them."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.events: list[str] = []
        self.loads = [0] * len(layers)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)

    def forward_chunks(self, chunks: Sequence[Any], output_fn: Callable[[Any], Any] | None = None) -> list[Any]:
        values = [chunk if isinstance(chunk, Tensor) else chunk[0][0] for chunk in chunks]
        for j, layer in enumerate(self.layers):
            self.loads[j] += 1
            returned: set[int] = set()
            for i, value in enumerate(values):
                self.events.append(f"F{j}.{i}")
                values[i] = self.cell(layer, output_fn if j == len(self.layers) - 1 else None)(value)
                for tensor in tensors_in(values[i]):
                    if tensor.requires_grad:
                        tensor.register_hook(partial(self.note, j, i, returned))
        return values

    def note(self, j: int, i: int, returned: set[int], gradient: Tensor) -> None:
        """Called when the backward of a cell begins: the first one loads the shard for all chunks."""
        self.loads[j] += not returned
        if i not in returned:
            returned.add(i)
            self.events.append(f"B{j}.{i}")

    def cell(self, layer: nn.Module, output_fn: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            return layer(x) if output_fn is None else output_fn(layer(x))

        def recomputed(x: Any) -> Any:
            with set_checkpoint_early_stop(False):
                return checkpoint(run, x, use_reentrant=False)

        return recomputed if torch.is_grad_enabled() else run


@pytest.fixture(scope="session")
def streamed() -> type[FakeStreamed]:
    return FakeStreamed


def gradients_of(*modules: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name over several modules, each cloned."""
    return {
        f"{k}.{name}": None if parameter.grad is None else parameter.grad.clone()
        for k, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }


@pytest.fixture(scope="session")
def assert_same_gradients() -> Callable[..., None]:
    def check(expected: Sequence[nn.Module], actual: Sequence[nn.Module], tolerance: float = 1e-6) -> None:
        mine, theirs = gradients_of(*actual), gradients_of(*expected)
        assert mine.keys() == theirs.keys()
        for name, gradient in theirs.items():
            if gradient is None:
                assert mine[name] is None, name
            else:
                torch.testing.assert_close(
                    mine[name], gradient, rtol=1e-5, atol=tolerance, msg=f"gradient of {name} differs"
                )

    return check
