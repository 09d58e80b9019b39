"""A table at home is ``torch.nn.EmbeddingBag(sparse=True)``, in a plain loop and in a train pipeline."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.embedding.bag import OffloadEmbeddingBag
from offload.embedding.rowwise import RowWiseAdagrad
from pipe.train import InlineLane, TrainPipelineSparseDist
from tests.offload.scenarios.rows import LateLane

# torch's own optimizers build sparse tensors without saying whether their invariants are to be checked.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

ROWS, DIM = 23, 4
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, 0.05),
    "rowwise": lambda p: RowWiseAdagrad(p, 0.1),
}
LANES = {"thread": lambda: None, "earliest": InlineLane, "latest": LateLane}


def pair(home: Any = "cpu", **options: Any) -> Any:
    """The same table in device memory and at home."""
    torch.manual_seed(0)
    ours = OffloadEmbeddingBag(ROWS, DIM, offload_device=home, **options)
    torch.manual_seed(0)
    return nn.EmbeddingBag(ROWS, DIM, sparse=options.get("mode") != "max", **options), ours


def assert_equal_gradients(theirs: Any, ours: Any) -> None:
    dense = [None if m.weight.grad is None else m.weight.grad.to_dense() for m in (theirs, ours)]
    torch.testing.assert_close(dense[1], dense[0])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("two_dimensional", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_outputs_and_gradients_equal_those_of_a_table_on_the_device(
    home: Any, mode: Any, padding_idx: Any, two_dimensional: Any, dtype: Any
) -> None:
    theirs, ours = pair(home, mode=mode, padding_idx=padding_idx)
    assert torch.equal(theirs.weight, ours.weight)
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(ROWS, (6, 3) if two_dimensional else (12,), generator=generator).to(dtype)
    indices.view(-1)[:2] = torch.tensor([3, ROWS - 1])
    offsets = () if two_dimensional else (torch.tensor([0, 3, 3, 8], dtype=dtype),)
    expected, output = theirs(indices, *offsets), ours(indices, *offsets)
    torch.testing.assert_close(output, expected)
    for _ in range(2):  # gradients accumulate
        (theirs(indices, *offsets) ** 2).sum().backward()
        (ours(indices, *offsets) ** 2).sum().backward()
    assert_equal_gradients(theirs, ours)
    assert ours.weight.grad.is_sparse


def test_a_batch_without_indices_touches_no_row() -> None:
    _, ours = pair(mode="sum")
    before = ours.weight.detach().clone()
    optimizer = torch.optim.SparseAdam(ours.parameters(), 0.1)
    ours(torch.tensor([0]), torch.tensor([0])).sum().backward()
    optimizer.step()
    moved = ours.weight.detach().clone()
    optimizer.zero_grad()
    output = ours(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))
    assert torch.equal(output, torch.zeros(2, DIM))
    output.sum().backward()
    assert ours.weight.grad._nnz() == 0
    optimizer.step()
    assert torch.equal(ours.weight, moved)
    assert not torch.equal(moved[0], before[0])
    assert torch.equal(moved[1:], before[1:])


def test_only_distinct_rows_travel() -> None:
    _, ours = pair(mode="sum")
    ours(torch.tensor([[4, 4, 4], [7, 4, 7]])).sum().backward()
    statistics = ours.statistics()
    assert (statistics.rows_read, statistics.rows_refreshed, statistics.bytes_loaded) == (2, 0, 2 * DIM * 4)
    assert ours.weight.grad.coalesce().indices().tolist() == [[4, 7]]


class Model(nn.Module):
    def __init__(self, bag: Any) -> None:
        super().__init__()
        self.bag = bag
        torch.manual_seed(3)
        self.top = nn.Sequential(nn.Linear(DIM, 3), nn.Dropout(0.2), nn.Linear(3, 1))

    def forward(self, batch: Any) -> Any:
        output = self.top(self.bag(batch["indices"]).tanh())
        return (output - batch["labels"]) ** 2, output.detach()


def batches(count: Any, rows: Any = ROWS) -> Any:
    generator = torch.Generator().manual_seed(5)
    return [
        {"indices": torch.randint(rows, (4, 2), generator=generator), "labels": torch.randn(4, 1, generator=generator)}
        for _ in range(count)
    ]


def optimizers_of(model: Any, name: Any) -> Any:
    return [OPTIMIZERS[name](model.bag.parameters()), torch.optim.SGD(model.top.parameters(), 0.1)]


def train_plainly(model: Any, optimizers: Any, count: Any, size: Any, device: str = "cpu") -> None:
    torch.manual_seed(4)
    data = batches(count)
    for start in range(0, count, size):
        window = data[start : start + size]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in window:
            (model({key: value.to(device) for key, value in batch.items()})[0].sum() / len(window)).backward()
        for optimizer in optimizers:
            optimizer.step()


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    lane=st.sampled_from(sorted(LANES)),
    disk=st.booleans(),
    size=st.integers(1, 4),
    count=st.integers(1, 12),
    ahead=st.integers(0, 4),
)
def test_a_pipeline_that_prefetches_rows_trains_the_same_table(
    tmp_path_factory: pytest.TempPathFactory, name: Any, lane: Any, disk: Any, size: Any, count: Any, ahead: Any
) -> None:
    theirs, ours = pair(tmp_path_factory.mktemp("home") if disk else "cpu", mode="sum")
    reference, model = Model(theirs), Model(ours)
    ours.lane = LANES[lane]() or ours.lane
    train_plainly(reference, optimizers_of(reference, name), count, size)
    torch.manual_seed(4)
    depth = {"load": ahead, "copy": ahead, "distribute": ahead}
    pipeline = TrainPipelineSparseDist(model, optimizers_of(model, name), "cpu", grad_accum=size, ahead=depth)
    iterator = iter(batches(count))
    for _ in range(count):
        pipeline.progress(iterator)
    with pytest.raises(StopIteration):  # with nothing ahead, only the end of the loader ends the last window
        pipeline.progress(iterator)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[key], atol=1e-6, rtol=1e-6)
    assert pipeline.statistics().undistributed == {}


def test_the_table_is_not_moved_with_the_module_and_a_copy_has_its_own(home: Any) -> None:
    _, ours = pair(home, mode="sum")
    address = ours.weight.data_ptr()
    nn.ModuleList([ours]).to("cpu")
    assert ours.weight.data_ptr() == address
    state = torch.get_rng_state()
    clone = copy.deepcopy(ours)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(clone.weight, ours.weight)
    with torch.no_grad():
        clone.weight.zero_()
    assert ours.weight.abs().sum() > 0
    with pytest.raises(TypeError, match=r"keep the table's type torch.float32.*torch.float64"):
        nn.ModuleList([ours]).double()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_embeddings": 0}, "positive size"),
        ({"mode": "median"}, "mode='median'"),
        ({"padding_idx": 9}, "padding_idx=9"),
        ({"offload_device": "cuda"}, "directory"),
    ],
)
def test_bad_arguments_are_refused_by_name(options: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadEmbeddingBag(**{"num_embeddings": 5, "embedding_dim": 2, **options})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_pipeline_that_prefetches_rows_trains_the_same_table(home: Any) -> None:
    theirs, ours = pair(home, mode="sum")
    reference, model = Model(theirs).cuda(), Model(ours).cuda()
    for module in (reference, model):
        module.top.eval()  # the generators of the two devices are not in question here
    train_plainly(reference, optimizers_of(reference, "adagrad"), 12, 1, "cuda")
    pipeline = TrainPipelineSparseDist(model, optimizers_of(model, "adagrad"), "cuda")
    iterator = iter([{key: value.pin_memory() for key, value in batch.items()} for batch in batches(12)])
    for _ in range(12):
        pipeline.progress(iterator)
    torch.testing.assert_close(model.bag.weight, reference.bag.weight.cpu(), atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------- RowWiseAdagrad


def test_rowwise_adagrad_does_what_its_formula_says_with_one_number_per_row() -> None:
    parameter = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = RowWiseAdagrad([parameter], lr=0.1)
    expected, total = parameter.detach().clone(), torch.zeros(5, dtype=torch.float64)
    for seed in range(4):
        indices = torch.randint(5, (4,), generator=torch.Generator().manual_seed(seed))
        values = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        parameter.grad = torch.sparse_coo_tensor(indices[None], values, (5, 3), check_invariants=True)
        dense = parameter.grad.to_dense()
        total += dense.square().mean(1)
        expected -= torch.where(dense != 0, 0.1 * dense / (total.sqrt() + 1e-8).unsqueeze(1), 0)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), expected, atol=1e-6, rtol=1e-6)
    assert optimizer.state[parameter]["sum"].shape == (5,)


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="one of 2 processes, each of which would train"):
        OffloadEmbeddingBag(ROWS, DIM)
