"""A streamed model without an engine: the contract of ``forward_chunks`` over a plain Sequential, counting its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipe.nested import flatten, map_tensors, tensors_in
from pipe.recompute.replay import Replay, devices_of


class FakeStreamed(nn.Module):
    """Each layer is a shard. ``events`` tells the order of visits; ``loads`` counts them."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.events: list[str] = []
        self.loads = [0] * len(layers)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)

    def forward_chunks(
        self, chunks: Sequence[Any], output_fn: Callable[[Any], Any] | None = None
    ) -> tuple[list[Any], FakeTape]:
        values = [chunk if isinstance(chunk, Tensor) else chunk[0][0] for chunk in chunks]
        cells: list[list[tuple[Any, Replay]]] = []
        with torch.no_grad():
            for j, layer in enumerate(self.layers):
                self.loads[j] += 1
                cells.append([])
                for i, value in enumerate(values):
                    self.events.append(f"F{j}.{i}")
                    replay = Replay.capture(devices_of(value))
                    cells[-1].append((value, replay))
                    values[i] = self.cell(layer, j, output_fn)(value)
                    replay.record_changes()
        return values, FakeTape(self, cells if torch.is_grad_enabled() else None, output_fn)

    def cell(self, layer: nn.Module, j: int, output_fn: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        last = j == len(self.layers) - 1
        return lambda x: output_fn(layer(x)) if last and output_fn is not None else layer(x)


class FakeTape:
    def __init__(self, model: FakeStreamed, cells: list[Any] | None, output_fn: Any) -> None:
        self.model, self.cells, self.output_fn = model, cells, output_fn

    def backward(self, output_gradients: Sequence[Any]) -> None:
        if self.cells is None:
            raise RuntimeError("no tape under no_grad, or used twice")
        cells, self.cells = self.cells, None
        gradients = list(output_gradients)
        for j in reversed(range(len(self.model.layers))):
            self.model.loads[j] += 1
            for i, (value, replay) in enumerate(cells[j]):
                if gradients[i] is None:
                    continue
                self.model.events.append(f"B{j}.{i}")
                leaf = value
                if isinstance(value, Tensor) and value.is_floating_point() and j > 0:
                    leaf = value.detach().requires_grad_()
                with replay.again(), torch.enable_grad():
                    output = self.model.cell(self.model.layers[j], j, self.output_fn)(leaf)
                pairs = zip(tensors_in(output), flatten(gradients[i])[0], strict=True)
                pairs = [(o, g) for o, g in pairs if isinstance(g, Tensor) and o.requires_grad]
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
                gradients[i] = leaf.grad if isinstance(leaf, Tensor) else map_tensors(lambda t: t.grad, leaf)


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
