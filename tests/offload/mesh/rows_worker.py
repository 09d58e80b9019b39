"""``OffloadEmbeddingBag`` with rows dealt to ranks beside one process on the batches of all, in forked children."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gradcache import GradCache
from gradcache.loss import DistributedContrastiveLoss, SimpleContrastiveLoss
from offload import OffloadEmbeddingBag, RowWiseAdagrad
from pipe.train import TrainPipelineSparseDist
from tests.offload.mesh.world import whole
from tests.offload.side_by_side import advance

#: No number of ranks divides them.
ROWS, DIM, BAGS = 23, 4, 12
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, 0.05),
    "rowwise": lambda p: RowWiseAdagrad(p, 0.1),
}


def mesh_of_all() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None


def tables(home: Any = "cpu", **options: Any) -> tuple[OffloadEmbeddingBag, nn.EmbeddingBag]:
    """One whose rows are dealt to the ranks, and the same in one process."""
    torch.manual_seed(0)
    ours = OffloadEmbeddingBag(ROWS, DIM, offload_device=home, mesh=mesh_of_all(), **options)
    torch.manual_seed(0)
    return ours, nn.EmbeddingBag(ROWS, DIM, sparse=options.get("mode") != "max", **options)


def batches(count: int = 3) -> Tensor:
    return torch.randint(ROWS, (count, BAGS, 3), generator=torch.Generator().manual_seed(1))


def mine(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch


def table_of(bag: nn.Module) -> Tensor:
    """All rows; a collective."""
    return whole(bag.state_dict()["weight"])


def check_equal(ours: OffloadEmbeddingBag, theirs: nn.EmbeddingBag) -> None:
    torch.testing.assert_close(table_of(ours), theirs.weight.detach(), atol=1e-6, rtol=1e-6)


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def train(bag: nn.Module, optimizer: Any, each: Tensor) -> None:
    for batch in each:
        loss_of(bag(batch)).backward()
        advance(optimizer)


def it_trains_as_one_process(folder: Path) -> None:
    home = folder / f"table{dist.get_rank()}"
    for number, (mode, name) in enumerate(itertools.product(("sum", "mean"), OPTIMIZERS)):
        ours, theirs = tables(home if number % 2 else "cpu", mode=mode, padding_idx=(None, 3, -1)[number % 3])
        assert torch.equal(table_of(ours), theirs.weight.detach())
        assert len(ours.weight) == (12, 11)[dist.get_rank()]
        for batch in batches():
            output, expected = ours(mine(batch)), theirs(batch)
            torch.testing.assert_close(output, mine(expected), rtol=1e-6, atol=1e-6)
        pair = [OPTIMIZERS[name](bag.parameters()) for bag in (ours, theirs)]
        before = ours.statistics().bytes_received
        train(ours, pair[0], torch.stack([mine(batch) for batch in batches()]))
        train(theirs, pair[1], batches())
        check_equal(ours, theirs)
        rank, expected = dist.get_rank(), 0
        for batch in batches() if mode == "sum" and ours.padding_idx is None else ():
            rows = [set(part.flatten().tolist()) for part in batch.chunk(2)]
            needed = sum(row // 12 == rank for row in rows[1 - rank])  # of mine that the other rank needs
            others = sum(row // 12 != rank for row in rows[rank])
            expected += 8 + 8 * needed + DIM * 4 * (needed + others)
        assert not expected or ours.statistics().bytes_received - before == expected


def gradients_of_all_arguments_are_those_of_one_process(folder: Path) -> None:
    """Bags with offsets and weights, one rank without indices, maxima, accumulation, and another divisor."""
    rank = dist.get_rank()
    indices, offsets = torch.tensor([1, 22, 22, 5, 0]), torch.tensor([0, 3, 3])
    none = torch.empty(0, dtype=torch.int64), torch.tensor([0])
    for mode in ("sum", "max"):
        ours, theirs = tables(mode=mode, include_last_offset=False)
        for _ in range(2):
            first = {"per_sample_weights": torch.arange(5.0)} if mode == "sum" else {}
            output = ours(indices, offsets, **first) if rank == 0 else ours(*none)
            output.square().sum().backward()
            theirs(indices, offsets, **first).square().sum().div(2).backward()
        assert ours.weight.grad is not None
        assert ours.weight.grad.is_sparse
        expected = theirs.weight.grad.to_dense().tensor_split([12])[rank]
        torch.testing.assert_close(ours.weight.grad.to_dense(), expected)
    ours, _ = tables(mode="sum")
    doubled = OffloadEmbeddingBag(ROWS, DIM, "sum", mesh=mesh_of_all(), gradient_divide_factor=1)
    for bag in (ours, doubled):
        bag(mine(batches()[0])).sum().backward()
    assert torch.equal(doubled.weight.grad.to_dense(), 2 * ours.weight.grad.to_dense())


class Model(nn.Module):
    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        output = self.bag(batch["rows"])
        return loss_of(output), output


def a_pipeline_that_reads_ahead_trains_with_current_rows(folder: Path) -> None:
    """All batches share rows, of which owners send what the update before has left."""
    ours, theirs = tables(mode="sum")
    many = batches(8) % 5 * 5  # of both ranks
    pipeline = TrainPipelineSparseDist(Model(ours), torch.optim.SGD(ours.parameters(), 0.3), "cpu")
    iterator = iter([{"rows": mine(batch)} for batch in many])
    for _ in many:
        pipeline.progress(iterator)
    train(theirs, torch.optim.SGD(theirs.parameters(), 0.3), many)
    check_equal(ours, theirs)
    assert pipeline.statistics().undistributed == {}
    assert ours.statistics().rows_refreshed > 0


def what_cannot_work_is_refused(folder: Path) -> None:
    rank, mesh = dist.get_rank(), mesh_of_all()
    with pytest.raises(ValueError, match=r"2 processes.*mesh=init_device_mesh"):
        OffloadEmbeddingBag(ROWS, DIM)
    with pytest.raises(ValueError, match="mesh of one dimension, got 2"):
        OffloadEmbeddingBag(ROWS, DIM, mesh=init_device_mesh("cpu", (2, 1)))
    with pytest.raises(RuntimeError, match=r"different tables: rank 0 has rows=9, .* rank 1 has rows=10"):
        OffloadEmbeddingBag(9 + rank, DIM, mesh=mesh)
    ours, theirs = tables(mode="sum")
    kind, words = (IndexError, "from 0 to 22, got 1 to 23") if rank else (RuntimeError, "rank 1 of the mesh asked")
    with pytest.raises(kind, match=words):
        ours(torch.tensor([[1, 22 + rank]]))
    assert torch.equal(ours(mine(batches()[0])), mine(theirs(batches()[0])))
    loss_of(ours(mine(batches()[0]))).backward()
    with pytest.raises(ValueError, match="changes only rows that have a gradient"):
        torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9).step()
    with pytest.raises(ValueError, match="computes on the CPU only"):
        ours.to("meta")


def gradcache_trains_a_tower_that_has_one(folder: Path) -> None:
    def tower(bag: nn.Module) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(bag, nn.Linear(DIM, 3))

    ours, theirs = map(tower, tables(mode="sum"))
    for model, loss, part in (
        (ours, DistributedContrastiveLoss(), mine),
        (theirs, SimpleContrastiveLoss(), lambda batch: batch),
    ):
        cache = GradCache([model, model], chunk_sizes=2, loss_fn=loss)
        cache(part(batches()[0]), part(batches()[1]))
    scale = float(theirs[0].weight.grad.to_dense().abs().max())
    expected = theirs[0].weight.grad.to_dense().tensor_split([12])[dist.get_rank()]
    assert float((ours[0].weight.grad.to_dense() - expected).abs().max()) < 1e-5 * scale
    torch.testing.assert_close(ours[1].weight.grad, theirs[1].weight.grad)


def stages(folder: Path) -> list[tuple[int, dict[str, Callable[[], None]]]]:
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
    each = (
        it_trains_as_one_process,
        gradients_of_all_arguments_are_those_of_one_process,
        a_pipeline_that_reads_ahead_trains_with_current_rows,
        what_cannot_work_is_refused,
        gradcache_trains_a_tower_that_has_one,
    )
    by_two: dict[str, Callable[[], None]] = {claim.__name__: partial(claim, folder) for claim in each}
    return [(2, by_two)]
