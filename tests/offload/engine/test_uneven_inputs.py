"""Inputs of one micro-batch are not cut, so they need not agree about dimension 0."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from offload import MemoryPolicy, OffloadModel

WIDTH = 6


class Messages(nn.Module):
    """A graph layer: nodes (n, WIDTH) and edges (2, e)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).index_add(0, edges[1], x[edges[0]]), edges


class Forwarded(Messages):
    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(*value)


class Readout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(value[0]).index_add(0, value[1][1], value[0][value[1][0]])


class Positions(nn.Module):
    """Tokens (B, L) with position ids (1, L)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(9, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(positions)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        return self.lstm(value if isinstance(value, PackedSequence) else value[0])


class Unpacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[PackedSequence, Any]) -> Tensor:
        return self.linear(pad_packed_sequence(value[0])[0])


def graph() -> tuple[nn.Sequential, tuple[Any, ...]]:
    return nn.Sequential(Messages(), Forwarded(), Forwarded(), Readout()), (
        torch.randn(5, WIDTH),
        torch.randint(0, 5, (2, 9)),
    )


def positions() -> tuple[nn.Sequential, tuple[Any, ...]]:
    inputs = torch.randint(0, 11, (4, 7)), torch.arange(7).unsqueeze(0)
    return nn.Sequential(Positions(), nn.Linear(WIDTH, WIDTH)), inputs


def packed() -> tuple[nn.Sequential, tuple[Any, ...]]:
    sequences = [torch.randn(n, WIDTH) for n in (2, 5, 3)]
    return nn.Sequential(Recurrent(), Recurrent(), Unpacked()), (pack_sequence(sequences, enforce_sorted=False),)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("make", [graph, positions, packed])
def test_inputs_of_unequal_rows_run_as_in_the_bare_model(make: Any, home: str, recompute: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    bare, inputs = make()
    model = OffloadModel(
        copy.deepcopy(bare),
        "cpu",
        "cpu" if home == "host" else tmp_path,
        len(bare),
        recompute,
        memory=MemoryPolicy.fixed(boundary_bytes=0),
    )
    outputs = [bare[1:](bare[0](*inputs)), model(*inputs)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)
    for (name, p), q in zip(bare.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0, msg=name)
    if home == "disk" and recompute and len(bare) > 2:
        assert model.statistics().bytes_spilled > 0


class States(nn.Module):
    """Returns the hidden state (layers, B, WIDTH), or the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.gru, self.states = nn.GRU(WIDTH, WIDTH, 2, batch_first=True), True

    def forward(self, x: Tensor) -> Tensor:
        output, states = self.gru(self.layers[0](x))
        return states if self.states else output  # type: ignore[no-any-return]


@pytest.mark.parametrize("blocks", [False, True])
def test_outputs_of_micro_batches_whose_rows_are_in_dimension_1_are_refused(blocks: bool) -> None:
    bare = States()
    options: dict[str, Any] = {"blocks": "layers"} if blocks else {"num_slices": 1}
    copied = copy.deepcopy(bare)
    model = OffloadModel(copied if blocks else nn.Sequential(copied), "cpu", num_microbatches=2, **options)
    x = torch.randn(8, 3, WIDTH)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match=r"\(2, 4, 6\).*with rows first"):
            model(x)
    (model if blocks else copied).states = bare.states = False
    model(x).sum().backward()
    bare(x).sum().backward()
    for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
