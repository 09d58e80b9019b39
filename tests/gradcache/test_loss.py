"""Tiles change the memory of a loss and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gradcache import tiled
from gradcache.loss import ContrastiveLossWithQueryClosure, SimpleContrastiveLoss


def representations(rows: int, targets: int, seed: int = 0, width: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, width, requires_grad=True), torch.randn(targets, width, requires_grad=True)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any loss counts as large, which is cut into tiles unasked."""
    monkeypatch.setattr("gradcache.loss.LARGE", 0)


def plain(kind: str, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    """Each loss written down in one piece, independently of ours."""
    rows = x.size(0)
    if kind == "simple":
        return F.cross_entropy(x @ y.T, torch.arange(rows))
    if kind == "negatives":
        return F.cross_entropy(x @ y.T / 0.5, torch.arange(rows) * 3)
    if kind == "symmetric":
        scores = x @ y.T
        return (F.cross_entropy(scores, torch.arange(rows)) + F.cross_entropy(scores.T, torch.arange(rows))) / 2
    if kind == "labels":
        log_p = F.log_softmax(x @ y.T, 1)
        per_row = []
        for i in range(rows):
            own = [j for j in range(y.size(0)) if kwargs["y_labels"][j] == kwargs["x_labels"][i]]
            per_row.append(-sum((log_p[i, j] for j in own), torch.zeros(())) / max(len(own), 1))
        return torch.stack(per_row).mean() + 0 * log_p.sum()
    scores = x @ y.T * 10.0 - 10.0
    return -F.logsigmoid(scores * (2 * torch.eye(rows, y.size(0)) - 1)).sum() / rows


def of_labels(x: Tensor, y: Tensor, *, x_labels: Tensor, y_labels: Tensor) -> Tensor:
    """Supervised: every target with the query's label is a positive."""
    positive = x_labels[:, None] == y_labels[None, :]
    log_probability = F.log_softmax(x @ y.T, dim=1).masked_fill(~positive, 0)
    return -(log_probability.sum(1) / positive.sum(1).clamp(min=1)).mean()


class Sigmoid(nn.Module):
    """Each pair of a query and a target is a binary classification; scale and bias are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())
        self.bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
        scores = x @ y.T * self.log_scale.exp() + self.bias
        return (F.softplus(scores).sum() - scores.gather(1, target[:, None]).sum()) / max(x.size(0), 1)


def ours(kind: str, tile_rows: int | None) -> Callable[..., Tensor]:
    def by_tiles(loss: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        return loss if tile_rows is None else tiled(loss, tile_rows=tile_rows, **options)

    sigmoid = by_tiles(Sigmoid(), cut=(2,))
    losses: dict[str, Callable[..., Tensor]] = {
        "simple": SimpleContrastiveLoss(tile_rows=tile_rows),
        "negatives": SimpleContrastiveLoss(2, tile_rows=tile_rows, temperature=0.5),
        "symmetric": SimpleContrastiveLoss(tile_rows=tile_rows, symmetric=True),
        "labels": by_tiles(of_labels, cut=("x_labels",)),
        "sigmoid": lambda x, y: sigmoid(x, y, torch.arange(x.size(0))),
    }
    return losses[kind]


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["simple", "negatives", "symmetric", "labels", "sigmoid"]),
    rows=st.integers(1, 9),
    tile_rows=st.one_of(st.none(), st.integers(1, 10)),
    factor=st.sampled_from([1.0, 0.25]),
)
def test_loss_by_tiles_equals_the_loss_in_one_piece(kind: str, rows: int, tile_rows: int | None, factor: float) -> None:
    targets = rows * 3 if kind == "negatives" else rows
    x, y = representations(rows, targets)
    a, b = representations(rows, targets)
    labels = {}
    if kind == "labels":
        labels = {"x_labels": torch.randint(3, (rows,)), "y_labels": torch.randint(3, (targets,))}
    expected = plain(kind, x, y, **labels)
    (expected * factor).backward()
    loss = ours(kind, tile_rows)(a, b, **labels)
    (loss * factor).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close((a.grad, b.grad), (x.grad, y.grad), rtol=1e-4, atol=1e-6)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns, and all storages, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
                storage = StorageWeakRef(tensor.untyped_storage())
                self._storages[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        return out

    def alive(self) -> int:
        """Bytes of the storages that are alive."""
        return sum(nbytes for storage, nbytes in self._storages.values() if not storage.expired())


@pytest.mark.parametrize("kind", ["simple", "symmetric", "labels", "sigmoid"])
def test_no_tensor_of_a_tiled_loss_is_larger_than_a_tile_of_scores(kind: str) -> None:
    """Named in the peers: a chunked sigmoid loss that saves no memory, because autograd keeps every chunk."""
    x, y = representations(64, 64, width=4)
    labels = {"x_labels": torch.arange(64), "y_labels": torch.arange(64)} if kind == "labels" else {}
    with Largest() as largest:
        loss = ours(kind, 8)(x, y, **labels)
        loss.backward()
    assert largest.elements <= 8 * 64
    with Largest() as largest:
        ours(kind, None)(x, y, **labels).backward()
    assert largest.elements == 64 * 64


def test_a_tiled_loss_saves_no_more_for_backward_than_the_representations() -> None:
    x, y = representations(64, 64, width=4)
    with Largest() as made:
        loss = SimpleContrastiveLoss(tile_rows=8)(x, y)
    size = x.nbytes + y.nbytes
    assert size <= made.alive() - size < size + 64  # the gradients, and some scalars
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="retain_graph=True"):  # as torch refuses it
        loss.backward()


def test_tiled_trains_a_temperature_that_the_function_only_closes_over() -> None:
    scales = [nn.Parameter(torch.tensor(0.5)) for _ in range(2)]
    (x, y), (a, b), target = representations(7, 7), representations(7, 7), torch.arange(7)
    F.cross_entropy(x @ y.T * scales[0].exp(), target).backward()
    outside = scales[1].exp()  # with a graph of its own, shared by all tiles
    loss = tiled(lambda p, q, t: F.cross_entropy(p @ q.T * outside, t), tile_rows=2, cut=(2,))
    loss(a, b, target).backward()
    torch.testing.assert_close((scales[1].grad, a.grad), (scales[0].grad, x.grad))


@pytest.mark.usefixtures("large")
def test_ignored_targets_do_not_count_in_the_mean_of_a_tiled_loss() -> None:
    x, y = representations(6, 6)
    target = torch.tensor([0, -100, 2, 3, -100, 5])
    expected = F.cross_entropy(x @ y.T, target)
    torch.testing.assert_close(SimpleContrastiveLoss(tile_rows=2)(x, y, target), expected)
    for reduction in ("sum", "none"):
        value = SimpleContrastiveLoss(tile_rows=2)(x, y, target, reduction=reduction)
        torch.testing.assert_close(value, F.cross_entropy(x @ y.T, target, reduction=reduction))


X = torch.ones(4, 5)
MISUSE: dict[str, Callable[[], object]] = {
    "2 targets per query, got 4 queries and 4 targets": lambda: SimpleContrastiveLoss(1)(X, X),
    "n_hard_negatives": lambda: SimpleContrastiveLoss(-1),
    "temperature": lambda: SimpleContrastiveLoss(temperature=0),
    "tile_rows=0": lambda: SimpleContrastiveLoss(tile_rows=0),
    "symmetric": lambda: SimpleContrastiveLoss(1, symmetric=True),
    "expected .* tile_rows=0": lambda: tiled(F.mse_loss, tile_rows=0),
    "reduction": lambda: tiled(F.mse_loss, tile_rows=1, reduction="none"),
    "expected 4 rows in argument 'target'": lambda: tiled(lambda x, target: x.sum(), tile_rows=2, cut=("target",))(
        X, target=torch.zeros(3)
    ),
    "scalar loss of a tile": lambda: tiled(lambda x: x, tile_rows=2)(X),
    "query_closure": lambda: ContrastiveLossWithQueryClosure()(X, X, query_closure=lambda: X),
}


@pytest.mark.parametrize("words", MISUSE)
def test_bad_arguments_of_a_loss_are_named(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MISUSE[words]()


def test_no_gradient_is_computed_where_none_is_required() -> None:
    x, y = representations(4, 4)
    with torch.no_grad():
        assert not SimpleContrastiveLoss(tile_rows=2)(x, y).requires_grad
    loss = SimpleContrastiveLoss(tile_rows=2)(x.detach(), y)
    loss.backward()
    assert x.grad is None
    assert y.grad is not None


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("tile_rows", [None, 8])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, None),
        (torch.float64, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_a_scaled_loss_in_parts_is_as_exact_as_in_one_piece(
    dtype: torch.dtype, autocast: torch.dtype | None, tile_rows: int | None
) -> None:
    torch.manual_seed(0)
    given = [F.normalize(torch.randn(96, 8), dim=1).to(dtype) for _ in range(2)]
    loss_fn = SimpleContrastiveLoss(temperature=0.1, tile_rows=tile_rows)

    def results(loss_fn: Callable[..., Tensor], narrow: torch.dtype | None, kind: torch.dtype) -> list[Tensor]:
        x, y = (each.to(kind).requires_grad_() for each in given)
        with torch.autocast("cpu", dtype=narrow, enabled=narrow is not None):
            loss = loss_fn(x, y)
        (loss * 256).backward()
        return [loss.detach(), x.grad, y.grad]

    def whole(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ y.T * 10, torch.arange(96))

    exact, plainly = results(whole, None, torch.float64), results(whole, autocast, dtype)
    for best, one, mine in zip(exact, plainly, results(loss_fn, autocast, dtype), strict=True):
        assert mine.dtype == one.dtype
        allowed = (one.double() - best).norm() + 4 * torch.finfo(mine.dtype).eps * best.norm()
        assert (mine.double() - best).norm() <= allowed


def test_a_million_scores_never_exist_at_once() -> None:
    x, y = representations(1024, 1024, width=8)
    with Largest() as largest:
        loss = SimpleContrastiveLoss()(x, y)
        loss.backward()
    assert largest.elements <= x.numel() + y.numel()
    torch.testing.assert_close(loss, F.cross_entropy(x @ y.T, torch.arange(1024)))


@pytest.mark.usefixtures("large")
def test_a_loss_in_parts_is_not_differentiated_twice_in_silence() -> None:
    x, y = representations(64, 64, width=4)
    (gradient,) = torch.autograd.grad(SimpleContrastiveLoss(tile_rows=8)(x, y), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        gradient.sum().backward()


def test_sums_and_gradients_of_many_tiles_of_bfloat16_are_kept_in_32_bits() -> None:
    torch.manual_seed(0)
    given, y = torch.rand(1024, 4).bfloat16(), torch.rand(3, 4).bfloat16().requires_grad_()
    tiled(lambda p, q: (p @ q.T).float().sum(), tile_rows=1, reduction="sum")(given, y).backward()
    exact = given.double().sum(0).expand(3, 4)
    assert y.grad is not None
    assert float((y.grad.double() - exact).norm() / exact.norm()) < 0.01
    x = torch.ones(4096, 2, dtype=torch.bfloat16)
    for reduction, expected in (("mean", 2.0), ("sum", 8192.0)):
        loss = tiled(lambda p, how=reduction: getattr(p.sum(1), how)(), tile_rows=1, reduction=reduction)
        value = loss(x)
        assert value.dtype == torch.bfloat16
        assert value.item() == expected
