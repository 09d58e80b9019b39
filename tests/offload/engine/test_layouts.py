"""Sparse and nested tensors between layers, as inputs and as outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import MemoryPolicy, OffloadModel
from pipe import Pipe

WIDTH, NODES = 6, 5
ADJACENCY = torch.tensor([[0, 0, 1, 2, 3, 4, 4], [1, 4, 2, 0, 3, 0, 2]])

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks:UserWarning",
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning",
    "ignore:.*nested tensors.*prototype:UserWarning",
)


class Weigh(nn.Module):
    """Features (NODES, WIDTH) -> (a sparse matrix of learned weights, features)."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.linear = nn.Linear(WIDTH, ADJACENCY.size(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.linear(x).sum(0).tanh()
        if self.layout == "uncoalesced":
            twice = torch.cat([ADJACENCY, ADJACENCY], 1)
            return torch.sparse_coo_tensor(twice, torch.cat([weights, weights]), (NODES, NODES)), x
        if self.layout == "coo":
            return torch.sparse_coo_tensor(ADJACENCY, weights, (NODES, NODES), is_coalesced=False).coalesce(), x
        rows = torch.zeros(NODES + 1, dtype=torch.long)
        rows[1:] = torch.bincount(ADJACENCY[0], minlength=NODES).cumsum(0)
        return torch.sparse_csr_tensor(rows, ADJACENCY[1], weights, (NODES, NODES)), x


class Propagate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        matrix, x = value
        return matrix, x + torch.sparse.mm(matrix, self.linear(x))


class Features(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[1]


class ToLayout(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.linear = layout, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.layout == "csr":
            return y.to_sparse_csr()
        if self.layout in ("coo", "uncoalesced"):
            return y.to_sparse()
        return torch.nested.as_nested_tensor([y[:2], y[2:]], layout=torch.jagged)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Padded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(x, 0.0)


def graph(layout: str) -> nn.Sequential:
    return nn.Sequential(Weigh(layout), Propagate(), Propagate(), Propagate(), Features())


def ragged(_: str) -> nn.Sequential:
    return nn.Sequential(ToLayout("jagged"), Residual(), Residual(), Residual(), Padded())


def returned(layout: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), ToLayout(layout))


def loss_of(output: Tensor) -> Tensor:
    if output.is_nested:
        return output.values().square().sum()
    return output.to_dense().square().sum()


CASES: list[tuple[Callable[[str], nn.Sequential], str]] = [
    *((graph, layout) for layout in ("coo", "uncoalesced", "csr")),
    (ragged, "jagged"),
    *((returned, layout) for layout in ("coo", "csr", "jagged")),
]


@pytest.mark.parametrize("mode", ["recompute", "graphs", "kept"])
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize(("make", "layout"), CASES)
def test_sparse_and_jagged_tensors_cross_shards_as_in_the_bare_model(
    make: Callable[[str], nn.Sequential], layout: str, home: str, mode: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    bare = make(layout)
    model = OffloadModel(
        copy.deepcopy(bare),
        "cpu",
        "cpu" if home == "host" else tmp_path,
        len(bare),
        mode != "kept",
        memory=MemoryPolicy.fixed(boundary_bytes=0, graph_bytes="1MiB" if mode == "graphs" else None),
    )
    for _ in range(2):
        x = torch.randn(NODES, WIDTH)
        results = []
        for run in (bare, model):
            leaf = x.clone().requires_grad_()
            run.zero_grad()
            with torch.no_grad():
                run(leaf)
            loss = loss_of(run(leaf))
            loss.backward()
            results.append((loss.detach(), leaf.grad, [p.grad for p in run.parameters()]))
        torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
    if home == "disk" and mode == "recompute" and len(bare) > 2:
        assert model.statistics().bytes_spilled > 0


@pytest.mark.parametrize("recompute", [True, False])
def test_a_sparse_input_gets_its_sparse_gradient(recompute: bool) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(Propagate(), Propagate(), Features())
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=3, checkpoint_activation=recompute)
    x, gradients = torch.randn(NODES, WIDTH), []
    for run in (bare, model):
        matrix = torch.sparse_coo_tensor(ADJACENCY, torch.ones(ADJACENCY.size(1)), (NODES, NODES)).coalesce()
        matrix.requires_grad_()
        run((matrix, x)).square().sum().backward()
        assert matrix.grad is not None
        gradients.append(matrix.grad.to_dense())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)


def test_a_strided_nested_tensor_is_refused_by_name() -> None:
    class Nest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.nested.as_nested_tensor([self.linear(x)], layout=torch.strided)

    class Denest(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(super().forward(x).unbind())

    bare = nn.Sequential(Nest(), Denest(WIDTH, WIDTH))
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=2, checkpoint_activation=True)
    with pytest.raises(TypeError, match=r"nested tensor of the strided layout that enters shard 1.*torch.jagged"):
        model(torch.randn(2, WIDTH))
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=2, checkpoint_activation=False)
    x = torch.randn(2, WIDTH)
    for each in (bare, model):
        each(x).sum().backward()
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(q.grad, p.grad)
    linear, nested = nn.Linear(WIDTH, WIDTH), torch.nested.as_nested_tensor([x], layout=torch.strided)
    model = OffloadModel(nn.Sequential(copy.deepcopy(linear)), "cpu", num_slices=1, checkpoint_activation=False)
    assert torch.equal(model(nested).to_padded_tensor(0.0), linear(nested).to_padded_tensor(0.0))


@pytest.mark.parametrize("kind", ["model", "pipe"])
def test_sparse_inputs_are_not_cut_into_micro_batches(kind: str) -> None:
    layers = nn.Sequential(Propagate(), Features())
    run: Any = (
        OffloadModel(layers, "cpu", num_slices=2, num_microbatches=2, checkpoint_activation=False)
        if kind == "model"
        else Pipe(layers, balance=[1, 1], devices=["cpu", "cpu"], chunks=2)
    )
    with pytest.raises(TypeError, match=r"layout torch.sparse_coo; pass NoChunk"):
        run((torch.eye(NODES).to_sparse(), torch.randn(NODES, WIDTH)))


def test_csr_outputs_of_several_micro_batches_are_refused() -> None:
    model = OffloadModel(returned("csr"), "cpu", num_slices=2, num_microbatches=2, checkpoint_activation=False)
    with pytest.raises(ValueError, match=r"layout torch.sparse_csr and cannot be concatenated over 2 micro-batches"):
        model(torch.randn(NODES, WIDTH))
